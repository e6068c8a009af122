"""The whole loss through a small softmax policy: values against float64 loops, gradients against finite differences."""

import math
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import pytest
import torch

from forebay.config.algorithm import AlgorithmConfig, Correction
from forebay.errors import RunError
from forebay.training.algorithms.aggregation import divisor, token_weights, weighted_sum
from forebay.training.algorithms.token_loss import TokenInputs, TokenLoss, token_loss

CORRECTIONS: tuple[Correction, ...] = get_args(Correction)
CONTEXTS, WORDS = 6, 5
STATS = {"clipped", "correction_weight", "correction_clipped", "correction_masked", "correction_rejected", "kl"}


@dataclass
class Data:
    """R tokens under a table of logits theta (contexts, words)."""

    theta: np.ndarray
    contexts: np.ndarray
    words: np.ndarray
    sequence: np.ndarray
    mask: np.ndarray
    advantages: np.ndarray
    proximal: np.ndarray
    behaviour: np.ndarray
    reference: np.ndarray

    def logprobs(self, theta: np.ndarray) -> np.ndarray:
        """(R,)."""
        table = theta - np.log(np.exp(theta).sum(1, keepdims=True))
        return table[self.contexts, self.words]


def sample(seed: int = 18, masked: float = 0.15) -> Data:
    rng = np.random.default_rng(seed)
    lengths = np.array([1, 1, 4, 7, 2, 5, 3, 6])
    sequence = np.repeat(np.arange(8), lengths)
    n = len(sequence)
    data = Data(
        theta=rng.normal(0, 1, (CONTEXTS, WORDS)),
        contexts=rng.integers(0, CONTEXTS, n),
        words=rng.integers(0, WORDS, n),
        sequence=sequence,
        mask=rng.random(n) >= masked,
        advantages=(rng.choice([-1, 1], 8) * rng.uniform(0.2, 1.5, 8))[sequence],
        proximal=np.zeros(n),
        behaviour=np.zeros(n),
        reference=np.zeros(n),
    )
    logprobs = data.logprobs(data.theta)
    data.proximal = logprobs - rng.normal(0, 0.3, n) - rng.normal(0, 0.3, 8)[sequence]
    data.behaviour = data.proximal - rng.normal(0, 0.5, n) - rng.normal(0, 0.5, 8)[sequence]
    data.reference = logprobs - rng.normal(0, 0.4, n)
    return data


def expected_losses(theta: np.ndarray, data: Data, config: AlgorithmConfig, proximal: np.ndarray | None) -> list[float]:
    """The loss of each token as a function of theta. What the formulas hold fixed (sg[...]) is taken at data.theta."""
    now, frozen = data.logprobs(theta), data.logprobs(data.theta)
    proximal = frozen if proximal is None else proximal
    name = "behaviour" if config.correction == "auto" else config.correction
    old = data.behaviour if name == "behaviour" else proximal
    low, high = 1 - config.clip_low, 1 + config.clip_high
    result = []
    for t in range(len(data.mask)):
        if not data.mask[t]:
            result.append(0.0)
            continue
        own = [s for s in range(len(data.mask)) if data.sequence[s] == data.sequence[t] and data.mask[s]]
        logs = [proximal[s] - data.behaviour[s] for s in own]
        w, product, mean = math.exp(proximal[t] - data.behaviour[t]), math.exp(sum(logs)), math.exp(np.mean(logs))
        trusted = [config.correction_low <= x <= config.correction_high for x in (w, mean)]
        weight = {
            "decoupled": w,
            "tis_token": min(w, config.correction_high),
            "tis_sequence": min(product, config.correction_high),
            "icepop": w * trusted[0],
            "reject_sequence": 1.0 * trusted[1],
        }.get(name, 1.0)
        a = data.advantages[t]
        if config.policy_loss == "cispo":
            loss = -min(max(math.exp(frozen[t] - old[t]), low), high) * a * now[t]
        else:
            if config.policy_loss == "gspo":
                ratio = math.exp(np.mean([frozen[s] - old[s] for s in own])) * math.exp(now[t] - frozen[t])
            else:
                ratio = math.exp(now[t] - old[t])
            objective = min(ratio * a, min(max(ratio, low), high) * a)
            if config.policy_loss == "ppo" and config.dual_clip is not None and a < 0:
                objective = max(objective, config.dual_clip * a)
            loss = -objective
        d = now[t] - data.reference[t]
        kl = {"k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[config.kl_estimator]
        result.append(weight * loss + (config.kl_coefficient * kl if config.kl == "loss" else 0.0))
    return result


def total(losses: list[float], data: Data, config: AlgorithmConfig) -> float:
    """Aggregated by definition: mean over tokens, or mean over responses of token means."""
    values, per = np.array(losses), []
    if config.aggregation == "token_mean":
        return float(values[data.mask].mean())
    for s in np.unique(data.sequence[data.mask]):
        per.append(values[data.mask & (data.sequence == s)].mean())
    return float(np.mean(per))


def run(data: Data, config: AlgorithmConfig, proximal: np.ndarray | None) -> tuple[TokenLoss, float, np.ndarray]:
    """(result, loss of the batch, its gradient by theta)."""
    theta = torch.from_numpy(data.theta).requires_grad_()
    logprobs = theta.log_softmax(-1)[torch.from_numpy(data.contexts), torch.from_numpy(data.words)]
    inputs = TokenInputs(
        behaviour=torch.from_numpy(data.behaviour),
        advantages=torch.from_numpy(data.advantages),
        sequence=torch.from_numpy(data.sequence),
        mask=torch.from_numpy(data.mask),
        proximal=None if proximal is None else torch.from_numpy(proximal),
        reference=torch.from_numpy(data.reference) if config.kl == "loss" else None,
    )
    result = token_loss(logprobs, inputs, config)
    weights = token_weights(config.aggregation, inputs.sequence, inputs.mask)
    lengths = [int((data.mask & (data.sequence == s)).sum()) for s in range(data.sequence.max() + 1)]
    loss = weighted_sum(result.loss, weights) / divisor(config.aggregation, lengths)
    loss.backward()
    assert theta.grad is not None
    return result, loss.item(), theta.grad.numpy()


def with_rubbish(data: Data) -> Data:
    """NaN and infinities, by turns, wherever nothing is trained."""
    fields = {}
    for k, name in enumerate(("advantages", "proximal", "behaviour", "reference")):
        fields[name] = getattr(data, name).copy()
        fields[name][~data.mask] = np.resize(np.roll([np.nan, np.inf, -np.inf], k), (~data.mask).sum())
    return replace(data, **fields)


@pytest.mark.parametrize("own_proximal", [False, True])
@pytest.mark.parametrize("kl", ["none", "k2", "k3"])
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
def test_loss_and_gradient_of_every_combination(loss: str, correction: Correction, kl: str, own_proximal: bool) -> None:
    data = sample()
    config = AlgorithmConfig.model_validate(
        dict(
            policy_loss=loss,
            correction=correction,
            dual_clip=1.5,
            aggregation="sequence_mean" if loss == "gspo" else "token_mean",
            kl="none" if kl == "none" else "loss",
            kl_estimator="k3" if kl == "none" else kl,
            kl_coefficient=0.3,
        )
    )
    proximal = data.proximal if own_proximal else None

    def objective(theta: np.ndarray) -> float:
        return total(expected_losses(theta, data, config, proximal), data, config)

    dirty = with_rubbish(data)
    result, value, gradient = run(dirty, config, dirty.proximal if own_proximal else None)
    assert result.correction == correction
    assert result.loss.detach().numpy() == pytest.approx(
        expected_losses(data.theta, data, config, proximal), rel=1e-10, abs=1e-12
    )
    assert value == pytest.approx(objective(data.theta), rel=1e-6, abs=1e-7)  # the weights are float32
    h, slopes = 1e-6, np.zeros_like(data.theta)
    for index in np.ndindex(data.theta.shape):
        step = np.zeros_like(data.theta)
        step[index] = h
        slopes[index] = (objective(data.theta + step) - objective(data.theta - step)) / (2 * h)
    assert gradient == pytest.approx(slopes, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("correction", ["behaviour", "none", "tis_sequence", "reject_sequence"])
def test_gspo_with_sequence_wide_weights_is_the_gradient_through_the_sequence_ratio(correction: Correction) -> None:
    """No stop-gradient in the reference: s = exp(mean log-ratio), clipped, per sequence."""
    data = sample()
    config = AlgorithmConfig.model_validate(
        dict(policy_loss="gspo", correction=correction, aggregation="sequence_mean")
    )
    old = data.behaviour if correction == "behaviour" else data.proximal

    def objective(theta: np.ndarray) -> float:
        now, losses = data.logprobs(theta), []
        for s in np.unique(data.sequence[data.mask]):
            own = data.mask & (data.sequence == s)
            log_w = (data.proximal - data.behaviour)[own]
            weight = 1.0
            if correction == "tis_sequence":
                weight = min(math.exp(log_w.sum()), 2.0)
            elif correction == "reject_sequence":
                weight = float(0.5 <= math.exp(log_w.mean()) <= 2.0)
            ratio, a = math.exp((now - old)[own].mean()), data.advantages[own][0]
            losses.append(-weight * min(ratio * a, min(max(ratio, 0.8), 1.28) * a))
        return float(np.mean(losses))

    _, value, gradient = run(data, config, data.proximal)
    assert value == pytest.approx(objective(data.theta), rel=1e-6, abs=1e-7)
    h, slopes = 1e-6, np.zeros_like(data.theta)
    for index in np.ndindex(data.theta.shape):
        step = np.zeros_like(data.theta)
        step[index] = h
        slopes[index] = (objective(data.theta + step) - objective(data.theta - step)) / (2 * h)
    assert gradient == pytest.approx(slopes, rel=1e-5, abs=1e-7)


def test_the_sample_meets_every_clip_and_no_kink_is_near() -> None:
    """What the finite differences above rest on."""
    data = sample()
    assert (~data.mask).sum() >= 3
    now = data.logprobs(data.theta)
    owners = [data.mask & (data.sequence == s) for s in np.unique(data.sequence[data.mask])]
    for old in (data.proximal, data.behaviour):
        token = np.exp(now - old)[data.mask]
        whole = np.exp([(now - old)[own].mean() for own in owners])
        for values, a in ((token, data.advantages[data.mask]), (whole, [data.advantages[own][0] for own in owners])):
            for good, bound in ((True, 1.28), (False, 0.8)):
                _on_both_sides(values[(np.array(a) > 0) == good], bound)
        _on_both_sides(token[data.advantages[data.mask] < 0], 1.5)
    log_w = data.proximal - data.behaviour
    _on_both_sides(np.exp(log_w)[data.mask], 0.5, 2.0)
    _on_both_sides(np.exp([log_w[own].mean() for own in owners]), 0.5, 2.0)
    _on_both_sides(np.exp([log_w[own].sum() for own in owners]), 2.0)


def _on_both_sides(values: np.ndarray, *bounds: float) -> None:
    for bound in bounds:
        assert np.abs(values - bound).min() > 1e-3
        assert 0 < (values > bound).sum() < len(values)


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
def test_statistics_are_sums_over_trained_tokens(loss: str) -> None:
    data = sample()
    for correction in CORRECTIONS:
        for kl in ("none", "loss"):
            config = AlgorithmConfig.model_validate(
                dict(policy_loss=loss, correction=correction, kl=kl, kl_estimator="k2")
            )
            result, _, _ = run(with_rubbish(data), config, with_rubbish(data).proximal)
            stats = {key: value.item() for key, value in result.stats.items()}
            assert stats.keys() == STATS
            assert all(value.dtype == torch.float64 and value.ndim == 0 for value in result.stats.values())
            assert stats["clipped"] == int(result.clipped.sum())
            assert stats["correction_weight"] == pytest.approx(float(result.weight.sum()))
            assert result.weight[~torch.from_numpy(data.mask)].abs().sum() == 0
            assert result.ratio[~torch.from_numpy(data.mask)].tolist() == [1.0] * int((~data.mask).sum())
            d = (data.logprobs(data.theta) - data.reference)[data.mask]
            assert stats["kl"] == pytest.approx(float((d * d / 2).sum()) if kl == "loss" else 0.0)
            flagged = {key: stats[key] for key in stats if key.startswith("correction_") and key[-1] == "d"}
            expected = {"tis_token": "clipped", "tis_sequence": "clipped", "icepop": "masked"}
            expected["reject_sequence"] = "rejected"
            assert {key for key, n in flagged.items() if n} == (
                {f"correction_{expected[correction]}"} if correction in expected else set()
            )


def test_auto_is_named_by_what_it_means() -> None:
    data = sample()
    assert run(data, AlgorithmConfig(), None)[0].correction == "behaviour"


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_masked_log_probabilities_of_any_value_change_nothing(loss: str, correction: Correction) -> None:
    data = sample()
    config = AlgorithmConfig.model_validate(dict(policy_loss=loss, correction=correction, kl="loss"))
    mask = torch.from_numpy(data.mask)
    inputs = TokenInputs(
        *(torch.from_numpy(a) for a in (data.behaviour, data.advantages, data.sequence, data.mask)),
        reference=torch.from_numpy(data.reference),
    )
    found = []
    for rubbish in (0.0, math.nan, math.inf, -math.inf):
        x = torch.from_numpy(data.logprobs(data.theta)).masked_fill(~mask, rubbish).requires_grad_()
        result = token_loss(x, inputs, config)
        result.loss.sum().backward()
        assert x.grad is not None
        assert x.grad[~mask].tolist() == [0.0] * int((~mask).sum())
        assert result.loss[~mask].tolist() == [0.0] * int((~mask).sum())
        found.append((x.grad, result.loss.detach(), result.ratio, result.weight))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_nothing_trained_still_has_a_backward_pass(loss: str, correction: Correction, tokens: int) -> None:
    """As in a padding micro-batch."""
    config = AlgorithmConfig.model_validate(dict(policy_loss=loss, correction=correction, kl="loss"))
    data, no = torch.full((tokens,), torch.nan), torch.zeros(tokens, dtype=torch.bool)
    x = torch.full((tokens,), -torch.inf, requires_grad=True)
    inputs = TokenInputs(data, data, torch.zeros(tokens, dtype=torch.int64), no, data, data)
    result = token_loss(x, inputs, config)
    weighted_sum(result.loss, token_weights("token_mean", inputs.sequence, no)).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.0] * tokens
    assert all(value.item() == 0 for value in result.stats.values())
    assert result.loss.dtype == result.weight.dtype == torch.float32


def test_a_trained_token_that_is_not_a_number_shows_in_the_loss() -> None:
    data = sample()
    data.mask[:] = True
    for correction in CORRECTIONS:
        config = AlgorithmConfig(correction=correction)
        broken = replace(data, behaviour=np.where(np.arange(len(data.mask)) == 3, np.nan, data.behaviour))
        x = torch.from_numpy(data.logprobs(data.theta))
        x[3] = math.nan
        inputs = TokenInputs(
            *(torch.from_numpy(a) for a in (broken.behaviour, data.advantages, data.sequence, data.mask))
        )
        assert math.isnan(token_loss(x, inputs, config).loss.sum().item())


def test_equal_rewards_teach_nothing_but_the_reference() -> None:
    data = sample()
    data.advantages[:] = 0.0
    for loss in ("ppo", "gspo", "cispo"):
        result, _, gradient = run(data, AlgorithmConfig.model_validate(dict(policy_loss=loss)), None)
        assert np.abs(gradient).max() == 0
        assert not bool(result.clipped.any())
    _, _, gradient = run(data, AlgorithmConfig(kl="loss"), None)
    assert np.abs(gradient).max() > 0


def test_a_kl_term_needs_a_reference() -> None:
    none = torch.zeros(0)
    with pytest.raises(RunError, match="log-probabilities of the reference model"):
        token_loss(none, TokenInputs(none, none, none.long(), none.bool()), AlgorithmConfig(kl="loss"))


def test_one_update_per_batch_without_correction_is_plain_policy_gradient() -> None:
    """The proximal policy is the policy itself: ratio 1, gradient -A grad log p."""
    data = sample(masked=0.0)
    x = torch.from_numpy(data.logprobs(data.theta)).requires_grad_()
    inputs = TokenInputs(
        *(torch.from_numpy(a) for a in (data.behaviour, data.advantages, data.sequence, data.mask)),
    )
    result = token_loss(x, inputs, AlgorithmConfig(correction="none"))
    result.loss.sum().backward()
    assert x.grad is not None
    assert torch.equal(result.ratio, torch.ones_like(x))
    assert x.grad.numpy() == pytest.approx(-data.advantages, rel=1e-12)
