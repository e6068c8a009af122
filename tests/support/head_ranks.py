"""One rank that makes one SGD step through a `LogprobHead` under ZeRO-3 and FSDP2: `python -m tests.support.head_ranks
OUT`.

Rank 0 writes OUT: {"<backend> <kind>": {"gap": largest difference of a weight after the step from plain autograd on
full logits, "moved": largest change of the weight matrix or vector that changed least, "released": whether the head's
weight was gone between forward and backward}}, for tied and untied heads.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from forebay.training import token_logprobs
from forebay.training.distributed import Ranks
from forebay.training.logprobs import LogprobHead

VOCABULARY, WIDTH, TOKENS, TEMPERATURE, MICRO_BATCHES = 50, 8, 21, 0.8, 2


class Model(nn.Module):
    """Tokens -> log-probabilities and entropies of targets."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = LogprobHead(WIDTH, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, targets: Tensor, full: bool = False) -> tuple[Tensor, Tensor]:
        hidden = self.middle(self.embedding(ids)).tanh()
        if not full:
            result: tuple[Tensor, Tensor] = self.head(hidden, targets, TEMPERATURE, True)
            return result
        every = (self.head(hidden) / TEMPERATURE).log_softmax(-1)
        return every.gather(-1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)


def batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [tuple(torch.randint(0, VOCABULARY, (2, TOKENS), generator=generator)) for _ in range(MICRO_BATCHES)]


def loss(result: tuple[Tensor, Tensor]) -> Tensor:
    return (result[0] * torch.linspace(-1, 2, TOKENS)).sum() + result[1].sum()


def plain(tied: bool, world: int) -> dict[str, Tensor]:
    """Weights after a step with the mean of the ranks' gradients."""
    model = Model(tied)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for ids, targets in [batch for rank in range(world) for batch in batches(rank)]:
        (loss(model(ids, targets, full=True)) / world).backward()
    optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def zero3(tied: bool, ranks: Ranks) -> tuple[dict[str, Tensor], bool]:
    import deepspeed
    from deepspeed.runtime.zero import GatheredParameters

    model = Model(tied)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            # By default nothing this small is ever released.
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
        },
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine: Any
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    released = []
    for ids, targets in batches(ranks.rank):
        result = loss(engine(ids, targets))
        released.append(model.head.weight.numel() == 0)
        engine.backward(result, scale_wrt_gas=False)
    engine.step()
    with GatheredParameters(list(model.parameters())):
        return {name: p.detach().clone() for name, p in model.named_parameters()}, all(released)


def fsdp2(tied: bool, ranks: Ranks) -> tuple[dict[str, Tensor], bool]:
    model = Model(tied)
    mesh = init_device_mesh("cpu", (ranks.world,))
    for part in [] if tied else [model.embedding, model.head]:
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    released = []
    for ids, targets in batches(ranks.rank):
        result = loss(model(ids, targets))
        released.append(isinstance(model.head.weight, DTensor))
        result.backward()
    optimizer.step()
    full = {n: p.full_tensor() if isinstance(p, DTensor) else p.detach() for n, p in model.named_parameters()}
    return full, all(released)


def main() -> None:
    torch.set_num_threads(1)
    token_logprobs.CPU_TILE = 100
    ranks = Ranks.join(60)
    report = {}
    for tied in (True, False):
        expected, start = plain(tied, ranks.world), dict(Model(tied).named_parameters())
        for backend in (zero3, fsdp2):
            found, released = backend(tied, ranks)
            assert found.keys() == expected.keys()
            report[f"{backend.__name__} {'tied' if tied else 'untied'}"] = {
                "gap": max(float((found[n] - expected[n]).abs().max()) for n in expected),
                "moved": min(float((found[n] - start[n]).abs().max()) for n in expected),
                "released": released,
            }
    if ranks.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(report))
    ranks.leave()


if __name__ == "__main__":
    main()
