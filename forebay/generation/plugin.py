"""What vLLM loads into each of its processes (entry point `vllm.general_plugins`): idempotent and cheap, no torch.

Invariant: importing this module imports nothing of vLLM; `register` is only called by vLLM itself.
"""

import importlib
import multiprocessing
import os
from typing import Any

from forebay.generation import engine_core

BACKEND = "forebay"
FORK_VARIABLE = "FOREBAY_FORK_ENGINE"
"""Set to 1 by `forebay.generation.server` on CPU."""
CORES_VARIABLE = "FOREBAY_ENGINE_CORES"
"""Set by `forebay.generation.server`: the cores of EngineCore, as in 0,1,2."""


def register() -> None:
    """Make the weight-transfer backend and the refresh known; on CPU let the API server fork its EngineCore."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "forebay.generation.weights", "SnapshotEngine")
    engine_core.install()
    if cores := os.environ.get(CORES_VARIABLE):
        engine_core.pin({int(core) for core in cores.split(",")})
    if os.environ.get(FORK_VARIABLE) == "1":
        _fork_engine_core()


def _fork_engine_core() -> None:
    """Start EngineCore with fork: it then need not import torch and vLLM again (about 8 CPU-seconds).

    vLLM sets `VLLM_WORKER_MULTIPROC_METHOD=spawn` on CPU whatever the environment says, hence this. It is safe there:
    no accelerator is open yet and, with OMP_NUM_THREADS=1, no thread pool exists.
    """
    engine_utils: Any = importlib.import_module("vllm.v1.engine.utils")
    engine_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
