"""Preparation of data and checking of answers: how fast, and how much memory.

    python -m benchmarks.data [--seconds 10] [--rows 1000000]

`rows_per_s`: rows of a synthetic `.jsonl` file (a question of 20 to 60 words, one in ten a repetition, one in a hundred
bad) that the stage `prepare_data` takes in a second of wall time, from the file to train, validation and test rows,
without tokenizing all (`data.length_filter: needed`). `peak_mb`: most memory resident in the stage's process and those
that it starts, together, looked at every 50 ms. The stage runs in a process of its own, and starts one to read for each
core.

`math_answers_per_s`: answers that the verifier `math` judges in a second of one core's time, over the math rows of the
golden table, hostile input included. Rounds over the whole table, after one to warm up, for `--seconds`; nothing is
remembered between rounds (math-verify keeps its last 20 formulas: cleared).
`slowest_hostile_s` is the longest that one hostile answer took, `stalls` how many took longer than the verifier's own
limit of a second, both of processor time too, so that a busy machine makes none.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import report
from forebay.config import parse_config
from forebay.data.prepare import prepare_data
from forebay.data.start_model import resolve_start_model
from forebay.rewards.math import SECONDS, score
from forebay.run import RunContext
from tests.support.golden_rewards import GOLDEN, HOSTILE, HUGE, Golden

MATH = [row for row in GOLDEN if row.verifier == "math"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of processor time, for each measurement")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the file that is prepared")
    args = parser.parse_args()
    rows, result = answers(args.seconds)
    prepared = preparation(args.rows)
    title = f"Verifier math on {len(MATH)} golden answers; preparation of {args.rows:,} rows"
    report("data", title, [*rows, prepared], {**prepared, **result})


def answers(seconds: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(a row for each part of the table, the numbers of the benchmark)."""
    hostile = [row for row in MATH if row in HOSTILE or row in HUGE]
    parts = {"all": MATH, "hostile": hostile, "others": [row for row in MATH if row not in hostile]}
    _round(MATH)
    rows = []
    for name, part in parts.items():
        slowest, judged, begin = 0.0, 0, time.process_time()
        while judged == 0 or time.process_time() - begin < seconds:
            slowest = max(slowest, _round(part))
            judged += len(part)
        cpu = time.process_time() - begin
        rows.append({"answers": name, "rows": len(part), "per_s": judged / cpu, "slowest_s": slowest})
    stalls = sum(_round([row]) > SECONDS for row in MATH)
    return rows, {
        "math_answers_per_s": rows[0]["per_s"],
        "slowest_hostile_s": rows[1]["slowest_s"],
        "stalls": stalls,
        "answers": len(MATH),
    }


def preparation(count: int) -> dict[str, Any]:
    """The numbers of the stage on a file of so many rows."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write_rows(folder / "rows.jsonl", count)
        script = "import pathlib, sys; from benchmarks.data import stage; stage(pathlib.Path(sys.argv[1]))"
        command = [sys.executable, "-c", script, name]
        begin, peak = time.monotonic(), 0
        with subprocess.Popen(command) as process:
            while process.poll() is None:
                peak = max(peak, _resident(process.pid))
                time.sleep(0.05)
        if process.returncode:
            raise SystemExit(f"the stage ended with code {process.returncode}")
        told = json.loads((folder / "told.json").read_text())
    return {
        "prepared": count,
        "file_mb": size / 1e6,
        "rows_per_s": count / told["seconds"],
        "peak_mb": peak / 1e6,
        "whole_s": time.monotonic() - begin,
        "counts": told["counts"],
    }


def write_rows(path: Path, count: int) -> int:
    """Synthetic questions with their account known: of 100 rows, one is bad and ten repeat an earlier one. Bytes."""
    rng = random.Random(0)
    words = [f"word{n}" for n in range(2000)]
    with path.open("w", encoding="utf-8") as file:
        line = ""
        for n in range(count):
            if n % 100 == 99:
                file.write('{"question": "no answer"}\n')
                continue
            if n % 10 or not line:
                text = " ".join(rng.choices(words, k=rng.randint(20, 60)))
                line = json.dumps({"question": f"{n}: {text}?", "answer": f"It is {n}.\n#### {n}"}) + "\n"
            file.write(line)
    return path.stat().st_size


def stage(folder: Path) -> None:
    """Prepare `rows.jsonl` in `folder`; writes `told.json`."""
    values = {
        "model": {"path": "builtin:random-qwen3", "max_model_len": 1024},
        "data": {"source": str(folder / "rows.jsonl"), "length_filter": "needed"},
        "reward": {"name": "math"},
        "storage": {"scratch": str(folder / "scratch")},
    }
    run = RunContext.create(parse_config(values, "benchmark"))
    resolve_start_model(run, ())  # imports torch, makes the model: not what is measured
    begin = time.monotonic()
    done = prepare_data(run)
    (folder / "told.json").write_text(json.dumps({"seconds": time.monotonic() - begin, "counts": done.counts}))


def _resident(pid: int) -> int:
    """Bytes resident in a process and its children. Those that ended meanwhile count nothing."""
    total = 0
    try:
        total = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(_resident(int(child)) for child in (task / "children").read_text().split())
    except (FileNotFoundError, ProcessLookupError):
        pass
    return total


def _round(part: Sequence[Golden]) -> float:
    """Judge each once; seconds of the slowest."""
    from math_verify import parser

    for remembered in (parser.parse_latex_cached, parser.parse_expr_cached, parser.extract_latex):
        remembered.cache_clear()
    slowest = 0.0
    for row in part:
        begin = time.process_time()
        score(row.response, row.truth, "")
        slowest = max(slowest, time.process_time() - begin)
    return slowest


if __name__ == "__main__":
    main()
