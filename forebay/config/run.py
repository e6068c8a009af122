"""`RunConfig`: a whole run, its sections and the checks across them."""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from forebay.config.algorithm import AlgorithmConfig, CriticConfig
from forebay.config.base import Config
from forebay.config.data import DataConfig
from forebay.config.hardware import HardwareConfig
from forebay.config.sections import (
    ControlConfig,
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
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    storage: StorageConfig = StorageConfig()
    launch: LaunchConfig = LaunchConfig()
    hardware: HardwareConfig = HardwareConfig()

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

    @property
    def has_barrier(self) -> bool:
        """Whether the trainer waits for the last response of each batch: longer ones are then better started first."""
        return self.mode != "fully_async" or self.staleness_bound == 0

    @property
    def schedule_mode(self) -> Mode:
        """The mode whose order of prompts fits: `fully_async` without staleness is `sync`."""
        return "sync" if self.has_barrier and self.mode == "fully_async" else self.mode

    @property
    def refresh_all(self) -> bool:
        """Whether all engines take new weights at the same time."""
        chosen = self.control.refresh_rollout
        return self.mode != "fully_async" if chosen == "auto" else chosen == "all"

    @property
    def streaming(self) -> bool:
        """Whether the trainer takes groups as they come."""
        chosen = self.training.streaming
        return self.mode == "fully_async" and not self._whole_batches if chosen == "auto" else chosen

    @property
    def _whole_batches(self) -> str:
        """The setting, if any, that needs the whole batch before its first gradient."""
        if self.algorithm.advantage in ("reinforce_baseline", "gae"):
            return f"algorithm.advantage {self.algorithm.advantage}"
        for name in ("updates_per_batch", "mini_batches"):
            if (count := getattr(self.training, name)) > 1:
                return f"training.{name} {count}"
        return "algorithm.kl reward" if self.algorithm.kl == "reward" else ""

    @property
    def concurrent_samples(self) -> int:
        """A group starts on an engine while fewer responses than this are in flight there."""
        return self.control.max_concurrent_samples or self.generation.max_num_seqs

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self._check_ports()
        self._check_lengths()
        self._check_schedule()
        self._check_queue()
        self._check_mode()
        self._check_training()
        self._check_lora()
        self._check_algorithm()
        if self.evaluation.every_versions and not self.data.validation_prompts:
            raise ValueError(
                "evaluation.every_versions asks the validation prompts, but data.validation_prompts is 0: raise it, or "
                "set evaluation.every_versions=0"
            )
        return self

    def _check_lengths(self) -> None:
        gen, most = self.generation, self.model.max_model_len
        if gen.max_new_tokens >= most:
            raise ValueError(
                f"generation.max_new_tokens ({gen.max_new_tokens}) leaves no room for a prompt in model.max_model_len "
                f"({most}): raise model.max_model_len or lower generation.max_new_tokens"
            )
        if self.training.micro_batch_tokens < most:
            raise ValueError(
                f"training.micro_batch_tokens ({self.training.micro_batch_tokens}) cannot hold one sequence of "
                f"model.max_model_len ({most}): raise it"
            )
        assumed = self.lengths.assumed
        if assumed is not None and assumed.prompt_tokens + gen.max_new_tokens > most:
            raise ValueError(
                f"lengths.assumed.prompt_tokens ({assumed.prompt_tokens}) and generation.max_new_tokens "
                f"({gen.max_new_tokens}) exceed model.max_model_len ({most}): lower one or raise the last"
            )
        if self.lengths.predictor == "history" and not self.lengths.history:
            raise ValueError(
                "lengths.predictor history needs lengths.history, the ledger.parquet or profile.parquet of an earlier "
                "run: name it, or choose another predictor"
            )

    def _check_schedule(self) -> None:
        schedule, mode = self.schedule, self.mode
        largest = schedule.minibatch_prompts + (schedule.minibatch_slack if schedule.policy == "asp" else 0)
        if schedule.policy == "asp" and schedule.minibatch_slack >= schedule.minibatch_prompts:
            raise ValueError(
                f"schedule.minibatch_slack ({schedule.minibatch_slack}) must be less than "
                f"schedule.minibatch_prompts ({schedule.minibatch_prompts})"
            )
        if largest > self.control.batch_groups:
            raise ValueError(
                f"a minibatch may have {largest} prompts but control.batch_groups is {self.control.batch_groups}: "
                "lower schedule.minibatch_prompts"
            )
        if schedule.window < schedule.minibatch_prompts:
            raise ValueError(
                f"schedule.window ({schedule.window}) holds no minibatch of schedule.minibatch_prompts "
                f"({schedule.minibatch_prompts}): raise it"
            )
        first = schedule.policy == "longest_first" or (schedule.policy == "auto" and mode == "sync")
        if schedule.minibatch_barrier and first:
            raise ValueError(
                "schedule.minibatch_barrier keeps an engine to one minibatch, but longest_first (schedule.policy, or "
                f"auto in mode {mode}) sends prompts one by one: choose another policy, or set it to false"
            )

    def _check_queue(self) -> None:
        control, credits = self.control, self.work_in_progress
        if self.mode == "fully_async" and credits != "auto" and credits < 1:
            raise ValueError(
                f"control.work_in_progress ({credits}) is less than one batch, so no batch could ever fill: set it to "
                "1 or more"
            )
        within_bound = (int(self.staleness_bound) + 1) * control.sync_every
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

    def _check_mode(self) -> None:
        control, barrier = self.control, self.mode != "fully_async"
        if control.over_sampling > 1 and not (barrier and control.dynamic_sampling):
            raise ValueError(
                "control.over_sampling above 1 is for batches that are refilled behind a barrier: set "
                "control.dynamic_sampling=true and mode sync or one_step_off, or control.over_sampling=1"
            )
        if barrier and self.training.streaming is True:
            raise ValueError(
                f"training.streaming takes groups as they come, but mode {self.mode} trains whole batches: set "
                "mode=fully_async or training.streaming=false"
            )

    def _check_training(self) -> None:
        training = self.training
        if training.backend == "fsdp2" and training.offload == "optimizer":
            raise ValueError(
                "training.offload optimizer is for backend deepspeed; fsdp2 keeps optimizer states where the "
                "parameters are: set training.offload=all or none"
            )
        if training.backend == "deepspeed" and training.offload != "none":
            needed = 3 if training.offload == "all" else 1
            if training.zero_stage < needed:
                raise ValueError(
                    f"training.offload {training.offload} needs training.zero_stage {needed} or more, not "
                    f"{training.zero_stage}: raise it or set training.offload=none"
                )

    def _check_lora(self) -> None:
        if self.training.lora is None:
            return
        if self.algorithm.kl != "none" and self.algorithm.reference == "offload":
            raise ValueError(
                "algorithm.reference offload keeps a copy of the start model in CPU memory, but with training.lora "
                "there is none (the reference is the model without its adapters): set algorithm.reference=copy"
            )
        if self.algorithm.router_aux_loss:
            raise ValueError(
                "algorithm.router_aux_loss trains the router, which training.lora leaves as it is: set it to 0, or "
                "training.lora=null"
            )

    def _check_algorithm(self) -> None:
        algorithm, budget = self.algorithm, self.generation.max_new_tokens
        if algorithm.overlong_buffer and "overlong" in self.reward.weights:
            raise ValueError(
                "reward.weights has overlong and algorithm.overlong_buffer is set: both punish length; remove one"
            )
        if algorithm.overlong_buffer > budget:
            raise ValueError(
                f"algorithm.overlong_buffer ({algorithm.overlong_buffer}) is more than generation.max_new_tokens "
                f"({budget}): lower it"
            )
        if self.training.streaming is True and self._whole_batches:
            raise ValueError(
                f"{self._whole_batches} needs the whole batch before its first gradient, but training.streaming takes "
                "groups as they come: set training.streaming=false"
            )
        if self.generation.group_size == 1 and (algorithm.advantage != "gae" or self.control.dynamic_sampling):
            name = "control.dynamic_sampling" if algorithm.advantage == "gae" else f"advantage {algorithm.advantage}"
            raise ValueError(
                f"{name} compares the responses of a group, but generation.group_size is 1: set it to 2 or more, or "
                "algorithm.advantage=gae and control.dynamic_sampling=false"
            )
        if algorithm.advantage == "gae" and self.critic.warmup_steps >= self.training.steps:
            raise ValueError(
                f"critic.warmup_steps ({self.critic.warmup_steps}) leaves no step of training.steps "
                f"({self.training.steps}) to the policy: lower it"
            )
        if algorithm.dual_clip is not None and algorithm.policy_loss != "ppo":
            raise ValueError(
                "algorithm.dual_clip bounds the ppo loss, but algorithm.policy_loss is "
                f"{algorithm.policy_loss}: set it to null"
            )

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
