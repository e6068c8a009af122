"""One rank that trains the same batches on one backend after another: `python -m tests.support.backend_traces JOB`.

JOB is a JSON file: {"scratch", "run_id", "out" (a folder), "batches" and "whole" (for each step its chunks, each a body
in hex), "probe" ([prompt, response] to evaluate in the middle of each step), "cases": {name: {"config", "batches"
(which of the two), "resume_at" (a step or null), "persistent", "shard_bytes", "run_id" if it is another
one, and "measured" if memory is to be looked at}}}.
Each rank writes `<name>.<rank>.json`, rank 0 also `<name>.safetensors`, the full weights at the end, and
`<name>.snapshot.safetensors`, what engines would get.
"""

import gc
import json
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from forebay.config import parse_config
from forebay.run import RunContext
from forebay.training import backend, deepspeed_backend, fsdp2, zero
from forebay.training.batches import decode_chunk
from forebay.training.distributed import Ranks
from forebay.training.engine import TrainEngine
from forebay.training.packing import TrainSequence, pack

TIMEOUT_S = 60
MEASURED_AT = 3
"""Step at whose end, before the update, memory is looked at: moments are there, and gradients."""
BUCKET = 10**8
"""Bytes; a tiny model has no tensor so large."""


def main() -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    ranks = Ranks.join(TIMEOUT_S)
    for name, case in job["cases"].items():
        train(name, case, job, ranks)
    ranks.leave()


def train(name: str, case: dict[str, Any], job: dict[str, Any], ranks: Ranks) -> None:
    zero.PERSISTENT_ELEMENTS, backend.SHARD_BYTES = case["persistent"], case["shard_bytes"]
    run = RunContext(
        parse_config(case["config"], name), case.get("run_id", job["run_id"]), Path(job["scratch"]), "token"
    )
    allocation, new, states = Allocation(), States() if case.get("measured") else None, 0
    engine = TrainEngine(run, ranks)
    prompt, response = job["probe"]
    probe = pack([TrainSequence(prompt, response, [0.0] * len(response), 0.0, True)], engine._pictures)
    metrics, seconds, evaluated, values = [], [], [], []
    for step, bodies in enumerate(job[case["batches"]], 1):
        began = time.perf_counter()
        for body in bodies:
            budget = run.config.generation.max_new_tokens
            engine.accumulate(decode_chunk(bytes.fromhex(body), run.config.algorithm, budget))
            logprobs, _ = engine._backend.evaluate(probe)
        if engine._critic:
            values.append(engine._critic.values(probe).tolist())
        if new is not None and step == MEASURED_AT:
            states = new.nbytes(engine)
        metrics.append(engine.update(step))
        seconds.append(time.perf_counter() - began)
        evaluated.append(logprobs[: len(response)].tolist())
        if step == case["resume_at"]:
            state = engine.state()
            engine = TrainEngine(run, ranks)
            engine.load_state(state)
    held = Held()
    with held:
        sizes = [sum(tensor.nbytes for _, tensor in shard) for shard in engine.shards()]
    shards = list(engine.shards())
    out = Path(job["out"])
    result = {
        "metrics": metrics,
        "seconds": seconds,
        "evaluated": evaluated,
        "values": values,
        "shard_bytes": sizes,
        "most_held": held.most,
        "states": states,
        "most_allocated": allocation.most,
        "masters": sum(t.numel() for n, t in engine.state().items() if n.endswith(backend.MASTER)),
    }
    snapshot = {n: t for shard in engine.snapshot_shards() for n, t in shard}
    (out / f"{name}.{ranks.rank}.json").write_text(json.dumps(result))
    if ranks.rank == 0:
        save_file({n: t for shard in shards for n, t in shard}, out / f"{name}.safetensors")
        save_file(snapshot, out / f"{name}.snapshot.safetensors")


class Allocation:
    """Watches how many elements are whole at a time while a model is built."""

    def __init__(self) -> None:
        self.most = 0
        self._given: list[weakref.ref[nn.Parameter]] = []
        for module in (zero, deepspeed_backend, fsdp2):
            module.allocate = self._allocate  # type: ignore[attr-defined]

    def _allocate(self, *arguments: Any) -> Iterator[nn.Parameter]:
        for parameter in backend.allocate(*arguments):
            self._given.append(weakref.ref(parameter))
            whole = [p for p in (given() for given in self._given) if p is not None]
            self.most = max(self.most, sum(p.data.numel() for p in whole))
            del whole
            yield parameter


class States:
    """What has come to be held since it was made, by Python or as the model's gradients; DeepSpeed's fixed buckets left
    out."""

    def __init__(self) -> None:
        self._before = _tensors()  # kept, so that no storage takes the place of one of them

    def nbytes(self, engine: TrainEngine) -> int:
        """Without the parts of other cases that are still there."""
        old = {tensor.untyped_storage().data_ptr() for tensor in self._before}
        tensors = _tensors() + [_plain(p.grad) for p in engine._lm.parameters() if p.grad is not None]
        storages = {s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in tensors)}
        return sum(size for place, size in storages.items() if size < BUCKET and place not in old)


def _tensors() -> list[torch.Tensor]:
    gc.collect()
    found = [_plain(o) for o in gc.get_objects() if isinstance(o, torch.Tensor)]
    return [tensor for tensor in found if tensor.device.type == "cpu"]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Held(TorchDispatchMode):
    """Bytes of tensors that are made within a `with` and held at the same time, at most. What gloo's threads hold for
    themselves is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            self._see(tensor, new=False)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            self._see(tensor, new=True)
        return result

    def _see(self, tensor: Any, *, new: bool) -> None:
        if not isinstance(tensor, torch.Tensor) or type(tensor) not in (torch.Tensor, nn.Parameter):
            return
        storage = tensor.untyped_storage()
        key, nbytes = id(storage), storage.nbytes() if new else 0
        if key not in self._known:
            self._known[key] = weakref.ref(storage, lambda _: self._gone(key, nbytes))
            self.now += nbytes
            self.most = max(self.most, self.now)

    def _gone(self, key: int, nbytes: int) -> None:
        del self._known[key]
        self.now -= nbytes


if __name__ == "__main__":
    main()
