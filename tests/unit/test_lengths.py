"""The predictors on data whose lengths are known, and their calibration against plain references."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from scipy.stats import spearmanr
from transformers import AutoModelForCausalLM

from forebay.errors import RunError, UserError
from forebay.lengths.features import PLAIN, fit_features, matrix
from forebay.lengths.hidden_state import fit_hidden_state
from forebay.lengths.history import read_history
from forebay.lengths.length_lm import fit_length_lm
from forebay.lengths.predictor import (
    Calibrated,
    Known,
    quantile,
    with_drift,
    with_error,
    with_mean,
    with_quantiles,
)
from forebay.lengths.prompts import make_prompts, observe
from forebay.lengths.ridge import PENALTIES, best_ridge, fit_ridge
from tests.support.tiny_lm import make_start_model


def synthetic(rng, count):
    """Prompts and their mean log lengths: known functions of token counts, one of them a threshold."""
    prompts = [rng.integers(2, 50, size=rng.integers(5, 40)).tolist() for _ in range(count)]
    logs = [0.5 + np.log(2.0 + len(p) + 5 * p.count(7)) + (len(p) > 20) for p in prompts]
    return make_prompts([f"p{i}" for i in range(count)], prompts), np.array(logs)


def answers(rng, logs, spread, cap, responses=4):
    lengths = np.exp(logs[:, None] + spread * rng.standard_normal((len(logs), responses)))
    lengths = np.maximum(np.rint(lengths), 1)
    seen = np.minimum(lengths, cap)
    return observe(list(zip(seen.tolist(), (lengths >= cap).tolist(), strict=True)))


def test_ridge_picks_the_penalty_that_refitting_without_each_row_picks():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(30, 6))
    target = features @ rng.normal(size=6) + rng.normal(size=30)

    def error(penalty):
        total = 0.0
        for row in range(30):
            keep = np.arange(30) != row
            gram = features[keep].T @ features[keep] + penalty * np.eye(6)
            weights = np.linalg.solve(gram, features[keep].T @ target[keep])
            total += (target[row] - features[row] @ weights) ** 2
        return total

    penalty, weights = best_ridge(features, target)
    assert penalty == min(PENALTIES, key=error)
    expected = np.linalg.solve(features.T @ features + penalty * np.eye(6), features.T @ target)
    np.testing.assert_allclose(weights, expected, rtol=1e-8)


def test_ridge_takes_unknown_values_as_the_mean():
    rng = np.random.default_rng(1)
    features = rng.normal(size=(60, 3))
    features[:, 2] = np.nan
    target = 2 * features[:, 0] + 5
    ridge = fit_ridge(features, target)
    assert ridge.predict(np.array([[1.0, 0.0, 3.0]]))[0] == pytest.approx(7, abs=0.1)
    assert ridge.predict(np.array([[np.nan, 0.0, np.nan]]))[0] == pytest.approx(target.mean(), abs=0.1)


def test_features_count_tokens():
    prompts = make_prompts(["a", "b", "c"], [[5, 7, 7, 900], [], [7]])
    prompts = prompts.with_greedy(np.array([8.0, np.nan, 1.0]), np.array([-4.0, np.nan, -0.5]))
    found = matrix(prompts, np.array([5, 7]))
    np.testing.assert_array_equal(found[:, PLAIN:], [[1, 2], [0, 0], [0, 1]])
    np.testing.assert_allclose(found[0, :PLAIN], [4, np.log(5), np.log(8), -4, -0.5, 2])
    np.testing.assert_allclose(found[1, :PLAIN], [0, 0, np.nan, np.nan, np.nan, 0])


def test_features_rank_unseen_prompts():
    rng = np.random.default_rng(2)
    prompts, logs = synthetic(rng, 300)
    fitted = fit_features(prompts, logs, 0)
    unseen, truth = synthetic(rng, 200)
    assert spearmanr(fitted.predict(unseen), truth).statistic > 0.95
    assert fitted.weight > 0.2  # the threshold is for trees


def test_features_use_greedy_responses_where_they_are_known():
    rng = np.random.default_rng(3)
    prompts, _ = synthetic(rng, 200)
    logs = rng.normal(4, 1, size=200)
    told = prompts.with_greedy(np.exp(logs + 0.1 * rng.standard_normal(200)), np.full(200, -3.0))
    fitted = fit_features(told.take(np.arange(150)), logs[:150], 0)
    late = told.take(np.arange(150, 200))
    assert spearmanr(fitted.predict(late), logs[150:]).statistic > 0.95
    gone = late.with_greedy(np.full(50, np.nan), np.full(50, np.nan))
    assert np.all(np.isfinite(fitted.predict(gone)))


@pytest.mark.parametrize("count", [2, 3, 39, 60])
def test_features_survive_few_and_constant_data(count):
    prompts = make_prompts([str(i) for i in range(count)], [[3, 4]] * count)
    assert fit_features(prompts, np.full(count, 2.0), 0).predict(prompts) == pytest.approx(np.full(count, 2.0))
    rng = np.random.default_rng(0)
    assert np.all(np.isfinite(fit_features(prompts, rng.normal(size=count), 0).predict(prompts)))


def test_a_million_prompts_are_predicted_in_chunks(monkeypatch):
    """In small: chunks change nothing."""
    rng = np.random.default_rng(4)
    prompts, logs = synthetic(rng, 100)
    fitted = fit_features(prompts, logs, 0)
    whole = fitted.predict(prompts)
    monkeypatch.setattr("forebay.lengths.features.CHUNK", 7)
    np.testing.assert_array_equal(fitted.predict(prompts), whole)


@pytest.fixture(scope="module")
def start_model(tmp_path_factory):
    """Its weights are made smaller: as drawn they saturate it, and it could learn nothing."""
    folder = make_start_model(tmp_path_factory.mktemp("model"), hidden=32, layers=2)
    weights = load_file(folder / "model.safetensors")
    smaller = {name: tensor * 0.2 if tensor.ndim == 2 else tensor for name, tensor in weights.items()}
    save_file(smaller, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_hidden_states_are_those_of_each_prompt_alone(start_model):
    """Batching and padding must not show: a ridge on a plain forward pass of each prompt predicts the same."""
    rng = np.random.default_rng(5)
    prompts, logs = synthetic(rng, 60)
    model = AutoModelForCausalLM.from_pretrained(start_model).eval()
    rows = []
    with torch.no_grad():
        for i in range(60):
            states = model(torch.tensor([prompts.tokens_of(i)]), output_hidden_states=True).hidden_states[-1][0]
            rows.append(torch.cat([states[-1], states.mean(0)]).double().numpy())
    expected = fit_ridge(np.stack(rows), logs).predict(np.stack(rows))
    fitted = fit_hidden_state(prompts, logs, str(start_model), "float32")
    np.testing.assert_allclose(fitted.predict(prompts), expected, atol=1e-3)


def test_length_lm_learns_and_ranks_unseen_prompts(start_model):
    """What the last token says, behind prompts of many lengths."""
    rng = np.random.default_rng(6)
    prompts, _ = synthetic(rng, 260)
    logs = 3 + np.array([prompts.tokens_of(i)[-1] > 25 for i in range(260)]) + 0.05 * rng.standard_normal(260)
    fitted = fit_length_lm(prompts.take(np.arange(200)), logs[:200], str(start_model), "model.path", seed=0)
    told = fitted.predict(prompts.take(np.arange(200, 260)))
    assert np.mean((told - logs[200:]) ** 2) < 0.3 * logs[200:].var()


def test_length_lm_keeps_the_mean_when_nothing_can_be_learned(start_model):
    prompts, _ = synthetic(np.random.default_rng(7), 20)
    fitted = fit_length_lm(prompts, np.full(20, 3.5), str(start_model), "model.path", seed=0)
    np.testing.assert_allclose(fitted.predict(prompts), 3.5)


def test_a_model_that_cannot_serve_is_one_line(start_model, tmp_path):
    prompts, logs = synthetic(np.random.default_rng(8), 8)
    with pytest.raises(UserError, match=r"^lengths.model .*none: cannot be loaded \("):
        fit_length_lm(prompts, logs, str(tmp_path / "none"), "lengths.model", 0)
    foreign = make_prompts(["a", "b"], [[5000], [1]])
    with pytest.raises(UserError, match="knows 102 tokens, and the prompts have token 5000"):
        fit_hidden_state(foreign, np.array([1.0, 2.0]), str(start_model), "float32")


@dataclass(frozen=True)
class Told:
    """A location that is given."""

    logs: np.ndarray

    def predict(self, prompts):
        return self.logs[[int(name) for name in prompts.ids]]


def named(count):
    return make_prompts([str(i) for i in range(count)], [[3]] * count)


@given(
    logs=st.lists(st.floats(-1e6, 1e6) | st.sampled_from([float("inf"), float("-inf")]), min_size=1, max_size=12),
    longest=st.integers(1, 10**6),
    within=st.floats(0, 5),
    error=st.floats(0, 5),
    scores=st.tuples(st.floats(-9, 9), st.floats(0, 9) | st.just(float("inf"))),
    line=st.tuples(st.floats(-20, 20), st.floats(0.5, 2)),
)
def test_predictions_are_finite_and_within_the_budget_whatever_the_location_says(
    logs, longest, within, error, scores, line
):
    predictor = Calibrated(
        Told(np.array(logs)),
        longest,
        within,
        error,
        mean_offset=line[0],
        mean_slope=line[1],
        median_score=scores[0],
        upper_score=scores[0] + scores[1],
    )
    found = predictor.predict(named(len(logs)))
    for values in (found.mean, found.median, found.upper):
        assert np.all(np.isfinite(values) & (values >= 1) & (values <= longest))
    assert np.all(found.median <= found.upper)


def test_a_location_that_is_no_number_is_one_line():
    predictor = Calibrated(Told(np.array([1.0, np.nan, np.nan])), 64, 0.5, 0.5)
    with pytest.raises(
        RunError, match=r"^lengths: the predictor gives no number for 2 of 3 prompts \(the first is 1\)"
    ):
        predictor.predict(named(3))


def product_limit(values, censored, share):
    """Kaplan and Meier, as in the textbook: a loop over distinct times."""
    survival = 1.0
    for time in sorted({v for v, c in zip(values, censored, strict=True) if not c}):
        at_risk = sum(v >= time for v in values)
        deaths = sum(v == time and not c for v, c in zip(values, censored, strict=True))
        survival *= 1 - deaths / at_risk
        if 1 - survival >= share - 1e-12:
            return time
    return float("inf")


@given(
    data=st.lists(st.tuples(st.integers(0, 12).map(float), st.booleans()), min_size=1, max_size=30),
    share=st.floats(0.05, 0.95),
)
def test_quantiles_of_censored_values_equal_the_product_limit(data, share):
    values, censored = np.array([v for v, _ in data]), np.array([c for _, c in data])
    asked = min(share * 11 / 10, 1.0)  # ten held-out prompts
    assert quantile(values, censored, share, 10) == product_limit(values, censored, asked)


def test_quantiles_cover_new_prompts_although_many_responses_are_cut_off():
    """Skewed residuals, which a normal distribution would miss, and a third of the responses truncated."""
    rng = np.random.default_rng(9)
    logs = rng.normal(4, 0.5, size=3000)
    noise = rng.exponential(0.7, size=(3000, 4)) - 0.7
    lengths, cap = np.exp(logs[:, None] + noise), 80.0
    cut = lengths >= cap
    rows = list(zip(np.minimum(lengths, cap).tolist(), cut.tolist(), strict=True))
    predictor = Calibrated(Told(logs), 80, within=0.7, error=0.0)
    first = np.arange(1000)
    calibrated = with_quantiles(predictor, named(3000).take(first), observe(rows[:1000]), 0.9)
    found = calibrated.predict(named(3000).take(np.arange(1000, 3000)))
    assert 0.2 < cut.mean() < 0.4
    open_ended = found.upper < cap
    assert np.mean(lengths[1000:][open_ended] <= found.upper[open_ended, None]) == pytest.approx(0.9, abs=0.02)
    below = found.median < cap
    assert np.mean(lengths[1000:][below] <= found.median[below, None]) == pytest.approx(0.5, abs=0.03)


def test_the_mean_is_right_on_average_and_in_every_third():
    """The spread grows with length, as in real data: a plain retransformation is off at both ends."""
    rng = np.random.default_rng(10)
    logs = rng.uniform(1.5, 5, size=4000)
    noise = (logs / 5)[:, None] * rng.standard_normal((4000, 4))
    lengths = np.clip(np.rint(np.exp(logs[:, None] + noise)), 1, 400)
    observed = observe([(row.tolist(), (row >= 400).tolist()) for row in lengths])
    fitted = with_mean(Calibrated(Told(logs), 400, 0.7, 0.0), named(4000), observed)
    predicted = fitted.predict(named(4000)).mean
    assert predicted.mean() == pytest.approx(lengths.mean(), rel=1e-3)
    for part in np.array_split(np.argsort(logs), 3):
        assert predicted[part].mean() == pytest.approx(lengths[part].mean(), rel=0.12)


@pytest.mark.parametrize("flag", [False, True])
def test_constant_lengths_are_predicted_as_such(flag):
    observed = observe([([64.0, 64.0], [flag, flag])] * 8)
    predictor = with_error(Calibrated(Told(np.full(8, np.log(64))), 64, 0.0, 0.0), named(8), observed)
    predictor = with_quantiles(with_mean(predictor, named(8), observed), named(8), observed, 0.9)
    found = predictor.predict(named(8))
    for values in (found.mean, found.median, found.upper):
        np.testing.assert_allclose(values, 64, rtol=0.01)


def test_the_error_is_what_the_spread_of_responses_does_not_explain():
    rng = np.random.default_rng(11)
    logs = rng.normal(4, 1, size=3000)
    observed = answers(rng, logs, 0.5, cap=1e9)
    told = Told(logs + 0.3 * rng.standard_normal(3000))
    assert with_error(Calibrated(told, 10**6, 0.5, 1.0), named(3000), observed).error == pytest.approx(0.3, abs=0.03)


def test_own_responses_sharpen_a_prediction_and_more_of_them_more():
    predictor = Calibrated(Told(np.full(3, 3.0)), 10**6, within=0.5, error=1.0)
    seen = {"1": ([200.0], [False]), "2": ([200.0] * 16, [False] * 16)}
    mu, sd = Calibrated(Told(np.full(3, 3.0)), 10**6, 0.5, 1.0, known=(Known(seen),)).locate(named(3))
    assert mu[0] == 3.0
    assert mu[0] < mu[1] < mu[2] < np.log(200)
    assert sd[0] > sd[1] > sd[2] > 0.5
    assert sd[0] == pytest.approx(predictor.locate(named(3))[1][0])


def test_an_earlier_run_of_another_policy_is_corrected_for_the_drift():
    """Its responses were twice as long, all of them; the policy ranks prompts as it did."""
    rng = np.random.default_rng(12)
    logs = rng.normal(4, 0.8, size=200)
    old = answers(rng, logs + np.log(2), 0.4, 1e9, responses=8)
    now = answers(rng, logs, 0.4, 1e9)
    known = Known(dict(zip(named(200).ids, old.lists(), strict=True)))
    plain = Calibrated(Told(np.full(200, 4.0)), 10**6, within=0.4, error=0.8)
    first, rest = np.arange(100), np.arange(100, 200)
    drifted = with_drift(known, plain, named(200).take(first), now.take(first))
    told = Calibrated(Told(np.full(200, 4.0)), 10**6, 0.4, 0.8, known=(drifted,)).locate(named(200).take(rest))[0]
    assert np.mean(told - logs[rest]) == pytest.approx(0, abs=0.05)
    assert np.corrcoef(told, logs[rest])[0, 1] > 0.95
    few = with_drift(known, plain, named(200).take(np.arange(10)), now.take(np.arange(10)))
    assert few == known


def write(path, rows, schema=None):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    return path


def test_history_reads_ledgers_and_profiles(tmp_path):
    ledger = [
        {"prompt_id": "a", "fate": "trained", "lengths": [5, 64]},
        {"prompt_id": "a", "fate": "stale", "lengths": [7, 7]},
        {"prompt_id": "b", "fate": "failed", "lengths": [1]},
        {"prompt_id": "c", "fate": "filtered", "lengths": []},
    ]
    found = read_history(write(tmp_path / "ledger.parquet", ledger), longest=64)
    assert found == {"a": ([5.0, 64.0, 7.0, 7.0], [False, True, False, False])}
    profile = [{"prompt_id": "a", "lengths": [64, 64], "truncated": [True, False]}]
    found = read_history(write(tmp_path / "profile.parquet", profile), longest=64)
    assert found == {"a": ([64.0, 64.0], [True, False])}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt_id": "a", "lengths": [3.0, float("nan")]}], r"row 0 \(prompt a\): a length is nan, not a number"),
        ([{"prompt_id": "a", "lengths": [3, 0]}], "a length is 0, not a number of tokens of 1 or more"),
        ([{"prompt_id": "a", "lengths": [3, None]}], "a length is nan"),
        ([{"prompt_id": "a", "lengths": 3}], "column lengths holds no lists"),
        ([{"prompt_id": "a", "predicted": 3.0}], "has no column lengths"),
        ([{"prompt_id": "a", "lengths": [3, 4], "truncated": [True]}], "lengths and truncated differ in number"),
    ],
)
def test_a_history_that_makes_no_sense_is_one_line(tmp_path, rows, message):
    path = write(tmp_path / "h.parquet", rows)
    with pytest.raises(UserError, match=message) as caught:
        read_history(path, 64)
    assert str(caught.value).startswith(f"lengths.history {path}")
    assert "\n" not in str(caught.value)


def test_a_history_that_is_not_there_or_no_parquet_is_one_line(tmp_path):
    with pytest.raises(UserError, match="there is no such file"):
        read_history(tmp_path / "none.parquet", 64)
    (tmp_path / "text.parquet").write_text("no")
    with pytest.raises(UserError, match="cannot be read as Parquet"):
        read_history(tmp_path / "text.parquet", 64)
