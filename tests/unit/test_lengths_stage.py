"""The stage on engines that answer at once, with known lengths: profiling, cache, artifacts, one-line errors."""

import asyncio
import json
import math
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr
from typer.testing import CliRunner

import forebay.data.prepare
import forebay.doctor
import forebay.lengths.profile
from forebay import cli
from forebay.config import parse_config
from forebay.control.types import EngineFailure, RequestRefused, Sample, VersionSpan
from forebay.data.schema import BadRow, Row, prompt_id, write_quarantine, write_rows
from forebay.errors import RunError, UserError
from forebay.lengths.profile import needed, sample_order
from forebay.lengths.report import lines
from forebay.lengths.stage import predict_lengths
from forebay.run import RunContext
from tests.support.tiny_lm import make_start_model

BUDGET = 64
ROOT = Path(__file__).resolve().parents[2]
ROWS = [Row("a", ({"role": "user", "content": "hi"},), "hi", (5, 6), "1", "test")]


class Engines:
    """Stands for `Fleet`. A response to a prompt has about half as many tokens as its first token id says."""

    def __init__(self):
        self.starts, self.revived, self.failed_starts = 0, 0, 0
        self.asked = Counter()
        self.fail_after, self.failures = math.inf, 0
        self.refused = set()
        self.length = lambda tokens, rng: tokens[0] / 2 * math.exp(rng.gauss(0, 0.3))

    def __call__(self, run, model, cores):
        return self

    async def __aenter__(self):
        self.starts += 1
        self.engines = [self]
        return self

    async def __aexit__(self, *exception):
        pass

    async def revive(self, index):
        self.revived += 1
        if self.failed_starts:
            self.failed_starts -= 1
            raise RunError("engine-0 was ended by SIGKILL while starting")

    async def generate(self, tokens, prefixes, seed, images=()):
        await asyncio.sleep(0)
        if self.failures:
            self.failures -= 1
            raise EngineFailure("engine-0 broke")
        if tuple(tokens) in self.refused:
            raise RequestRefused("no")
        if self.asked.total() >= self.fail_after:
            raise KeyboardInterrupt
        self.asked[tuple(tokens)] += len(prefixes)
        rng = random.Random(seed)
        return [self._sample(self.length(tokens, rng)) for _ in prefixes]

    async def greedy(self, tokens, max_tokens, images=()):
        assert max_tokens == BUDGET
        await asyncio.sleep(0)
        if self.asked.total() >= self.fail_after:
            raise KeyboardInterrupt
        self.asked[("greedy", *tokens)] += 1
        return self._sample(tokens[0] / 2)

    @staticmethod
    def _sample(length):
        count = min(max(1, round(length)), BUDGET)
        reason = "length" if count == BUDGET else "stop"
        return Sample((5,) * count, (-0.5,) * count, (VersionSpan(0, 0, count),), reason)


@pytest.fixture
def engines(monkeypatch):
    fleet = Engines()
    monkeypatch.setattr(forebay.lengths.profile, "Fleet", fleet)
    return fleet


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_start_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(tmp_path, model):
    """`start(prompts, **lengths)`: a run whose data stage has just ended."""

    def make(prompts=80, **lengths):
        values = {
            "model": {"path": str(model), "max_model_len": 128},
            "generation": {"max_new_tokens": BUDGET},
            "storage": {"scratch": str(tmp_path / "scratch")},
            "lengths": {"profile_prompts": 40, "predictor": "hidden_state", **lengths},
        }
        run = RunContext.create(parse_config(values, "test"))
        rng = random.Random(3)
        rows = []
        for i in range(prompts):
            tokens = tuple(rng.randint(2, 90) for _ in range(rng.randint(3, 20)))
            messages = ({"role": "user", "content": f"{i}"},)
            rows.append(Row(prompt_id(messages), messages, f"{i}", tokens, "1", "test"))
        write_rows(run.data / "train.parquet", rows)
        run.start_model.symlink_to(model)
        return run

    return make


def table(run, name):
    return pq.read_table(run.lengths / f"{name}.parquet")


@given(sizes=st.lists(st.integers(1, 99), min_size=1, max_size=200), seed=st.integers(0, 99))
def test_the_sample_order_holds_every_prompt_once_and_its_first_parts_are_stratified(sizes, seed):
    order = sample_order(np.array(sizes), seed)
    assert sorted(order) == list(range(len(sizes)))
    # Of 2^k equal strata of the sizes, each of which may be cut off at the end, the first members hit each about once.
    ranks = np.empty(len(sizes), dtype=int)
    ranks[np.lexsort((np.arange(len(sizes)), sizes))] = np.arange(len(sizes))
    for part in (4, 8, 16):
        if len(sizes) >= 4 * part:
            taken = np.sort(np.array(sizes)[order[:part]])
            spread = np.sort(sizes)[(np.arange(part) * len(sizes)) // part]
            above = np.sort(sizes)[np.minimum((np.arange(part) + 2) * len(sizes) // part, len(sizes) - 1)]
            assert np.all(taken <= above)
            assert np.all(taken >= spread[np.maximum(np.arange(part) - 1, 0)])


def test_the_profile_is_as_large_as_the_target_error_asks():
    rng = np.random.default_rng(0)
    means = rng.lognormal(3, 0.5, size=20_000)
    size = needed(means, 0.05)
    errors = [rng.choice(means, size).mean() / means.mean() - 1 for _ in range(400)]
    assert np.mean(np.abs(errors) < 0.05) == pytest.approx(0.95, abs=0.03)
    assert needed(np.full(10, 7.0), 0.05) == 0


def test_profile_fit_and_predictions(engines, start):
    run = start(prompts=200, profile_prompts=100, predictor="features")
    result = predict_lengths(run)
    assert engines.starts == 1
    assert (result.profiled, result.asked, result.held_out) == (100, 100 * 4 + 200, 25)
    assert result.predictor == "features with greedy responses"
    assert result.share > 0.8
    assert result.notes == ()
    predictions, rows = table(run, "predictions"), pq.read_table(run.data / "train.parquet")
    assert predictions.schema.names == ["prompt_id", "predicted", "median", "upper", "prompt_tokens"]
    assert predictions.schema.field("prompt_tokens").type == pa.int32()
    assert predictions["prompt_id"].to_pylist() == rows["prompt_id"].to_pylist()
    assert predictions["prompt_tokens"].to_pylist() == [len(ids) for ids in rows["prompt_ids"].to_pylist()]
    firsts = [ids[0] for ids in rows["prompt_ids"].to_pylist()]
    expected = np.array(firsts) / 2 * math.exp(0.3**2 / 2)
    assert spearmanr(predictions["predicted"].to_numpy(), expected).statistic > 0.95
    assert np.mean(predictions["predicted"].to_numpy() / expected) == pytest.approx(1, abs=0.1)
    profile = table(run, "profile")
    assert profile.schema.names == ["prompt_id", "lengths", "truncated", "mean", "predicted", "upper", "held_out"]
    assert sum(profile["held_out"].to_pylist()) == 25
    for row in profile.to_pylist():
        assert row["mean"] == pytest.approx(np.mean(row["lengths"]))
        assert row["truncated"] == [length == BUDGET for length in row["lengths"]]
    assert (run.lengths / "report.png").exists()
    assert json.loads((run.lengths / "report.json").read_text())["profiled"] == 100


@pytest.mark.parametrize(("greedy", "asked"), [("always", 160 + 700), ("never", 160), ("auto", 160)])
def test_greedy_responses_are_asked_for_as_the_profile_says(engines, start, greedy, asked):
    result = predict_lengths(start(prompts=700, profile_prompts=40, predictor="features", greedy=greedy))
    assert result.asked == asked
    assert result.predictor == "features" + " with greedy responses" * (greedy == "always")


def test_the_second_time_no_engine_starts_and_nothing_changes(engines, start):
    first = start()
    predict_lengths(first)
    second = start()
    result = predict_lengths(second)
    assert engines.starts == 1
    assert result.asked == 0
    assert table(first, "predictions") == table(second, "predictions")
    assert table(first, "profile") == table(second, "profile")
    assert dict(lines(second, result))["profile"] == "40 prompts, all from the cache"


@pytest.mark.parametrize(
    "change",
    [{"samples": 3}, {"profile_prompts": 38}],
)
def test_only_what_is_not_known_is_asked(engines, start, change):
    predict_lengths(start())
    before = engines.asked.total()
    predict_lengths(start(**change))
    # Other sampling: all of it. A smaller profile: nothing.
    assert engines.asked.total() - before == (40 * 3 if "samples" in change else 0)


def test_other_weights_are_another_profile(engines, start, tmp_path):
    predict_lengths(start())
    before = engines.asked.total()
    other = start()
    other.start_model.unlink()
    other.start_model.symlink_to(make_start_model(tmp_path / "other", seed=9))
    predict_lengths(other)
    assert engines.asked.total() == 2 * before


def test_an_interrupted_profile_goes_on_where_it_was(engines, start):
    """Once among the 160 sampled responses, once among the 80 greedy ones."""
    for limit in (100, 200):
        engines.fail_after = limit
        with pytest.raises(KeyboardInterrupt):
            predict_lengths(start(predictor="features"))
        assert engines.asked.total() == limit
    engines.fail_after = math.inf
    assert predict_lengths(start(predictor="features")).asked == 160 + 80 - 200
    assert all(count == (1 if tokens[0] == "greedy" else 4) for tokens, count in engines.asked.items())


def test_an_answer_does_not_depend_on_what_else_is_asked(engines, start):
    predict_lengths(start())
    few = {row["prompt_id"]: row["lengths"] for row in table_of_last(start, profile_prompts=10)}
    many = {row["prompt_id"]: row["lengths"] for row in table_of_last(start, profile_prompts=40)}
    assert len(few) == 10
    assert few.items() <= many.items()


def table_of_last(start, **lengths):
    run = start(**lengths)
    run = RunContext(run.config, run.run_id, run.scratch.parent / f"fresh-{lengths['profile_prompts']}", run.token)
    source = start(**lengths)
    run.data.parent.mkdir(parents=True)
    run.data.symlink_to(source.data)
    run.start_model.symlink_to(source.start_model.resolve())
    predict_lengths(run)
    return table(run, "profile").to_pylist()


def test_an_engine_that_breaks_is_revived_and_asked_again(engines, start):
    engines.failures = 2
    assert predict_lengths(start()).profiled == 40
    assert engines.revived == 2


def test_an_engine_that_dies_while_it_is_revived_is_revived_again(engines, start):
    engines.failures = engines.failed_starts = 1
    assert predict_lengths(start()).profiled == 40
    assert engines.revived == 2


def test_an_engine_that_keeps_breaking_ends_the_stage(engines, start):
    engines.failures = 10**6
    with pytest.raises(EngineFailure, match="engine-0 broke"):
        predict_lengths(start())


def test_prompts_that_no_engine_takes_tell_nothing(engines, start):
    run = start()
    rows = pq.read_table(run.data / "train.parquet")["prompt_ids"].to_pylist()
    order = sample_order(np.array([len(ids) for ids in rows]), 0)[:40]
    engines.refused = {tuple(rows[i]) for i in order[:3]}
    result = predict_lengths(run)
    assert result.profiled == 37
    assert "3 prompts were refused by every engine and tell nothing" in result.notes
    assert np.all(np.isfinite(table(run, "predictions")["predicted"].to_numpy()))
    engines.refused = {tuple(ids) for ids in rows}
    with pytest.raises(RunError, match="only 0 of 40 profiled prompts were answered, 4 are needed"):
        predict_lengths(start(samples=2))


def test_target_error_profiles_in_rounds_until_the_mean_is_known(engines, start):
    run = start(prompts=1500, profile_prompts=None, target_error=0.1, predictor="features")
    result = predict_lengths(run)
    means = table(run, "profile")["mean"].to_numpy()
    assert 64 < result.profiled < 512
    assert needed(means[:64], 0.1) <= result.profiled
    assert needed(means, 0.1) <= result.profiled
    assert result.predictor == "features"  # 1,500 greedy responses would be more than the profile has


def test_target_error_stops_after_the_first_round_and_at_half_of_the_prompts(engines, start):
    assert predict_lengths(start(prompts=300, profile_prompts=None, target_error=0.5)).profiled == 64
    assert predict_lengths(start(prompts=300, profile_prompts=None, target_error=0.001)).profiled == 150


@pytest.mark.parametrize("prompts", [4, 5, 8, 30])
def test_few_prompts_are_enough(engines, start, prompts):
    run = start(prompts=prompts)
    result = predict_lengths(run)
    assert result.profiled == max(4, prompts // 2)
    assert f"lengths.profile_prompts 40: only {result.profiled} of {prompts} training prompts" in result.notes
    assert len(table(run, "predictions")) == prompts


@pytest.mark.parametrize("length", [7, 10**6])
def test_equal_lengths_are_predicted_and_nothing_is_ranked(engines, start, length):
    engines.length = lambda tokens, rng: length
    run = start()
    result = predict_lengths(run)
    assert result.spearman is None
    assert any(note.startswith("all lengths are equal: nothing can be ranked") for note in result.notes)
    for name in ("predicted", "median", "upper"):
        np.testing.assert_allclose(table(run, name="predictions")[name].to_numpy(), min(length, BUDGET), rtol=0.01)


def test_an_empty_training_split_is_one_line(engines, start):
    with pytest.raises(UserError, match=r"train.parquet: the training split is empty$"):
        predict_lengths(start(prompts=0))


def test_too_few_prompts_are_one_line(engines, start):
    with pytest.raises(UserError, match=r"^lengths: the training split has 3 prompts, 4 are needed: give more data$"):
        predict_lengths(start(prompts=3))


def test_prompts_beyond_the_budget_are_named(engines, start):
    run = start()
    reasons = ["the prompt has 200 tokens; model.max_model_len - generation.max_new_tokens leaves 64", "no answer"]
    write_quarantine(run.data / "quarantine.parquet", [BadRow(i, "test", why, "") for i, why in enumerate(reasons)])
    (note,) = predict_lengths(run).notes
    assert note.startswith("2 rows are in quarantine, 1 of them prompts that leave no room for a response; reasons in ")


def history_of(run, path, factor=1.0, prompts=None):
    """A ledger: eight responses to some prompts, `factor` times as long as the engines' are."""
    rows = pq.read_table(run.data / "train.parquet").to_pylist()[:prompts]
    rng = random.Random(8)
    lengths = [
        [max(1, min(BUDGET, round(factor / 2 * row["prompt_ids"][0] * math.exp(rng.gauss(0, 0.3))))) for _ in range(8)]
        for row in rows
    ]
    ids = [row["prompt_id"] for row in rows]
    pq.write_table(pa.table({"prompt_id": ids, "fate": ["trained"] * len(ids), "lengths": lengths}), path)
    return str(path)


def test_history_beats_its_fallback_and_corrects_its_drift(engines, start, tmp_path):
    settings = {"predictor": "history", "fallback": "hidden_state"}
    path = history_of(start(prompts=160), tmp_path / "ledger.parquet", factor=0.5)
    run = start(prompts=160, profile_prompts=80, history=path, **settings)
    result = predict_lengths(run)
    alone = predict_lengths(start(prompts=160, profile_prompts=80))
    assert result.share > 0.9 > alone.share
    assert result.predictor == "history, else hidden_state"
    assert f"160 of 160 prompts are in {path}" in result.notes
    expected = [ids[0] / 2 for ids in pq.read_table(run.data / "train.parquet")["prompt_ids"].to_pylist()]
    assert np.mean(table(run, "predictions")["predicted"].to_numpy()) == pytest.approx(np.mean(expected), rel=0.1)


def test_a_history_of_other_prompts_leaves_the_fallback(engines, start, tmp_path):
    path = tmp_path / "ledger.parquet"
    pq.write_table(pa.table({"prompt_id": ["x"], "lengths": [[3, 4]]}), path)
    run, plain = start(predictor="history", fallback="hidden_state", history=str(path)), start()
    result = predict_lengths(run)
    predict_lengths(plain)
    assert f"0 of 80 prompts are in {path}" in result.notes
    assert table(run, "predictions") == table(plain, "predictions")


def test_the_own_profile_as_history_is_no_news(engines, start):
    """Else the held-out prompts would be predicted from the responses that judge the prediction."""
    first = start(prompts=300, profile_prompts=100)
    alone = predict_lengths(first)
    path = str(first.lengths / "profile.parquet")
    settings = {"predictor": "history", "fallback": "hidden_state", "history": path}
    result = predict_lengths(start(prompts=300, profile_prompts=100, **settings))
    assert result.spearman == pytest.approx(alone.spearman)


def test_assumed_lengths_need_neither_data_nor_engine(engines, tmp_path):
    values = {
        "data": {"train_prompts": 30_000},
        "lengths": {"assumed": {"median": 300, "rank_correlation": 0.7}},
        "model": {"max_model_len": 4000},
        "generation": {"max_new_tokens": 2000},
        "training": {"micro_batch_tokens": 4096},
        "storage": {"scratch": str(tmp_path)},
    }
    run = RunContext.create(parse_config(values, "test"))
    result = predict_lengths(run)
    assert engines.starts == 0
    assert result.spearman / result.ceiling == pytest.approx(0.7, abs=0.03)
    assert (result.coverage, result.median_coverage) == (pytest.approx(0.9, abs=0.01), pytest.approx(0.5, abs=0.01))
    predictions = table(run, "predictions")
    assert predictions["prompt_id"][29_999].as_py() == "p0029999"
    assert len(predictions) == 30_000
    assert np.all(predictions["median"].to_numpy() < predictions["upper"].to_numpy() + 1e-9)
    assert dict(lines(run, result))["profile"] == "20,000 prompts, of 30,000 that were drawn"


def test_the_command_prints_the_report_and_where_it_lies(engines, tmp_path):
    settings = ["data.train_prompts=2000", f"storage.scratch={tmp_path}", f"storage.uri=file://{tmp_path}/runs"]
    words = [word for text in settings for word in ("--set", text)]
    done = CliRunner().invoke(cli.app, ["lengths", str(ROOT / "profiles" / "synthetic_1m.yaml"), *words])
    assert done.exit_code == 0, done.output
    assert "2,000 prompts, of 2,000 that were drawn" in done.output
    (report,) = tmp_path.glob("runs/*/lengths/report.json")
    assert f"Spearman {json.loads(report.read_text())['spearman']:.2f}" in done.output


def test_the_command_refuses_a_history_that_is_not_there(tmp_path, monkeypatch):
    """Before any engine starts."""
    monkeypatch.setattr(forebay.doctor, "preflight", lambda config: None)
    monkeypatch.setattr(forebay.data.prepare, "prepare_data", lambda run: write_rows(run.data / "train.parquet", ROWS))
    settings = [f"storage.scratch={tmp_path}", "lengths.predictor=history", f"lengths.history={tmp_path}/none.parquet"]
    words = [word for text in settings for word in ("--set", text)]
    done = CliRunner().invoke(cli.app, ["lengths", str(ROOT / "profiles" / "quickstart_cpu.yaml"), *words])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"forebay: lengths.history {tmp_path}/none.parquet: there is no such file; name the ")
    assert done.stderr.count("\n") == 1
