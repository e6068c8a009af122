"""The log-probability head where its weight is gone between forward and backward: ZeRO-3 and FSDP2, real ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DEADLINE_S = 120


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_are_right_although_the_weight_is_released_before_the_backward_pass(
    world: int, tmp_path: Path
) -> None:
    out = tmp_path / "report.json"
    shared = {
        **os.environ,
        "WORLD_SIZE": str(world),
        "FOREBAY_RENDEZVOUS": str(tmp_path / "meet"),
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.support.head_ranks", str(out)]
    ranks = [
        subprocess.Popen(command, env={**shared, "RANK": str(r), "LOCAL_RANK": str(r)}, stderr=subprocess.PIPE)
        for r in range(world)
    ]
    try:
        errors = [process.communicate(timeout=DEADLINE_S)[1].decode() for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * world, errors
    report = json.loads(out.read_text())
    assert sorted(report) == ["fsdp2 tied", "fsdp2 untied", "zero3 tied", "zero3 untied"]
    for name, case in report.items():
        assert case["released"], name
        assert case["moved"] > 1e-3, name
        assert case["gap"] < 5e-6, name
