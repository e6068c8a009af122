"""How the Training Unit is started: a command, an environment, a job file. Imports no torch.

Invariants:
- The run's token is in the environment only, neither in the command nor in the job file.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from forebay.run import RunContext


def trainer_command(
    run: RunContext, control_url: str, cores: Sequence[int] | None
) -> tuple[list[str], dict[str, str], Path]:
    """(argv, additions to the environment, the job file, written). One rank is started directly, several through
    `forebay.training.ranks`. `cores`: what the trainer is pinned to, shared out as threads; None: all."""
    ranks = run.config.training.ranks
    job = run.root / "trainer.json"
    job.write_text(
        json.dumps(
            {
                "run_id": run.run_id,
                "scratch": str(run.scratch),
                "control_url": control_url,
                "config": run.config.model_dump(mode="json"),
            },
            indent=1,
        ),
        encoding="utf-8",
    )
    module = ["forebay.training.worker"] if ranks == 1 else ["forebay.training.ranks", "--ranks", str(ranks)]
    argv = [sys.executable, "-m", *module, "--job", str(job)]
    available = len(cores) if cores is not None else len(os.sched_getaffinity(0))
    cuda = Path("/dev/nvidiactl").exists()
    environment = {
        "FOREBAY_TOKEN": run.token,
        "OMP_NUM_THREADS": str(max(1, available // ranks)),
        "DS_ACCELERATOR": "cuda" if cuda else "cpu",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        # Ranks of one host talk over loopback only.
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    return argv, environment, job
