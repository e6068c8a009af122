"""What vLLM loads into each of its processes (entry point `vllm.general_plugins`): idempotent and cheap, no torch.

Invariant: importing this module imports nothing of vLLM; `register` is only called by vLLM itself.
"""

import importlib
import importlib.util
import multiprocessing
import os
import sys
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
    if importlib.util.find_spec("torchvision") is None:
        _images_without_videos()
    if os.environ.get(FORK_VARIABLE) == "1":
        _fork_engine_core()


def _images_without_videos() -> None:
    """transformers builds a Qwen-VL model's processor only together with its part for videos, which needs torchvision,
    and that has no CPU build on PyPI; the part for images has a variant without it. Nobody sends videos here, and
    vLLM only asks the processor how large images are."""

    class NoVideos(dict[str, Any]):  # it is printed as JSON
        valid_kwargs = importlib.import_module("transformers.processing_utils").VideosKwargs

    family = "transformers.models.qwen2_vl.image_processing"
    without = importlib.import_module(f"{family}_pil_qwen2_vl")
    if sys.modules.get(f"{family}_qwen2_vl") is without:
        return  # done before
    sys.modules[f"{family}_qwen2_vl"] = without
    auto: Any = importlib.import_module("transformers.models.auto.video_processing_auto").AutoVideoProcessor
    processing: Any = importlib.import_module("transformers.processing_utils").ProcessorMixin
    check = processing.check_argument_for_proper_class

    def checked(self: Any, name: str, argument: Any) -> Any:
        return None if isinstance(argument, NoVideos) else check(self, name, argument)

    processing.check_argument_for_proper_class = checked
    auto.from_pretrained = classmethod(lambda cls, *arguments, **options: NoVideos())


def _fork_engine_core() -> None:
    """Start EngineCore with fork: it then need not import torch and vLLM again (about 8 CPU-seconds).

    vLLM sets `VLLM_WORKER_MULTIPROC_METHOD=spawn` on CPU whatever the environment says, hence this. It is safe there:
    no accelerator is open yet and, with OMP_NUM_THREADS=1, no thread pool exists.
    """
    engine_utils: Any = importlib.import_module("vllm.v1.engine.utils")
    engine_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
