"""`forebay lengths` as a user types it, on a real engine: interrupted, gone on with, answered from the cache."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq

FOREBAY = str(Path(sys.executable).with_name("forebay"))
SMALL = (
    "model.warm_start.steps=100",
    "data.maze.sizes={3: 1.0, 4: 1.0}",
    "data.train_prompts=512",
    "data.validation_prompts=8",
    "data.test_prompts=16",
    "lengths.profile_prompts=200",
    "lengths.samples=8",
    "generation.max_new_tokens=32",
)
PATIENCE_S = 240


def start(scratch):
    settings = (*SMALL, f"storage.scratch={scratch}", f"storage.uri=file://{scratch}/published")
    words = [word for text in settings for word in ("--set", text)]
    return subprocess.Popen(
        [FOREBAY, "lengths", "profiles/quickstart_cpu.yaml", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def newest_run(scratch):
    return max((scratch / "runs").iterdir(), key=lambda path: path.stat().st_mtime)


def report(scratch):
    return json.loads((newest_run(scratch) / "lengths" / "report.json").read_text())


def answers(scratch):
    """Responses of which the cache knows the lengths."""
    parts = scratch.glob("cache/lengths/*/*.parquet")
    return sum(len(lengths) for part in parts for lengths in pq.read_table(part)["lengths"].to_pylist())


def test_a_profile_is_interrupted_goes_on_and_is_then_answered_from_the_cache(tmp_path: Path) -> None:
    process = start(tmp_path)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not answers(tmp_path):
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, text) == (130, "forebay: interrupted\n")
    kept = answers(tmp_path)
    assert 0 < kept < 200 * 8
    assert not (newest_run(tmp_path) / "lengths").exists()

    text, _ = (process := start(tmp_path)).communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, text
    second, result = newest_run(tmp_path), report(tmp_path)
    # 200 prompts of 8 responses, and a greedy one of each of the 512, less what was there.
    assert result["asked"] == 200 * 8 + 512 - kept
    assert (result["profiled"], result["held_out"]) == (200, 50)
    assert (second / "logs" / "engine-0.log").exists()

    text, _ = (process := start(tmp_path)).communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, text
    third = newest_run(tmp_path)
    assert third != second
    assert not list((third / "logs").iterdir())
    assert report(tmp_path)["asked"] == 0
    assert "200 prompts, all from the cache" in text
    assert re.search(r"Spearman 0\.\d\d, Kendall 0\.\d\d on 50", text)
    for name in ("profile", "predictions"):
        tables = [pq.read_table(run / "lengths" / f"{name}.parquet") for run in (second, third)]
        assert tables[0] == tables[1]
    assert pq.read_table(third / "lengths" / "predictions.parquet").num_rows == 512
