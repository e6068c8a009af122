"""Peak memory and time of the log-probabilities of many tokens over a large vocabulary: ours against the naive way.

    python -m benchmarks.logprob_memory [--tokens 8192] [--vocabulary 151936] [--hidden 256] [--dtype float32]

Forward and backward from hidden states and a weight to the gradients of both. `naive` makes the full logits, takes
their log-softmax in float32 and picks the targets, holding on to nothing longer than autograd does; the entropy, which
`ours` computes as well, it is spared. Each runs in a process of its own. Its peak is what Linux counts as the highest
resident memory from when the inputs exist (the counter is reset then, after a small warm-up) until the gradients do,
minus what was resident at that moment: the inputs do not count, the gradients do. `logprob_memory_over_naive` is the
ratio of the two peaks.

The naive way needs three times tokens x vocabulary x 4 bytes (15 GB by default); with less memory available than that
and a fifth more, this refuses to start.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.results import report

METHODS = ("naive", "ours")
TOKENS, VOCABULARY, HIDDEN = 8192, 151936, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--method", choices=METHODS, help="measure this one alone, in this process")
    args = parser.parse_args()
    if args.method:
        print(json.dumps(measure(args.method, args.tokens, args.vocabulary, args.hidden, args.dtype, args.threads)))
        return
    if needed(args.tokens, args.vocabulary) > available():
        gigabytes = f"{needed(args.tokens, args.vocabulary) / 1e9:.1f} GB of {available() / 1e9:.1f} GB available"
        parser.error(f"the naive way needs {gigabytes}: lower --tokens")
    rows, result = compare(args.tokens, args.vocabulary, args.hidden, args.dtype, args.threads)
    report("logprob_memory", f"{args.tokens} tokens, vocabulary {args.vocabulary}", rows, result)


def needed(tokens: int, vocabulary: int) -> float:
    """Bytes that should be available for the naive way."""
    return 1.2 * 3 * 4 * tokens * vocabulary


def available() -> int:
    """Bytes that Linux could give without swapping."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return 1024 * int(lines["MemAvailable"].split()[0])


def compare(
    tokens: int, vocabulary: int, hidden: int, dtype: str, threads: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(what each method took, the numbers of the benchmark)."""
    options = {"tokens": tokens, "vocabulary": vocabulary, "hidden": hidden, "dtype": dtype, "threads": threads}
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    rows = []
    for method in METHODS:
        command = [sys.executable, "-m", "benchmarks.logprob_memory", "--method", method, *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        rows.append({"method": method, **json.loads(done.stdout)})
    naive, ours = rows
    return rows, {
        "logprob_memory_over_naive": ours["peak_gb"] / naive["peak_gb"],
        "logprob_time_over_naive": ours["cpu_s"] / naive["cpu_s"],
        **options,
    }


def measure(method: str, tokens: int, vocabulary: int, width: int, dtype: str, threads: int) -> dict[str, float]:
    """Peak memory in GB (1e9 bytes), wall and processor seconds of one forward and backward pass."""
    import torch

    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)

    def inputs(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden, weight = (
            (torch.randn(n, width, generator=generator) * 0.1).to(getattr(torch, dtype)).requires_grad_()
            for n in (rows, columns)
        )
        return hidden, weight, torch.randint(0, columns, (rows,), generator=generator)

    def both_passes(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> None:
        if method == "ours":
            from forebay.training.token_logprobs import token_logprobs

            logprobs, _ = token_logprobs(hidden, weight, None, targets)
        else:
            every = torch.nn.functional.linear(hidden, weight).float().log_softmax(-1)
            logprobs = every.gather(-1, targets[:, None])[:, 0]
            del every
        logprobs.sum().backward()

    both_passes(*inputs(64, 1024))
    prepared = inputs(tokens, vocabulary)
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak to what is resident
    before, wall, cpu = memory("VmRSS"), time.perf_counter(), time.process_time()
    both_passes(*prepared)
    return {
        "peak_gb": (memory("VmHWM") - before) / 1e9,
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
    }


def memory(field: str) -> int:
    """Bytes, of this process: VmRSS, resident now, or VmHWM, its peak."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines[field].split()[0])


if __name__ == "__main__":
    main()
