"""`RunConfig`: a whole run, its sections and the checks across them."""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from forebay.config.base import Config
from forebay.config.sections import (
    ControlConfig,
    DataConfig,
    EvaluationConfig,
    GenerationConfig,
    LaunchConfig,
    LengthsConfig,
    ModelConfig,
    RewardConfig,
    ScheduleConfig,
    StorageConfig,
    TrainingConfig,
)

LAST_PORT = 65535

Mode = Literal["sync", "one_step_off", "fully_async"]


class RunConfig(Config):
    """One run. Every key of a profile is a field here or in a section."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")] = "run"
    """Name of the run; the run's id is this and the time."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Of data, warm start, schedule, sampling and trainer."""
    mode: Mode = "fully_async"
    """`sync`: generate, train, refresh, in turn. `one_step_off`: generate the next batch while training this one.
    `fully_async`: engines and trainer never wait for each other, within `control.max_staleness`."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    lengths: LengthsConfig = LengthsConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    generation: GenerationConfig = GenerationConfig()
    control: ControlConfig = ControlConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    storage: StorageConfig = StorageConfig()
    launch: LaunchConfig = LaunchConfig()

    @property
    def staleness_bound(self) -> float:
        """Largest allowed staleness in versions: 0 in `sync`, 1 in `one_step_off`."""
        return {"sync": 0.0, "one_step_off": 1.0}.get(self.mode, float(self.control.max_staleness))

    @property
    def work_in_progress(self) -> float | Literal["auto"]:
        """Outstanding groups allowed, in batches, before the staleness rule is asked."""
        if self.mode == "fully_async":
            return self.control.work_in_progress
        return {"sync": 1.0, "one_step_off": 2.0}[self.mode]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        gen, control, schedule = self.generation, self.control, self.schedule
        self._check_ports()
        if gen.max_new_tokens >= self.model.max_model_len:
            raise ValueError(
                f"generation.max_new_tokens ({gen.max_new_tokens}) leaves no room for a prompt in model.max_model_len "
                f"({self.model.max_model_len}): raise model.max_model_len or lower generation.max_new_tokens"
            )
        if schedule.minibatch_slack >= schedule.minibatch_prompts:
            raise ValueError(
                f"schedule.minibatch_slack ({schedule.minibatch_slack}) must be less than "
                f"schedule.minibatch_prompts ({schedule.minibatch_prompts})"
            )
        largest = schedule.minibatch_prompts + schedule.minibatch_slack
        if largest > control.batch_groups:
            raise ValueError(
                f"a minibatch may have {largest} prompts but control.batch_groups is {control.batch_groups}: "
                "lower schedule.minibatch_prompts"
            )
        if largest * gen.group_size > control.max_concurrent_samples:
            raise ValueError(
                f"a minibatch of {largest} prompts x generation.group_size {gen.group_size} does not fit "
                f"control.max_concurrent_samples {control.max_concurrent_samples}: raise it or lower the minibatch"
            )
        if self.mode == "fully_async" and control.work_in_progress != "auto" and control.work_in_progress < 1:
            raise ValueError(
                f"control.work_in_progress ({control.work_in_progress}) is less than one batch, so no batch could ever "
                "fill: set it to 1 or more"
            )
        within_bound = (int(self.staleness_bound) + 1) * control.sync_every
        credits = self.work_in_progress
        if control.require_batches > min(within_bound, control.queue.high, math.inf if credits == "auto" else credits):
            raise ValueError(
                f"control.require_batches ({control.require_batches}) could never be queued: it must not exceed "
                f"control.work_in_progress ({credits}), control.queue.high ({control.queue.high:g}) and the "
                f"{within_bound} batches within the staleness bound; lower it"
            )
        if control.queue.low > control.queue.high:
            raise ValueError(
                f"control.queue.low ({control.queue.low:g}) is above control.queue.high ({control.queue.high:g}): "
                "lower it or raise the other"
            )
        if control.queue.high < 1:
            raise ValueError(
                f"control.queue.high ({control.queue.high:g}) is less than one batch, so no batch could ever fill: set "
                "it to 1 or more"
            )
        if control.over_sampling > 1 and (self.mode == "fully_async" or not control.dynamic_sampling):
            raise ValueError(
                "control.over_sampling above 1 is for batches that are refilled behind a barrier: set "
                "control.dynamic_sampling=true and mode sync or one_step_off, or control.over_sampling=1"
            )
        if self.mode != "fully_async" and self.training.streaming:
            raise ValueError(
                f"training.streaming takes groups as they come, but mode {self.mode} trains whole batches: set "
                "mode=fully_async or training.streaming=false"
            )
        if self.training.micro_batch_tokens < self.model.max_model_len:
            raise ValueError(
                f"training.micro_batch_tokens ({self.training.micro_batch_tokens}) cannot hold one sequence of "
                f"model.max_model_len ({self.model.max_model_len}): raise it"
            )
        return self

    def _check_ports(self) -> None:
        base, engines, control = self.generation.base_port, self.generation.engines, self.control.port
        if base and base + engines - 1 > LAST_PORT:
            raise ValueError(
                f"generation.base_port ({base}) and {engines} engines go beyond port {LAST_PORT}: lower it"
            )
        if control and base <= control < base + engines:
            raise ValueError(
                f"control.port ({control}) is also an engine's port (generation.base_port {base}): change one"
            )
