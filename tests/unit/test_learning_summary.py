import pytest

from forebay.config import parse_config
from forebay.telemetry.learning import learning_of

STEPS = [
    {
        "clip_fraction": 0.1,
        "correction/weight_mean": 1.0,
        "correction/clipped": 0.0,
        "correction/masked": 0.5,
        "correction/rejected": 0.0,
        "mismatch/mean_abs": 0.01,
        "mismatch/max_abs": 0.5,
        "mismatch/kl_k1": -0.1,
        "mismatch/kl_mean": 0.2,
        "mismatch/perplexity_ratio": 0.9,
        "mismatch/effective_sample_size": 1.0,
        "mismatch/alarm": 0.0,
        "off_policy/mean_abs": 0.5,
        "off_policy/max_abs": 7.0,
        "critic/value_loss": 4.0,
        "critic/clip_fraction": 0.0,
        "critic/explained_variance": -1.0,
    },
    {"tokens": 0.0},
    {
        "clip_fraction": 0.3,
        "correction/masked": 0.1,
        "mismatch/mean_abs": 0.03,
        "mismatch/max_abs": 0.2,
        "mismatch/alarm": 1.0,
        "critic/value_loss": 2.0,
        "critic/explained_variance": 0.5,
    },
    {"clip_fraction": None, "critic/value_loss": 0.0},
]


def test_means_maxima_and_counts_over_the_steps_that_have_them() -> None:
    config = parse_config({"algorithm": {"advantage": "gae", "correction": "icepop"}}, "test")
    found = learning_of(config, STEPS)
    assert (found["advantage"], found["policy_loss"], found["correction"]) == ("gae", "ppo", "icepop")
    assert found["clip_fraction"] == pytest.approx(0.2)
    assert found["corrected"] == pytest.approx({"weight_mean": 1.0, "clipped": 0.0, "masked": 0.3, "rejected": 0.0})
    assert found["mismatch"] == pytest.approx(
        {
            "mean_abs": 0.02,
            "max_abs": 0.5,
            "kl_k1": -0.1,
            "kl_k3": 0.2,
            "perplexity_ratio": 0.9,
            "effective_sample_size": 1.0,
            "alarms": 1.0,
        }
    )
    assert (found["off_policy"]["mean_abs"], found["off_policy"]["max_abs"]) == (0.5, 7.0)
    assert "alarms" not in found["off_policy"]
    assert found["critic"] == pytest.approx(
        {"value_loss": 2.0, "clip_fraction": 0.0, "explained_variance": -0.25, "explained_variance_last": 0.5}
    )


def test_what_nothing_is_known_of_is_null() -> None:
    found = learning_of(parse_config({}, "test"), [{"tokens": 0.0}])
    assert (found["correction"], found["mismatch"], found["critic"]) == ("behaviour", None, None)
    assert found["off_policy"] is None
    assert found["clip_fraction"] is None
