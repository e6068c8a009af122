"""The comparison against an independent reference; the examination against engines that misbehave."""

import asyncio
import dataclasses
import hashlib
import itertools
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, norm
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel

from forebay.config import EvaluationConfig, GenerationConfig, RewardConfig, RunConfig, StorageConfig
from forebay.control.types import (
    EngineFailure,
    RefreshMode,
    RefreshRecord,
    RequestRefused,
    Sample,
    Snapshot,
    VersionSpan,
)
from forebay.data.maze import read_prompt, vocabulary
from forebay.data.schema import Row, prompt_id, write_rows
from forebay.errors import DataError, DeadlineError, RunError, UserError
from forebay.evaluation import stage
from forebay.evaluation.answers import Answer, Examiner
from forebay.evaluation.compare import (
    bootstrap,
    by_category,
    compare,
    compare_by_tag,
    pick_examples,
    sign_test,
    verdict,
)
from forebay.evaluation.metrics import majority, pass_at, powers_of_two
from forebay.evaluation.stage import evaluate, trained_snapshot
from forebay.evaluation.table import draw_maze, evaluation_markdown, mark_walk, p_text
from forebay.run import RunContext

TRAINED = Snapshot(3, "somewhere", "0" * 64)


# ---- comparison


@given(gained=st.integers(0, 400), lost=st.integers(0, 400))
def test_the_sign_test_is_scipys_exact_binomial(gained: int, lost: int) -> None:
    reference = binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    assert sign_test(gained, lost) == pytest.approx(reference, rel=1e-9, abs=0)


def test_the_bootstrap_interval_is_that_of_a_plain_loop_and_of_theory() -> None:
    rng = np.random.default_rng(1)
    before, after = rng.random(400) < 0.4, rng.random(400) < 0.5
    differences = after.astype(float) - before
    low, high = bootstrap(before, after)
    drawn = [rng.choice(differences, 400).mean() for _ in range(4000)]
    assert (low, high) == pytest.approx(tuple(np.percentile(drawn, [2.5, 97.5])), abs=0.006)
    half = norm.ppf(0.975) * differences.std() / 20
    assert (low, high) == pytest.approx((differences.mean() - half, differences.mean() + half), abs=0.006)
    assert bootstrap([0.25] * 9, [0.75] * 9) == (0.5, 0.5)


def test_tags_are_compared_each_for_itself() -> None:
    found = compare_by_tag([["b"], ["a", "b"], [], ["a"]], [0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 1.0])
    assert list(found) == ["a", "b"]
    assert (found["a"].n, found["a"].before, found["a"].after, found["a"].gained, found["a"].lost) == (
        2,
        0.5,
        1.0,
        1,
        0,
    )


def test_the_verdict_says_no_more_than_the_test() -> None:
    assert verdict(0.05, 0.1, 0.9) == "no evidence of change"
    assert verdict(0.01, 0.1, 0.2) == "better after training"
    assert verdict(0.01, 0.3, 0.2) == "worse after training"


@given(rewards=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=7), k=st.integers(1, 7))
def test_pass_at_k_is_the_share_of_all_subsets_with_a_right_answer(rewards: list[float], k: int) -> None:
    if k > len(rewards):
        with pytest.raises(ValueError, match="is not defined"):
            pass_at(k, rewards)
        return
    subsets = list(itertools.combinations(rewards, k))
    assert pass_at(k, rewards) == pytest.approx(sum(1.0 in subset for subset in subsets) / len(subsets))


def test_the_majority_is_of_answers_and_ties_are_drawn() -> None:
    assert majority(["4", "5", "4"], [0.0, 1.0, 0.0]) == 0.0
    assert majority(["4", "5"], [1.0, 0.0]) == 0.5
    assert majority(["", "", "7"], [0.0, 0.0, 1.0]) == 1.0
    assert majority(["", ""], [1.0, 1.0]) == 0.0
    assert [powers_of_two(n) for n in (1, 6, 8)] == [[1], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_the_sign_test_by_hand_and_far_out() -> None:
    assert sign_test(5, 1) == 2 * (1 + 6) / 64
    assert sign_test(3, 3) == 1.0
    assert sign_test(0, 0) == 1.0
    assert sign_test(1000, 0) == 2.0**-999
    assert sign_test(100_000, 0) == 0.0


def test_compare_counts_pairs() -> None:
    result = compare([0, 1, 0, 1, 0.5, 0], [1, 0, 1, 1, 0.75, 0])
    assert (result.n, result.gained, result.lost) == (6, 3, 1)
    assert result.before == pytest.approx(2.5 / 6)
    assert result.after == pytest.approx(3.75 / 6)
    assert result.p_value == pytest.approx(binomtest(3, 4).pvalue)


@given(pairs=st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=50))
def test_swapping_the_models_swaps_the_result(pairs: list[tuple[float, float]]) -> None:
    before, after = zip(*pairs, strict=True)
    one, other = compare(before, after), compare(after, before)
    assert (one.gained, one.lost, one.before) == (other.lost, other.gained, other.after)
    assert one.p_value == other.p_value
    assert 0 <= one.p_value <= 1


@pytest.mark.parametrize(("before", "after"), [([], []), ([1.0], [1.0, 0.0])])
def test_compare_refuses_what_is_not_paired(before: list[float], after: list[float]) -> None:
    with pytest.raises(ValueError, match="paired"):
        compare(before, after)


def test_categories() -> None:
    assert by_category([4, 3, 4], [0, 1, 1], [1, 1, 0.5]) == {"3": (1, 1.0, 1.0), "4": (2, 0.5, 0.75)}


def test_examples_show_every_kind_in_turn() -> None:
    before = [1, 1, 0, 0, 0, 1]
    after = [1, 1, 1, 1, 0, 0]
    assert pick_examples(before, after, 4) == [2, 5, 0, 4]
    assert pick_examples(before, after, 99) == [2, 5, 0, 4, 3, 1]
    assert pick_examples(before, after, 0) == []


# ---- examination


class FakeEngine:
    """Answers token 7 once per policy version; fails or hangs as told."""

    def __init__(self) -> None:
        self.version = 0
        self.alive = True
        self.failures: list[Exception] = []
        self.refresh_failures: list[Exception] = []
        self.hang = False
        self.running = self.most_running = 0
        self.limits: list[int] = []

    async def respond(
        self, prompt_ids: Sequence[int], max_tokens: int, images: Sequence[str], count, *_
    ) -> list[Sample]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.limits.append(max_tokens)
        try:
            await asyncio.sleep(60 if self.hang else 0)
            if not self.alive:
                raise EngineFailure("connection refused")
            if self.failures:
                raise self.failures.pop()
        finally:
            self.running -= 1
        return [Sample((7, prompt_ids[0]), (-0.5, -0.5), (VersionSpan(self.version, 0, 2),), "stop")] * count

    async def refresh(self, snapshot: Snapshot, mode: RefreshMode) -> RefreshRecord:
        if self.refresh_failures:
            raise self.refresh_failures.pop()
        self.version = snapshot.version
        return RefreshRecord(snapshot.version, 0.0)

    async def health(self) -> None:
        if not self.alive:
            raise EngineFailure("connection refused")


class BrokenEngine(FakeEngine):
    """Its process lives, but its client has given it up."""

    async def respond(self, *_: Any) -> list[Sample]:
        raise EngineFailure("given up")

    async def health(self) -> None:
        raise EngineFailure("given up")


class FakeFleet:
    def __init__(self, *engines: FakeEngine) -> None:
        self.engines = list(engines)
        self.restarts: list[int] = []

    def alive(self, i: int) -> bool:
        return self.engines[i].alive

    async def restart(self, i: int) -> None:
        self.restarts.append(i)
        await asyncio.sleep(0)
        self.engines[i] = FakeEngine()


class FakeScorer:
    """Rewards the prompt's own token; refuses the answers in `bad`."""

    def __init__(self, *bad: str) -> None:
        self.bad = bad
        self.finished: list[bool] = []

    async def score(
        self, responses: Sequence[tuple[Sequence[int], bool]], answer_json: str, prompt: str, verifier: str
    ) -> list[float]:
        assert verifier == "choice"
        if answer_json in self.bad:
            raise DataError("the verifier choked")
        self.finished += [finished for _, finished in responses]
        return [float(ids[1]) for ids, _ in responses]


def _rows(count: int) -> list[Row]:
    return [Row(f"{i:016x}", (), f"prompt {i}", (i, 1, 2), str(i), "test", "choice") for i in range(count)]


def _config(**evaluation: Any) -> RunConfig:
    generation = GenerationConfig(max_num_seqs=4, max_restarts=1)
    return RunConfig(evaluation=EvaluationConfig(**evaluation), generation=generation)


def _examine(fleet: FakeFleet, scorer: FakeScorer, rows: list[Row], config: RunConfig, load: bool) -> list[Answer]:
    async def examine() -> list[Answer]:
        examiner = Examiner(fleet, scorer, config)
        if load:
            await examiner.load(TRAINED)
        return await examiner.answer_all(rows, "trained model")

    return asyncio.run(examine())


def test_answers_come_in_order_and_within_the_engines_room() -> None:
    fleet, scorer = FakeFleet(FakeEngine(), FakeEngine()), FakeScorer()
    answers = _examine(fleet, scorer, _rows(30), _config(), load=False)
    assert [answer.reward for answer in answers] == [float(i) for i in range(30)]
    assert [engine.most_running for engine in fleet.engines] == [4, 4]
    assert scorer.finished == [True] * 30


def test_the_response_never_outgrows_the_context() -> None:
    fleet = FakeFleet(FakeEngine())
    rows = [*_rows(1), Row("x", (), "long", tuple(range(200)), "0", "test", "choice")]
    _examine(fleet, FakeScorer(), rows, _config(), load=False)
    assert fleet.engines[0].limits == [128, 56]


def test_a_failure_is_tried_again_and_is_no_reward() -> None:
    fleet = FakeFleet(FakeEngine(), FakeEngine())
    fleet.engines[0].failures = [EngineFailure("reset"), EngineFailure("reset")]
    answers = _examine(fleet, FakeScorer(), _rows(9), _config(), load=True)
    assert [answer.reward for answer in answers] == [float(i) for i in range(9)]
    assert fleet.restarts == []


def test_a_dead_engine_is_restarted_once_and_gets_the_trained_weights_again() -> None:
    fleet = FakeFleet(FakeEngine())
    engine = fleet.engines[0]

    async def die(*_: Any) -> list[Sample]:
        engine.alive = False
        raise EngineFailure("died")

    engine.respond = die  # type: ignore[method-assign]
    answers = _examine(fleet, FakeScorer(), _rows(9), _config(), load=True)
    assert [answer.reward for answer in answers] == [float(i) for i in range(9)]
    assert {span.version for answer in answers for sample in answer.samples for span in sample.versions} == {3}
    assert fleet.restarts == [0]


def test_an_engine_that_lives_but_is_of_no_use_is_restarted_too() -> None:
    fleet = FakeFleet(BrokenEngine())
    answers = _examine(fleet, FakeScorer(), _rows(9), _config(), load=True)
    assert [answer.reward for answer in answers] == [float(i) for i in range(9)]
    assert fleet.restarts == [0]


@pytest.mark.parametrize("loads", [False, True], ids=["while it starts", "while it loads"])
def test_an_engine_that_dies_again_while_it_is_restarted_is_restarted_again(loads: bool) -> None:
    class Unlucky(FakeFleet):
        async def restart(self, i: int) -> None:
            await super().restart(i)
            if len(self.restarts) == 1 and not loads:
                raise RunError("engine-0 was ended by SIGKILL while starting")
            if len(self.restarts) == 1:
                self.engines[i].refresh_failures = [EngineFailure("died")]

    fleet = Unlucky(BrokenEngine())
    config = RunConfig(
        generation=GenerationConfig(max_restarts=2), evaluation=EvaluationConfig(), storage=StorageConfig()
    )
    answers = _examine(fleet, FakeScorer(), _rows(9), config, load=True)
    assert [answer.reward for answer in answers] == [float(i) for i in range(9)]
    assert fleet.restarts == [0, 0]


def test_an_engine_that_keeps_dying_stops_the_evaluation() -> None:
    class Mortal(FakeFleet):
        async def restart(self, i: int) -> None:
            await super().restart(i)
            self.engines[i].alive = False

    fleet = Mortal(FakeEngine())
    fleet.engines[0].alive = False
    with pytest.raises(
        RunError,
        match=r"engine 0 failed, and no restart is left \(generation.max_restarts: 1\).*Last: connection refused",
    ):
        _examine(fleet, FakeScorer(), _rows(3), _config(), load=False)


def test_a_prompt_that_always_fails_stops_the_evaluation() -> None:
    fleet = FakeFleet(FakeEngine())
    fleet.engines[0].failures = [EngineFailure("reset by peer") for _ in range(99)]
    with pytest.raises(RunError, match="a prompt failed 4 times: reset by peer"):
        _examine(fleet, FakeScorer(), _rows(1), _config(), load=False)


def test_an_answer_of_the_wrong_model_never_counts() -> None:
    fleet = FakeFleet(FakeEngine())

    async def pretend(snapshot: Snapshot, mode: RefreshMode) -> RefreshRecord:
        return RefreshRecord(snapshot.version, 0.0)

    fleet.engines[0].refresh = pretend  # type: ignore[method-assign]
    with pytest.raises(RunError, match=r"weights of version \[0\], not 3"):
        _examine(fleet, FakeScorer(), _rows(2), _config(), load=True)


def test_loading_is_tried_again_and_gives_up() -> None:
    fleet = FakeFleet(FakeEngine())
    fleet.engines[0].refresh_failures = [EngineFailure("busy")]
    assert _examine(fleet, FakeScorer(), _rows(2), _config(), load=True)[1].reward == 1.0
    fleet.engines[0].refresh_failures = [EngineFailure("checksum") for _ in range(99)]
    with pytest.raises(RunError, match="engine 0 does not load the trained model: checksum"):
        _examine(fleet, FakeScorer(), _rows(2), _config(), load=True)


def test_what_cannot_be_scored_has_no_reward_but_a_reason() -> None:
    fleet = FakeFleet(FakeEngine())
    fleet.engines[0].failures = [RequestRefused("too long")]
    answers = _examine(fleet, FakeScorer("1"), _rows(3), _config(), load=False)
    assert [(answer.reward, answer.reason) for answer in answers] == [
        (None, "too long"),
        (None, "the verifier choked"),
        (2.0, ""),
    ]
    assert not answers[0].samples
    assert len(answers[1].samples) == 1


def test_the_deadline_names_who_was_waited_for() -> None:
    fleet = FakeFleet(FakeEngine(), FakeEngine())
    fleet.engines[1].hang = True
    with pytest.raises(DeadlineError) as caught:
        _examine(fleet, FakeScorer(), _rows(8), _config(timeout_s=0.2), load=False)
    assert str(caught.value) == (
        "evaluation of the trained model: 4 of 8 prompts were done after 0.2 s (evaluation.timeout_s), "
        "waiting: 4 on engine 1; raise the limit or lower evaluation.prompts"
    )


# ---- the stage

WORDS = [*vocabulary(3), "<eos>"]
MAZES = ["a1>a1vb1vSa2Gb2", "a1va1>a2>Sa1Gb2", "a1>b1va2>Sa1Ga2", "a1>a1va2>Sb1Gb2"]
BEFORE = ["a2b2", "a1a2b2", "a1b1b2a2", "b1b2"]
AFTER = ["a2a1b1b2", "a1a2b2", "a1a2", "b1a1b1b2"]


def _ids(walk: str) -> tuple[int, ...]:
    return tuple(WORDS.index(walk[at : at + 2]) for at in range(0, len(walk), 2))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class MazeFleet:
    """The interface of `forebay.generation.fleet.Fleet` with one engine that knows two walks for each maze."""

    open_fleets = 0

    def __init__(self, run: RunContext, model_dir: Path, cores: Any) -> None:
        assert model_dir == run.start_model
        self.engines = [self]
        self.version = 0

    async def __aenter__(self) -> "MazeFleet":
        MazeFleet.open_fleets += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        MazeFleet.open_fleets -= 1

    def alive(self, i: int) -> bool:
        return True

    async def respond(
        self, prompt_ids: Sequence[int], max_tokens: int, images: Sequence[str], count, *_
    ) -> list[Sample]:
        walk = _ids((AFTER if self.version else BEFORE)[prompt_ids[0]])
        finish = "length" if self.version and prompt_ids[0] == 3 else "stop"
        ids = walk if finish == "length" else (*walk, WORDS.index("<eos>"))
        return [Sample(ids, (-0.1,) * len(ids), (VersionSpan(self.version, 0, len(ids)),), finish)] * count

    async def refresh(self, snapshot: Snapshot, mode: RefreshMode) -> RefreshRecord:
        assert _sha256(Path(snapshot.path, "manifest.json")) == snapshot.manifest_sha256
        self.version = snapshot.version
        return RefreshRecord(snapshot.version, 0.0)


def _maze_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reward: str = "maze") -> RunContext:
    monkeypatch.setattr(stage, "Fleet", MazeFleet)
    config = RunConfig(
        storage=StorageConfig(scratch=str(tmp_path)),
        evaluation=EvaluationConfig(examples=4, timeout_s=60),
        reward=RewardConfig(name=reward),
    )
    run = RunContext.create(config)
    rows = []
    for i, maze in enumerate(MAZES):
        messages = ({"role": "user", "content": maze},)
        rows.append(Row(prompt_id(messages), messages, maze, (i, 0), json.dumps({}), "builtin:maze"))
    write_rows(run.data / "test.parquet", rows)
    run.start_model.mkdir()
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<eos>"))
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.decoder = Fuse()
    tokenizer.save(str(run.start_model / "tokenizer.json"))
    run.trained_model.mkdir()
    (run.trained_model / "manifest.json").write_text(json.dumps({"version": 60, "files": {}, "tensors": {}}))
    return run


def test_evaluate_compares_the_two_models_and_leaves_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _maze_run(tmp_path, monkeypatch)
    result = evaluate(run)
    assert MazeFleet.open_fleets == 0
    # Before: only the second walk is legal. After: all are, but the fourth was cut off and so scores 0.
    assert (result.n, result.before, result.after) == (4, 0.5, 0.5)
    assert (result.gained, result.lost, result.p_value) == (1, 1, 1.0)
    assert (result.truncated_before, result.truncated_after, result.left_out) == (0, 1, 0)
    assert result.mean_length_before == pytest.approx((3 + 4 + 5 + 3) / 4)
    assert result.mean_length_after == pytest.approx((5 + 4 + 3 + 4) / 4)
    assert result.by_size == {"2": (4, 0.5, 0.5)}
    assert [example["prompt"] for example in result.examples] == [MAZES[0], MAZES[2], MAZES[1], MAZES[3]]
    samples = pq.read_table(run.root / "evaluation_samples.parquet").to_pylist()
    assert [sample["before"] for sample in samples] == BEFORE
    assert [sample["after"] for sample in samples] == AFTER
    stored = json.loads((run.root / "evaluation.json").read_text())
    assert (stored["n"], stored["p_value"], stored["by_size"]) == (4, 1.0, {"2": [4, 0.5, 0.5]})
    text = evaluation_markdown(result)
    assert "before: a2 # b2" in text
    assert "| mazes 2 x 2 (4 prompts) | 50.0% | 50.0% |" in text


def test_several_responses_to_a_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prompt's mean is compared; pass@k and maj@k stand beside it."""
    run = _maze_run(tmp_path, monkeypatch)
    changed = run.config.model_copy(update={"evaluation": EvaluationConfig(samples=4, temperature=1.0)})
    monkeypatch.setattr(MazeFleet, "respond", _wavering)
    result = evaluate(dataclasses.replace(run, config=changed))
    # Before: of four answers to each prompt the first is the legal walk, and the other three agree on an illegal one.
    assert (result.before, result.after) == (0.25, 0.75)
    assert result.sampled_before == stage.Sampled({"1": 0.25, "2": 0.5, "4": 1.0}, 0.0)
    assert result.sampled_after == stage.Sampled({"1": 0.75, "2": 1.0, "4": 1.0}, 1.0)
    assert result.rules_before == {"none": 16}
    samples = pq.read_table(run.root / "evaluation_samples.parquet").to_pylist()
    assert samples[0]["before_rewards"] == [1.0, 0.0, 0.0, 0.0]
    assert samples[0]["after_answers"] == ["a2a1b1b2"] * 3 + ["a1"]
    text = evaluation_markdown(result)
    assert "| pass@2 | 50.0% | 100.0% |" in text
    assert "| maj@4 | 0.0% | 100.0% |" in text
    assert "4 responses to a prompt at temperature 1" in text


async def _wavering(self: "MazeFleet", prompt_ids: Sequence[int], *_: Any) -> list[Sample]:
    right, wrong = _ids(["a2a1b1b2", "a1a2b2", "a1b1b2a2", "b1a1a2b2"][prompt_ids[0]]), (WORDS.index("a1"),)
    ids = [right, *[wrong] * 3] if self.version == 0 else [right] * 3 + [wrong]
    return [
        Sample((*walk, WORDS.index("<eos>")), (-0.1,) * (len(walk) + 1), (VersionSpan(self.version, 0, 1),), "stop")
        for walk in ids
    ]


@pytest.mark.parametrize(
    ("reward", "kind", "message"),
    [
        ("operator:contains", UserError, "reward operator:contains: it must take"),
        (
            "posixpath:join",
            RunError,
            "not one of 4 test prompts could be scored; the first: reward posixpath:join: failed, raised TypeError",
        ),
    ],
)
def test_evaluate_without_a_single_score_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reward: str, kind: type[Exception], message: str
) -> None:
    run = _maze_run(tmp_path, monkeypatch, reward)
    with pytest.raises(kind, match=re.escape(message)):
        evaluate(run)
    assert MazeFleet.open_fleets == 0
    assert not (run.root / "evaluation.json").exists()


def test_evaluate_without_test_prompts_is_the_users_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _maze_run(tmp_path, monkeypatch)
    write_rows(run.data / "test.parquet", [])
    with pytest.raises(UserError, match="no test prompts to evaluate on"):
        evaluate(run)


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "no trained model to evaluate"), ("{", "damaged"), ("{}", "damaged"), ("[]", "damaged")],
)
def test_a_trained_model_that_is_none_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, message: str
) -> None:
    run = _maze_run(tmp_path, monkeypatch)
    manifest = run.trained_model / "manifest.json"
    if text is None:
        manifest.unlink()
    else:
        manifest.write_text(text)
    with pytest.raises(RunError, match=message):
        trained_snapshot(run)


# ---- for people


def test_a_maze_is_drawn_with_its_walls() -> None:
    assert draw_maze(read_prompt("a1>a1vb1vSa2Gb2")).splitlines() == [
        "    a   b",
        "  +---+---+",
        "1 |       |",
        "  +   +   +",
        "2 | S | G |",
        "  +---+---+",
    ]


def test_a_walk_shows_where_it_went_through_a_wall() -> None:
    maze = read_prompt("a1>a1vb1vSa2Gb2")
    assert mark_walk(maze, "a2b2b1") == "a2 # b2 b1"
    assert mark_walk(maze, "a2zz") == "a2 # zz"
    assert mark_walk(maze, "") == "(nothing)"
    assert mark_walk(maze, "a2a1" * 40).endswith("a2 a1 [... 20 more]")


def test_other_prompts_are_shown_as_text_that_cannot_break_out_of_its_block() -> None:
    hostile = "```\n# heading"
    example = {"prompt": hostile, "before": "x" * 2000, "after": "", "before_reward": 0.0, "after_reward": 0.5}
    result = stage.EvaluationResult(
        n=1, before=0.0, after=0.5, gained=1, lost=0, p_value=1.0, interval=(0.5, 0.5), mean_length_before=3.0,
        mean_length_after=4.0, truncated_before=0, truncated_after=0, left_out=2, by_size={}, by_tag={},
        examples=[example], samples=1, temperature=0.0, sampled_before=None, sampled_after=None, rules_before={},
        rules_after={}, test_sha256="0" * 64,
    )  # fmt: skip
    lines = evaluation_markdown(result).splitlines()
    assert lines.count("````text") == lines.count("````") == 1
    assert lines.index("````text") < lines.index("# heading") < lines.index("````")
    assert "2 prompts could not be scored and are left out of both sides." in lines
    assert "[... 800 more]" in evaluation_markdown(result)
    assert any(line.startswith("**no evidence of change**: 1 prompts gained") for line in lines)


def test_p_values_read_well() -> None:
    assert [p_text(p) for p in (0.03, 2.1e-34, 0.0, 1.0)] == ["p = 0.03", "p = 2.1e-34", "p < 1e-300", "p = 1"]
    assert math.isclose(sign_test(191, 21), binomtest(191, 212).pvalue, rel_tol=1e-9)
