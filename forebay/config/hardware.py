"""The devices that a profile is meant for. Imports no torch."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from forebay.config.base import Config
from forebay.config.sections import Positive


class HardwareConfig(Config):
    """The devices that a profile is meant for. `forebay plan PROFILE --dry-run` holds the memory that a run needs
    against them; a run itself does not look at this."""

    devices: Positive | None = None
    """Accelerators in all. The trainer takes one for each of `training.ranks`, an engine one for each of vLLM's
    tensor- and pipeline-parallel ranks (`generation.extra_args`); no device serves both. null: as many as needed."""
    device_memory_gib: Annotated[float, Field(gt=0)] | None = None
    """Memory of one accelerator; null: unknown, nothing is refused."""
    reserve_gib: Annotated[float, Field(ge=0)] = 4.0
    """Of it, kept for the runtime: its context, communication buffers, captured graphs, fragmentation."""
    devices_per_host: Positive = 8
    """Accelerators of one host, which share its CPU memory."""
    host_memory_gib: Annotated[float, Field(gt=0)] | None = None
    """CPU memory of one host; null: unknown, nothing is refused."""

    @model_validator(mode="after")
    def _room(self) -> Self:
        if self.device_memory_gib is not None and self.reserve_gib >= self.device_memory_gib:
            raise ValueError(
                f"hardware.reserve_gib ({self.reserve_gib:g}) leaves nothing of hardware.device_memory_gib "
                f"({self.device_memory_gib:g}): lower the one or raise the other"
            )
        return self
