import math

import numpy as np
import pytest
import torch

from forebay.training.algorithms.mismatch import Mismatch, alarm


def reference(engine: np.ndarray, trainer: np.ndarray) -> dict[str, float]:
    gaps = trainer - engine
    w = np.exp(gaps)
    n = len(gaps)
    return {
        "mismatch/mean_abs": sum(abs(g) for g in gaps) / n,
        "mismatch/max_abs": max(abs(g) for g in gaps),
        "mismatch/kl_k1": sum(-g for g in gaps) / n,
        "mismatch/kl_mean": sum(math.exp(g) - 1 - g for g in gaps) / n,
        "mismatch/perplexity_ratio": math.exp(-trainer.mean()) / math.exp(-engine.mean()),
        "mismatch/effective_sample_size": sum(w) ** 2 / (n * sum(x * x for x in w)),
    }


def sample() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    engine = -rng.exponential(1.0, 200)
    return engine, engine + rng.normal(0, 0.3, 200), rng.random(200) < 0.7


def of(*arrays: np.ndarray) -> Mismatch:
    sums = Mismatch.empty()
    sums.add(*(torch.from_numpy(a) for a in arrays))
    return sums


def test_metrics_equal_the_reference() -> None:
    engine, trainer, mask = sample()
    expected = reference(engine[mask], trainer[mask])
    engine[~mask], trainer[~mask] = np.nan, -np.inf
    assert of(engine, trainer, mask).result() == pytest.approx(expected, rel=1e-12)


def test_parts_add_up_over_micro_batches_and_ranks() -> None:
    engine, trainer, mask = sample()
    whole = of(engine, trainer, mask).result()
    ranks = []
    for rank in range(3):
        sums = Mismatch.empty()
        for start in range(rank * 60, 200 if rank == 2 else rank * 60 + 60, 17):
            end = min(start + 17, 200 if rank == 2 else rank * 60 + 60)
            sums.add(*(torch.from_numpy(a[start:end]) for a in (engine, trainer, mask)))
        ranks.append(sums)
    idle = Mismatch.empty()
    assert ranks[2].merge(idle).merge(ranks[0]).merge(ranks[1]).result() == pytest.approx(whole, rel=1e-12)


def test_float32_inputs_give_no_gradient_and_no_float32_sums() -> None:
    engine, trainer = torch.zeros(3), torch.full((3,), 0.1, requires_grad=True)
    sums = Mismatch.empty()
    sums.add(engine, trainer, torch.ones(3, dtype=torch.bool))
    assert sums.sums.dtype == torch.float64
    assert not sums.sums.requires_grad


def test_one_token_among_four_halves_nothing_twice() -> None:
    # w = 1, 1, 1, 3: (1 + 1 + 1 + 3)^2 / (4 (1 + 1 + 1 + 9)) = 36 / 48
    found = of(np.zeros(4), np.log([1.0, 1.0, 1.0, 3.0]), np.ones(4, bool)).result()
    assert found["mismatch/effective_sample_size"] == pytest.approx(0.75)
    assert found["mismatch/max_abs"] == pytest.approx(math.log(3))
    assert found["mismatch/perplexity_ratio"] == pytest.approx(3**-0.25)


def test_equal_policies() -> None:
    engine, _, mask = sample()
    found = of(engine, engine, mask).result()
    assert found["mismatch/effective_sample_size"] == pytest.approx(1)
    assert found["mismatch/perplexity_ratio"] == 1
    assert found["mismatch/mean_abs"] == found["mismatch/max_abs"] == found["mismatch/kl_mean"] == 0


def test_nothing_to_compare_gives_no_metrics() -> None:
    assert Mismatch.empty().result() == {}
    assert of(np.zeros(0), np.zeros(0), np.zeros(0, bool)).result() == {}
    assert of(np.full(3, np.nan), np.zeros(3), np.zeros(3, bool)).result() == {}


def test_an_impossible_token_shows_in_the_maximum_and_leaves_the_rest_finite() -> None:
    found = of(np.array([-1.0, -1.0]), np.array([-np.inf, -1.0]), np.ones(2, bool)).result()
    assert found["mismatch/max_abs"] == found["mismatch/mean_abs"] == math.inf
    assert all(math.isfinite(found[f"mismatch/{k}"]) for k in ("kl_k1", "kl_mean", "effective_sample_size"))


def test_the_alarm() -> None:
    assert alarm({}, 0.05) is None
    assert alarm({"mismatch/mean_abs": 0.05}, 0.05) is None
    message = alarm({"mismatch/mean_abs": 0.0731}, 0.05)
    assert message is not None
    assert "0.0731" in message
    assert "mismatch_alarm is 0.05" in message
