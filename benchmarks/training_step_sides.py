"""The two sides of `benchmarks.training_step`, each in a process of its own.

Invariants:
- A side makes one optimizer step each time it is told to, and answers with what it took: {"wall_s", "cpu_s", "loss",
  "grad_norm"}. Nothing of the other side runs in between unless the parent says so.
- Preparing the batch (decoding it here, padding it there) and logging are outside the clock on both sides.
"""

import os
import tempfile
import time
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP_NORM = 1e-5, (0.9, 0.95), 0.0, 1.0
CLIP_LOW, CLIP_HIGH = 0.2, 0.28


@dataclass(frozen=True)
class Task:
    """What both sides train; each looks at its own micro-batch."""

    model: Path
    """Hugging Face folder."""
    groups: list[dict[str, Any]]
    """As the Control Unit sends them; all of one size."""
    advantages: list[float]
    """One for each response, as our trainer computes them from the rewards."""
    dtype: str
    threads: int
    recompute: bool
    """Activations in the backward pass."""
    steps: int
    longest_prompt: int
    longest_response: int
    tokens: int
    """Of prompts and responses, without padding."""
    flops: float
    """What a step needs."""
    packed_tokens: int
    """Ours: tokens in a micro-batch."""
    padded_rows: int
    """TRL's: sequences in a micro-batch."""

    @property
    def samples(self) -> list[dict[str, Any]]:
        return [{"prompt_ids": group["prompt_ids"], **sample} for group in self.groups for sample in group["samples"]]


class Clock:
    """Wall and processor time of this process."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        return {"wall_s": time.perf_counter() - self._wall, "cpu_s": time.process_time() - self._cpu}


def ours(connection: Connection, task: Task) -> None:
    """The engine of our trainer, as its worker drives it."""
    _settle(task.threads)
    import msgpack

    from forebay.config import parse_config
    from forebay.run import RunContext
    from forebay.training.batches import decode_chunk
    from forebay.training.distributed import Ranks
    from forebay.training.engine import TrainEngine

    with tempfile.TemporaryDirectory() as scratch:
        longest = task.longest_prompt + task.longest_response
        settings = {
            "model": {"max_model_len": longest + 1, "dtype": task.dtype},
            "generation": {"max_new_tokens": task.longest_response},
            "storage": {"scratch": scratch},
            "algorithm": {"advantage": "grpo", "correction": "behaviour", "clip_low": CLIP_LOW, "clip_high": CLIP_HIGH},
            "training": {
                "steps": task.steps,
                "learning_rate": LEARNING_RATE,
                "warmup_steps": 0,
                "betas": BETAS,
                "weight_decay": WEIGHT_DECAY,
                "grad_clip": CLIP_NORM,
                "micro_batch_tokens": max(task.packed_tokens, longest + 1),
                "activation_checkpointing": task.recompute,
            },
        }
        run = RunContext.create(parse_config(settings, "benchmark"))
        run.start_model.symlink_to(task.model)
        engine = TrainEngine(run, Ranks.join(600))
        body = msgpack.packb({"step": 1, "version": 1, "groups": task.groups})
        chunk = decode_chunk(body, run.config.algorithm, run.config.generation.max_new_tokens)
        connection.send("ready")
        for step in range(1, task.steps + 1):
            if not connection.recv():
                break
            clock = Clock()
            engine.accumulate(chunk)
            metrics = engine.update(step)
            connection.send({**clock.read(), "loss": metrics["loss"], "grad_norm": metrics["grad_norm"]})
    os._exit(0)  # as the trainer itself: no interpreter shutdown under live gloo threads


def trl(connection: Connection, task: Task) -> None:
    """TRL's GRPOTrainer in its own loop; in place of generating and scoring it gets the batch, padded as it pads."""
    _settle(task.threads)
    warnings.filterwarnings("ignore", message="TRL currently supports vLLM", category=UserWarning)
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    batch = _padded(task)

    class Prepared(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
            return dict(batch)

    class Told(TrainerCallback):
        clock: Clock
        taken: dict[str, float]

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            connection.send("ready")

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not connection.recv():
                os._exit(0)
            self.clock = Clock()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.taken = self.clock.read()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            if "grad_norm" in logs:
                connection.send({**self.taken, "loss": logs["loss"], "grad_norm": logs["grad_norm"]})

    count, size = len(task.samples), len(task.groups[0]["samples"])
    with tempfile.TemporaryDirectory() as scratch:
        arguments = GRPOConfig(
            output_dir=scratch,
            use_cpu=True,
            # Its way of training in bfloat16: float32 weights under autocast.
            bf16=task.dtype == "bfloat16",
            max_steps=task.steps,
            per_device_train_batch_size=task.padded_rows,
            gradient_accumulation_steps=count // task.padded_rows,
            num_generations=size,
            max_completion_length=task.longest_response,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=CLIP_NORM,
            epsilon=CLIP_LOW,
            epsilon_high=CLIP_HIGH,
            loss_type="dapo",
            beta=0.0,
            gradient_checkpointing=task.recompute,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Prepared(
            model=AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32, attn_implementation="sdpa"),
            reward_funcs=_unused_reward,
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": "-"}] * len(task.groups)),
            processing_class=AutoTokenizer.from_pretrained(task.model),
            callbacks=[Told()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    os._exit(0)


def _padded(task: Task) -> dict[str, Any]:
    """What GRPOTrainer makes of a generated batch: prompts padded on the left, responses on the right, each to the
    longest of the whole batch."""
    import torch

    samples = task.samples
    prompts, responses = ([torch.tensor(sample[name]) for sample in samples] for name in ("prompt_ids", "ids"))
    before = [torch.tensor(sample["logprobs"]) for sample in samples]

    def pad(rows: list[Any], *, left: bool) -> Any:
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left" if left else "right")

    ones = [[torch.ones_like(row) for row in rows] for rows in (prompts, responses)]
    return {
        "prompt_ids": pad(prompts, left=True),
        "prompt_mask": pad(ones[0], left=True),
        "completion_ids": pad(responses, left=False),
        "completion_mask": pad(ones[1], left=False),
        "advantages": torch.tensor(task.advantages),
        "old_per_token_logps": pad(before, left=False),
        "num_items_in_batch": torch.tensor(float(sum(map(len, responses)))),
    }


def _unused_reward(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def _settle(threads: int) -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import torch
    from transformers.utils import logging

    torch.set_num_threads(threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
