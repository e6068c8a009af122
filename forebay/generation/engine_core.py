"""What Forebay adds to vLLM's own processes: a swap in one call, and versions in every chunk of a stream.

Invariants:
- New weights, their version and the fate of the KV cache change together, between two decoding steps.
- No request ever hits a prefix-cache block that other weights computed, in any refresh mode.
- These are the internals of vLLM 0.32 that Forebay leans on; all of them are here, in `forebay.generation.weights` and
  in `forebay.generation.twin`.
"""

import os
import time
from concurrent.futures import Future
from functools import wraps
from typing import Any

REFRESH = "forebay_refresh"
"""Called through `/collective_rpc`, but answered by the engine core itself."""
PAUSES = {"retract": "keep", "in_place": "keep", "abort": "abort", "drain": "wait"}
"""Refresh mode -> vLLM's way to come to a halt."""


def install() -> None:
    """Idempotent."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.output_processor import RequestState

    core: Any = EngineCore
    state: Any = RequestState
    if getattr(core.collective_rpc, "forebay", False):
        return
    core.collective_rpc = _answering_refreshes(core.collective_rpc)
    state._new_completion_output = _with_versions(state._new_completion_output)


def pin(cores: set[int]) -> None:
    """Let every EngineCore that starts from here on keep to these cores. Idempotent.

    Not the API server, which costs a third of what decoding a small model does: on the engine's only core it would
    take turns with decoding; so it runs where there is time to spare.
    """
    from vllm.v1.engine.core import EngineCore

    core: Any = EngineCore
    original = core.__init__
    if getattr(original, "forebay", False):
        return

    @wraps(original)
    def pinned(self: Any, *args: Any, **kwargs: Any) -> None:
        os.sched_setaffinity(0, cores)
        original(self, *args, **kwargs)

    pinned.forebay = True  # type: ignore[attr-defined]
    core.__init__ = pinned


def _answering_refreshes(original: Any) -> Any:
    @wraps(original)
    def collective_rpc(
        self: Any, method: Any, timeout: float | None = None, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if method == REFRESH:
            return refresh(self, **(kwargs or {}))
        return original(self, method, timeout, args, kwargs)

    collective_rpc.forebay = True  # type: ignore[attr-defined]
    return collective_rpc


def _with_versions(original: Any) -> Any:
    """vLLM tells the versions of a response's tokens at its end only; if the engine dies before, nobody knows them."""

    @wraps(original)
    def new_completion_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        if output.weight_versions is None:
            output.weight_versions = self._weight_version_spans()
        return output

    return new_completion_output


def refresh(core: Any, mode: str, version: str) -> Any:
    """Halt as `mode` says, swap in what is staged, name it `version`, go on.

    Returns [{pause_s, tokens_recomputed, tokens_discarded}], or a future of it if the engine is not idle yet. All
    tokens are counted by the scheduler; `pause_s` is by this process's clock, from the halt to the release. A decoding
    step under way is finished before the halt.
    """
    unfinished = list(core.scheduler.requests.values())
    record = {"pause_s": 0.0, "tokens_recomputed": 0, "tokens_discarded": 0}
    if mode == "abort":
        record["tokens_discarded"] = sum(request.num_output_tokens for request in unfinished)
    halting = core.pause_scheduler(mode=PAUSES[mode], clear_cache=False)

    def swap() -> list[dict[str, float]]:
        begin = time.monotonic()
        try:
            if mode == "in_place":
                _forget_prefixes(core.scheduler, version)
                core.reset_encoder_cache()  # images that are not read yet are read with the new weights
            else:
                record["tokens_recomputed"] = sum(request.num_computed_tokens for request in core.scheduler.running)
                core._reset_caches()
            core.model_executor.collective_rpc("update_weights", kwargs={"update_info": {"action": "swap"}})
            core.model_executor.collective_rpc("finish_weight_update")
            core.set_weight_version(version)
        finally:
            core.resume_scheduler()
        record["pause_s"] = time.monotonic() - begin
        return [record]

    return swap() if halting is None else _after(halting, swap, core)


def _after(halting: Future[Any], swap: Any, core: Any) -> Future[Any]:
    """As in vLLM's own `EngineCore.sleep`, but what has halted goes on: the idle loop has to be told."""
    from vllm.v1.engine import EngineCoreRequestType

    done = Future[Any]()

    def halted(future: Future[Any]) -> None:
        try:
            future.result()
            done.set_result(swap())
        except Exception as error:  # noqa: BLE001 (the caller gets it)
            done.set_exception(error)
        core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    halting.add_done_callback(halted)
    return done


def _forget_prefixes(scheduler: Any, version: str) -> None:
    """Empty the prefix cache, while running requests keep their blocks. What they add from now on, over old keys, is
    hashed with a salt of its own, so that nobody else finds it."""
    pool = scheduler.kv_cache_manager.block_pool
    for block in pool.blocks:
        if block.block_hash is not None:
            pool._maybe_evict_cached_block(block)
    for request in scheduler.requests.values():
        request.cache_salt = f"kept through the refresh to version {version}"
        request.block_hashes.clear()
        request.update_block_hashes()
