"""What the Control Unit and the trainer say to each other, as msgpack maps. Never pickle.

`POST /v1/batches/next` {step} -> 200 batch | 204 not yet, ask again | 410 {reason}: the run is over
    batch: {step, version, groups, complete}. With {step, streaming: true, received: m} the groups of the step after
    the first m come as they are ready, `complete` with the last ones.
`POST /v1/steps`        {step, train_wait_s, train_s, publish_s, metrics}
`POST /v1/snapshots`    {version, path, manifest_sha256}
`POST /v1/checkpoints`  {step}: the trainer can go on from after this step
"""

from typing import Any, TypeVar

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from forebay.control.controller import Batch, Group
from forebay.errors import RunError

MEDIA_TYPE = "application/msgpack"


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BatchRequest(_Message):
    """The trainer wants the batch of this step (1 is the first)."""

    step: int = Field(ge=1)
    streaming: bool = False
    received: int = Field(default=0, ge=0)
    """Groups of this step that the trainer has (streaming only)."""


class StepReport(_Message):
    """The trainer has done a step. Times in seconds; `train_wait_s` is the wait for its batch."""

    step: int = Field(ge=1)
    train_wait_s: float = Field(ge=0)
    train_s: float = Field(ge=0)
    publish_s: float = Field(ge=0)
    metrics: dict[str, float]


class CheckpointReport(_Message):
    """The trainer's state after this step is safe on disk."""

    step: int = Field(ge=1)


class SnapshotReport(_Message):
    """A snapshot lies complete on disk."""

    version: int = Field(ge=1)
    path: str
    manifest_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


MessageT = TypeVar("MessageT", bound=_Message)


def unpack(kind: type[MessageT], body: bytes) -> MessageT:
    """Decode and validate a message; raises `RunError` saying what is wrong with it."""
    try:
        return kind.model_validate(msgpack.unpackb(body))
    except (ValueError, msgpack.UnpackException, ValidationError) as error:
        raise RunError(f"control: a malformed {kind.__name__}: {' '.join(str(error).split())[:200]}") from None


def pack_batch(batch: Batch, complete: bool = True) -> bytes:
    """The batch as the trainer reads it: only groups that teach, each with its staleness. `complete`: these are the
    step's last ones."""
    return bytes(
        msgpack.packb(
            {
                "step": batch.step,
                "version": batch.version,
                "complete": complete,
                "groups": [_group(group, batch.version) for group in batch.groups],
            }
        )
    )


def _group(group: Group, version: int) -> dict[str, Any]:
    return {
        "group_id": group.group_id,
        "prompt_ids": group.prompt.ids,
        "images": group.prompt.images,
        "staleness": version - group.oldest_version,
        "samples": [
            {
                "ids": sample.ids,
                "logprobs": sample.logprobs,
                "reward": reward,
                "oldest_version": sample.oldest_version,
            }
            for sample, reward in zip(group.samples, group.rewards, strict=True)
        ],
    }
