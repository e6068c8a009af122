"""The trainer's processes as one: start, messages from rank 0, sums, exit.

Invariants:
- Messages between ranks are bytes over gloo; nothing is pickled.
- Every collective has the time-out of a step.
- On one host nothing listens: ranks meet in a file, gloo and NCCL use the loopback interface.
"""

import datetime
import logging
import os
import sys
import warnings
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, HashStore, Store

RENDEZVOUS = "FOREBAY_RENDEZVOUS"
"""Environment variable: file in which the ranks of one host meet. Without it, torchrun's MASTER_ADDR is used."""


class Message(IntEnum):
    """What rank 0 tells the others."""

    WAIT = 0
    """No batch yet; said again and again, so that nobody's time-out passes while the trainer starves."""
    BATCH = 1
    STOP = 2


@dataclass(frozen=True)
class Ranks:
    """This process among its equals."""

    rank: int
    world: int
    device: torch.device
    group: dist.ProcessGroup
    """gloo, for CPU tensors, whatever the backend of the gradients is."""

    @classmethod
    def join(cls, timeout_s: float) -> "Ranks":
        """Meet the other ranks (RANK and WORLD_SIZE from the environment; alone without them)."""
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        cuda = torch.cuda.is_available()
        local = int(os.environ.setdefault("LOCAL_RANK", "0"))  # DeepSpeed insists on it
        device = torch.device("cuda", local) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(device)
        timeout = datetime.timedelta(seconds=timeout_s)
        store = _store(world)
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=store,
            rank=rank if store else -1,
            world_size=world if store else -1,
            timeout=timeout,
        )
        group = dist.new_group(backend="gloo", timeout=timeout) if cuda else dist.group.WORLD
        assert group is not None
        _quiet_deepspeed(timeout, cuda)
        return cls(rank, world, device, group)

    def send(self, kind: Message, body: bytes = b"") -> None:
        """Rank 0: tell the others."""
        if self.world > 1:
            dist.broadcast(torch.tensor([kind, len(body)]), 0, group=self.group)
            if body:
                dist.broadcast(torch.frombuffer(bytearray(body), dtype=torch.uint8), 0, group=self.group)

    def receive(self) -> tuple[Message, bytes]:
        """Other ranks: what rank 0 says next, WAIT left out."""
        while True:
            header = torch.zeros(2, dtype=torch.int64)
            dist.broadcast(header, 0, group=self.group)
            kind, size = Message(int(header[0])), int(header[1])
            body = torch.empty(size, dtype=torch.uint8)
            if size:
                dist.broadcast(body, 0, group=self.group)
            if kind is not Message.WAIT:
                return kind, body.numpy().tobytes()

    def sum(self, values: Tensor) -> Tensor:
        """Sum over ranks of a CPU tensor, in place."""
        if self.world > 1:
            dist.all_reduce(values, group=self.group)
        return values

    def max(self, values: Tensor) -> Tensor:
        """Maximum over ranks of a CPU tensor, in place."""
        if self.world > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values

    def leave(self) -> NoReturn:
        """Exit 0 when all ranks are here. Interpreter shutdown is skipped: with live gloo threads it can abort."""
        if self.world > 1:
            dist.barrier(group=self.group)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _store(world: int) -> Store | None:
    if RENDEZVOUS in os.environ:
        return FileStore(str(Path(os.environ[RENDEZVOUS])), world)
    return HashStore() if "WORLD_SIZE" not in os.environ else None


def _quiet_deepspeed(timeout: datetime.timedelta, cuda: bool) -> None:
    """Put DeepSpeed on top of the process group that exists, without its compilations and its talk."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if cuda else "cpu")
    # DeepSpeed calls functions that torch has deprecated, several times a step.
    warnings.filterwarnings("ignore", message=r".*torch\.distributed\.\w+. is deprecated", category=FutureWarning)
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.utils.logger.setLevel(logging.ERROR)
    if not cuda:
        # Its shared-memory collectives are compiled at first use, which takes a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        "nccl" if cuda else "gloo", auto_mpi_discovery=False, verbose=False, timeout=timeout, dist_init_required=False
    )
