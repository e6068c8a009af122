"""The golden table, and the public references of `math` and `dapo_math` beside it."""

import re
import time
from pathlib import Path

import math_verify  # here, so that its import is not in any answer's time
import pytest

from forebay.rewards import load_verifier
from tests.support.golden_rewards import DAPO, GOLDEN, HOSTILE, HUGE, Golden
from tests.support.math_dapo_reference import dapo_accepts

MANUAL = Path(__file__).parents[2] / "docs" / "rewards.md"
MATH = [row for row in GOLDEN if row.verifier == "math" and row not in HOSTILE and row not in HUGE]


def name(row: Golden) -> str:
    return f"{row.verifier}-{row.response[:30]!r}-{str(row.truth)[:20]}"


@pytest.mark.parametrize("row", GOLDEN, ids=name)
def test_golden(row: Golden) -> None:
    began = time.process_time()
    judgement = load_verifier(row.verifier).function(row.response, row.truth, row.prompt)
    assert judgement.score == pytest.approx(row.expected), judgement.reason
    assert judgement.verdict in ("right", "wrong")
    assert 0 < len(judgement.reason) <= 700
    assert "\n" not in judgement.reason
    assert time.process_time() - began < 1.0


def test_the_table_is_large_and_says_nothing_twice() -> None:
    assert len(GOLDEN) >= 150
    assert len({(row.verifier, row.response, str(row.truth)) for row in GOLDEN}) == len(GOLDEN)


@pytest.mark.parametrize("row", MATH, ids=name)
def test_math_agrees_with_math_verify_but_for_the_differences_in_the_manual(row: Golden) -> None:
    theirs = math_verify.verify(math_verify.parse(f"${row.truth}$"), math_verify.parse(row.response))
    assert (bool(row.expected) == theirs) is (not row.differs), f"math-verify says {theirs}"


@pytest.mark.parametrize("row", DAPO, ids=name)
def test_dapo_math_agrees_with_verl_but_for_the_differences_in_the_manual(row: Golden) -> None:
    theirs = dapo_accepts(row.response, row.truth)
    assert (bool(row.expected) == theirs) is (not row.differs), f"math_dapo says {theirs}"


def test_the_manual_explains_every_difference() -> None:
    explained = set(re.findall(r"^\| \*\*(.+?)\*\*", MANUAL.read_text(), re.MULTILINE))
    used = {row.differs for row in GOLDEN if row.differs}
    assert used <= explained, used - explained
    assert explained - used <= {"time", "two verdicts"}
