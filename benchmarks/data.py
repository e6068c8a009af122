"""Preparation of data and checking of answers: how fast, and how much memory.

    python -m benchmarks.data [--seconds 10]

`math_answers_per_s`: answers that the verifier `math` judges in a second of one core's time, over the math rows of the
golden table, hostile input included. Rounds over the whole table, after one to warm up, for `--seconds`; nothing is
remembered between rounds (math-verify keeps its last 20 formulas: cleared).
`slowest_hostile_s` is the longest that one hostile answer took, `stalls` how many took longer than the verifier's own
limit of a second, both of processor time too, so that a busy machine makes none.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.results import report
from forebay.rewards.math import SECONDS, score
from tests.support.golden_rewards import GOLDEN, HOSTILE, HUGE, Golden

MATH = [row for row in GOLDEN if row.verifier == "math"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of processor time, for each measurement")
    args = parser.parse_args()
    rows, result = answers(args.seconds)
    report("data", f"Verifier math on {len(MATH)} golden answers", rows, result)


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
