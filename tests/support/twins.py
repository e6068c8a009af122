"""Tiny twins of the profiles for accelerators: the profile itself with the keys below changed, so that it cannot drift
from what it stands for.

What stays is what decides the path: mode, algorithm, critic, corrections, schedule, refresh, backend, ZeRO stage,
offloading, LoRA, precision, kind of data.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from forebay.config import RunConfig, load_profile

PROFILES = Path(__file__).resolve().parents[2] / "profiles"
SMALLER = (
    "model.max_model_len=160",
    "data.columns={}",
    "data.train_prompts=32",
    "data.validation_prompts=2",
    "data.test_prompts=4",
    "reward.weights={'tests.support.twin_rewards:spread': 1.0}",  # a random model gets no answer right
    "reward.truncated=score",
    "reward.workers=1",
    "lengths={predictor: features}",
    "schedule.minibatch_prompts=2",
    "schedule.minibatch_slack=1",
    "schedule.period_minibatches=2",
    "generation.engines=1",
    "generation.extra_args=[]",
    "generation.group_size=4",
    "generation.max_new_tokens=24",
    "generation.max_num_seqs=16",
    "generation.kv_cache=16M",
    "control.batch_groups=4",
    "training.steps=3",
    "training.ranks=1",
    "training.learning_rate=1.0e-3",  # so that the weights move in bfloat16
    "training.warmup_steps=0",
    "training.micro_batch_tokens=256",
    "evaluation={prompts: 4, examples: 1, timeout_s: 120}",
    "storage.min_free_gb=0.5",
)
"""Of every twin."""
SUMS = "data.source=builtin:arithmetic"
TWINS: dict[str, tuple[str, ...]] = {
    "qwen3_4b_grpo": ("model.path=builtin:random-qwen3", SUMS),
    "qwen2_5_math_7b_dapo": (
        "model.path=builtin:random-qwen2",
        SUMS,
        "control.sync_every=2",
        "control.require_batches=2",
        "training.steps=4",
        "algorithm.overlong_buffer=12",
    ),
    "qwen2_5_vl_7b_geo3k": (
        "model.path=builtin:random-qwen2_5_vl",
        "data.source=builtin:shapes",
        "control.sync_every=2",
        "control.require_batches=2",
        "training.steps=4",
    ),
    "qwen2_7b_ppo": ("model.path=builtin:random-qwen2", SUMS, "generation.group_size=1"),
    "qwen3_30b_a3b_asp": ("model.path=builtin:random-qwen3_moe", SUMS, "training.ranks=2"),
    "qwen3_32b_asp": (
        "model.path=builtin:random-qwen3",
        SUMS,
        "lengths={predictor: length_lm, profile_prompts: 4, samples: 2}",
    ),
    "telecom_retrain": ("model.path=builtin:random-qwen3",),
}
"""Profile -> what else is changed in it: the model's architecture, the data, and what would not fit the small sizes.
The lengths of `qwen3_32b_asp` are told by the profile's own kind of predictor, of the start model's size."""


def twin(name: str, scratch: Path, more: Sequence[str] = ()) -> RunConfig:
    """The tiny twin of `profiles/NAME.yaml`."""
    settings = [*SMALLER, *TWINS[name], f"storage.scratch={scratch}", *more]
    if name == "telecom_retrain":
        settings.append(f"data.source={telecom_sample(scratch / 'telecom.jsonl')}")
    return load_profile(PROFILES / f"{name}.yaml", settings)


def telecom_sample(file: Path) -> Path:
    """A team's own file: questions on operations, and tool calls whose answer is a JSON object."""
    with file.open("w", encoding="utf-8") as lines:
        for n in range(25):
            asked = f"A cell of {n + 3} carriers, {5 * (n % 4 + 1)} MHz each: MHz in all?"
            lines.write(json.dumps({"prompt": asked, "answer": (n + 3) * 5 * (n % 4 + 1)}) + "\n")
            call = {"name": "reset_port", "arguments": {"node": f"bts-{n}", "port": n % 8}}
            chat = [{"role": "user", "content": f"Port {n % 8} of bts-{n} flaps. Which call resets it?"}]
            lines.write(json.dumps({"prompt": chat, "answer": call, "verifier": "json_call"}) + "\n")
    return file
