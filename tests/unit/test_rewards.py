"""Loading, composing and counting of verifiers; what the pool does with them is in test_reward_pool.py."""

import asyncio
import itertools
import math
import warnings
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from forebay.config import RewardConfig, RunConfig
from forebay.errors import UserError
from forebay.rewards import BUILT_IN, Judgement, load_verifier
from forebay.rewards.composition import Composition, Group, Response, judge_group, may_name
from forebay.rewards.judgement import judgement_of
from forebay.rewards.tally import AllFailed, AllScoresEqual, AllTimedOut, Tally
from tests.unit import reward_functions

MODULE = "tests.unit.reward_functions"


def judged(reward: RewardConfig, text: str, answer: Any, **response: Any) -> Judgement:
    got: list[Judgement] = []
    of = Response(text, **{"tokens": 4, "finished": True} | response)
    group = Group([of], answer, "x", score_truncated=False)
    judge_group(Composition(reward, 16).terms(""), group, lambda _, judgement: got.append(judgement))
    return got[0]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("mazes", {}, "write math, dapo_math, .*, format or package.module:function"),
        ("a.b:", {}, "write math"),
        ("no_such_module:f", {}, "cannot import no_such_module .ModuleNotFoundError"),
        (f"{MODULE}:missing", {}, "has no function missing"),
        (f"{MODULE}:not_a_function", {}, "has no function not_a_function"),
        (f"{MODULE}:two", {}, "must take .response, answer, prompt."),
        (f"{MODULE}:verl", {}, "its parameter 1 is data_source, but what it gets there is the response: put .response"),
        (f"{MODULE}:trl", {}, "its parameter 1 is prompts, but"),
        ("math", {"toleranz": 1}, "got an unexpected keyword argument 'toleranz'.*its options are unevaluated"),
        ("overlong", {"tokens": 1}, "reward.options.overlong: tokens is given with each response"),
        (f"{MODULE}:with_options", {}, "missing a required argument: 'limit'.*its options are limit, unit"),
    ],
)
def test_names_signatures_and_options_are_checked_at_load(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        load_verifier(name, options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("order", list(itertools.permutations(["response", "answer", "prompt"])), ids=" ".join)
@pytest.mark.parametrize("batch", ["", "s"])
def test_the_names_of_what_it_gets_stand_in_their_places(
    monkeypatch: pytest.MonkeyPatch, order: tuple[str, ...], batch: str
) -> None:
    parameters = ", ".join(order).replace("response", "response" + batch)
    monkeypatch.setattr(reward_functions, "mine", eval(f"lambda {parameters}: 1.0"), raising=False)
    if order == ("response", "answer", "prompt"):
        assert load_verifier(f"{MODULE}:mine").batch is bool(batch)
        return
    with pytest.raises(UserError, match=r"^reward .*:mine: its parameter \d is .* in this order"):
        load_verifier(f"{MODULE}:mine")


def test_other_names_and_options_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(text: str, truth: Any, question: str, /, *, data_source: int = 3) -> float:
        return float(data_source)

    monkeypatch.setattr(reward_functions, "mine", mine, raising=False)
    assert load_verifier(f"{MODULE}:mine", {"data_source": 5}).function("r", "a", "p") == 5.0


def test_what_the_signature_says() -> None:
    for name in BUILT_IN:
        built_in = load_verifier(name, {"budget": 9} if name == "overlong" else {})
        assert (built_in.batch, built_in.asynchronous) == (False, False)
        assert built_in.counts_tokens is (name == "overlong")
    kinds = {
        "length": (False, False),
        "batch": (True, False),
        "async_single": (False, True),
        "async_batch": (True, True),
    }
    for name, kind in kinds.items():
        verifier = load_verifier(f"{MODULE}:{name}")
        assert (verifier.batch, verifier.asynchronous) == kind
    assert load_verifier(f"{MODULE}:with_options", {"limit": 5}).function("r", "a", "p", tokens=4) == 1.0


@pytest.mark.parametrize(
    ("value", "score", "verdict"),
    [
        (1, 1.0, "right"),
        (True, 1.0, "right"),
        (0.25, 0.25, "partial"),
        (0, 0.0, "wrong"),
        (-2.5, -2.5, "wrong"),
        (Judgement(0.3, "right", "because"), 0.3, "right"),
        (Judgement(None, "timed_out", "slow"), None, "timed_out"),
        (Judgement(None, "right"), None, "failed"),
        (Judgement(0.0, "failed"), None, "failed"),
        (Judgement(0.0, "good"), None, "failed"),  # type: ignore[arg-type]
        (Judgement(math.inf, "right"), None, "failed"),
        (math.nan, None, "failed"),
        ("much", None, "failed"),
        (None, None, "failed"),
        ([1.0], None, "failed"),
    ],
)
def test_what_a_function_returns(value: Any, score: float | None, verdict: str) -> None:
    judgement = judgement_of(value)
    assert (judgement.score, judgement.verdict) == (score, verdict)
    assert judgement.reason or judgement.score is not None


def test_a_sum_has_the_first_verdict_and_every_reason() -> None:
    reward = RewardConfig(name="boxed", weights={"answer": 0.9, "format": 0.1})
    assert judged(reward, r"\boxed{42}", "42").score == pytest.approx(0.9)
    both = judged(reward, r"<think>a</think>\boxed{41}", "42")
    assert (both.score, both.verdict) == (pytest.approx(0.1), "wrong")
    assert both.reason == "boxed 0 (41 is not 42); format 1 (thought, then box)"


def test_a_term_that_fails_fails_the_sum() -> None:
    reward = RewardConfig(name="exact", weights={"answer": 1.0, "math": 1.0})
    sum_ = judged(reward, "x", None)
    assert (sum_.score, sum_.verdict) == (None, "failed")
    assert sum_.reason.startswith("exact: raised TypeError: reward exact needs an answer")


def test_a_cut_off_response_scores_0_but_its_length_is_judged() -> None:
    reward = RewardConfig(name="exact", weights={"answer": 1.0, "overlong": 1.0})
    cut = judged(reward, "x", "x", tokens=16, finished=False)
    assert (cut.score, cut.verdict) == (-1.0, "cut_off")
    assert judged(RewardConfig(name="exact"), "x", "x", finished=False).score == 0.0


def test_a_list_of_another_length_fails_all_of_it() -> None:
    got: dict[int, Judgement] = {}
    short = replace(load_verifier(f"{MODULE}:batch"), function=lambda responses, answer, prompt: [1.0])
    judge_group([(short, 1.0)], Group([Response("a", 1, True)] * 2, 1, "x", False), got.__setitem__)
    assert {place: judgement.verdict for place, judgement in got.items()} == {0: "failed", 1: "failed"}


def test_asynchronous_functions_share_one_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    async def remember(response: str, answer: Any, prompt: str) -> float:
        loops.append(asyncio.get_running_loop())
        return 1.0

    monkeypatch.setattr(f"{MODULE}.async_single", remember)
    terms = Composition(RewardConfig(name=f"{MODULE}:async_single"), 16).terms("")
    for _ in range(2):
        judge_group(terms, Group([Response("a", 1, True)], 1, "x", False), lambda *_: None)
    assert loops[0] is loops[1]


def test_rows_may_name_what_is_built_in_or_in_the_profile() -> None:
    reward = RewardConfig(name="a.b:c", weights={"answer": 1.0, "d:e": 1.0}, options={"f:g": {}})
    named = ["", "math", "a.b:c", "d:e", "f:g", "os:abort", "answer"]
    assert [may_name(reward, name) for name in named] == [True, True, True, True, True, False, False]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"weights": {}}, "at least one verifier"),
        ({"weights": {"math": 0.0}}, "a weight other than 0"),
        ({"weights": {"math": math.inf}}, "finite"),
        ({"name": "answer"}, "answer is no verifier"),
        ({"options": {"answer": {}}}, "answer is no verifier"),
    ],
)
def test_weights_are_checked(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        RewardConfig(**settings)


def test_length_is_punished_once() -> None:
    with pytest.raises(ValidationError, match="both punish length"):
        RunConfig(algorithm={"overlong_buffer": 8}, reward={"weights": {"answer": 1.0, "overlong": 1.0}})


# ---- overlong: DAPO's equation 13 with L_max = 100 and L_cache = 20


@pytest.mark.parametrize(
    ("tokens", "expected"), [(1, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (130, -1.0)]
)
def test_overlong(tokens: int, expected: float) -> None:
    verifier = load_verifier("overlong", {"budget": 100, "buffer": 20})
    assert verifier.function("", None, "", tokens=tokens).score == pytest.approx(expected)


def test_overlong_wants_a_buffer_within_the_budget() -> None:
    with pytest.raises(ValueError, match="buffer 101 must be from 1 to the budget"):
        load_verifier("overlong", {"budget": 100, "buffer": 101}).function("", None, "", tokens=1)


# ---- the tally


def test_every_verdict_is_counted() -> None:
    counts: Counter[str] = Counter()
    tally = Tally(0, counts)
    tally.add([Judgement(1.0, "right"), Judgement(None, "timed_out"), Judgement(1.0, "right")])
    assert counts == {"right": 2, "timed_out": 1}
    assert tally.verdicts is counts


@pytest.mark.parametrize(
    ("judgements", "kind"),
    [
        ([Judgement(0.0, "wrong", "no box")] * 4, AllScoresEqual),
        ([Judgement(None, "failed"), *[Judgement(1.0, "right")] * 3], AllScoresEqual),
        ([Judgement(None, "timed_out", "slow")] * 4, AllTimedOut),
        ([Judgement(None, "timed_out"), *[Judgement(None, "failed", "broke")] * 3], AllFailed),
    ],
)  # fmt: skip
def test_a_batch_that_says_nothing_warns_once_and_is_counted(judgements: list[Judgement], kind: type[Warning]) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    tally = Tally(4, on_event=lambda name, **values: events.append((name, values)))
    with pytest.warns(kind, match="all 4 responses of a batch") as caught:
        tally.add(judgements * 2)
    tally.add(judgements[:1])
    tally.add(judgements[1:])
    assert len(caught) == 1
    assert tally.warnings == {kind.__name__: 3}
    assert [(name, values["warning"]) for name, values in events] == [("reward_warning", kind.__name__)]


def test_a_batch_with_spread_does_not_warn() -> None:
    tally = Tally(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):  # batches of four are cut across these groups of three
            tally.add([Judgement(0.0, "wrong"), Judgement(1.0, "right"), Judgement(None, "timed_out")])
    assert not tally.warnings
