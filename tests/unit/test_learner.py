"""The learner's gradients against a plain loop: one sequence at a time, full logits, each formula written out."""

import math
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from forebay.config import RunConfig, parse_config
from forebay.errors import RunError
from forebay.training.batches import decode_chunk
from forebay.training.learner import Learner
from forebay.training.logprobs import PolicyModel
from forebay.training.packing import MicroBatch
from forebay.training.reference import Reference
from tests.support.tiny_lm import make_start_model

TEMPERATURE, BUDGET = 0.8, 12


class PlainBackend:
    """A module and its gradients, no more."""

    def __init__(self, module: PolicyModel) -> None:
        self.module = module
        self.gradients: dict[str, torch.Tensor] = {}

    def forward(self, batch: MicroBatch) -> Any:
        return self.module(batch)

    @torch.no_grad()
    def evaluate(self, batch: MicroBatch) -> Any:
        return self.module(batch)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self, divisor: float, learning_rate: float) -> float:
        found = {n: p.grad / divisor for n, p in self.module.lm.named_parameters() if p.grad is not None}
        self.gradients = {n: g.clone() for n, g in found.items()}
        self.module.zero_grad()
        return float(torch.stack([g.norm() for g in self.gradients.values()]).norm())


class Alone:
    rank, world, device = 0, 1, torch.device("cpu")

    @staticmethod
    def sum(values: torch.Tensor) -> torch.Tensor:
        return values

    max = sum


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_start_model(tmp_path_factory.mktemp("model"))


def load(model: Path, seed: int | None = None) -> Any:
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").eval()
    if seed is not None:  # the policy, which has moved away from the start model
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in lm.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return lm


def logprobs(lm: Any, prompt: list[int], ids: list[int]) -> torch.Tensor:
    logits = lm(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].double() / TEMPERATURE
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


def groups(lm: Any) -> list[dict[str, Any]]:
    """Two groups of three; behaviour log-probs near the policy's, some far enough for every clip and mask."""
    generator, found = torch.Generator().manual_seed(3), []
    for number, prompt in enumerate(([5, 6, 7], [8, 9])):
        samples = []
        for member, length in enumerate((4, 12, 7) if number else (9, 1, 3)):
            ids = torch.randint(2, 100, (length,), generator=generator).tolist()
            with torch.no_grad():
                behaviour = logprobs(lm, prompt, ids) + 0.5 * torch.randn(length, generator=generator)
            samples.append(
                {"ids": ids, "logprobs": behaviour.tolist(), "reward": [1.0, 0.0, 0.25][member], "oldest_version": 3}
            )
        found.append({"group_id": number, "prompt_ids": prompt, "samples": samples})
    return found


def plain_gradients(lm: Any, start: Any, found: list[dict[str, Any]], c: Any) -> dict[str, torch.Tensor]:
    """Everything from its formula, in float64, without packing."""
    sequences = []
    for group in found:
        rewards = []
        for sample in group["samples"]:
            over = max(0.0, len(sample["ids"]) - (BUDGET - c.overlong_buffer)) / max(c.overlong_buffer, 1)
            reward = sample["reward"] - (c.overlong_penalty * over if c.overlong_buffer else 0.0)
            if c.kl == "reward":
                with torch.no_grad():
                    pair = [logprobs(m, group["prompt_ids"], sample["ids"]) for m in (lm, start)]
                reward -= c.kl_coefficient * float((pair[0] - pair[1]).sum())
            rewards.append(reward)
        n, mean = len(rewards), sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (n - 1))
        for sample, reward in zip(group["samples"], rewards, strict=True):
            advantage = {
                "grpo": (reward - mean) / (std + 1e-6),
                "dr_grpo": reward - mean,
                "rloo": reward - sum(r for r in rewards if r is not reward) / (n - 1),
                "reinforce_baseline": reward - mean,
            }[c.advantage]
            sequences.append([group["prompt_ids"], sample["ids"], sample["logprobs"], advantage])
    tokens = [(s[3], len(s[1])) for s in sequences]
    total = sum(count for _, count in tokens)
    if c.advantage == "reinforce_baseline":
        mean = sum(a * count for a, count in tokens) / total
        variance = sum(count * (a - mean) ** 2 for a, count in tokens) / (total - 1)
        for s in sequences:
            s[3] = (s[3] - mean) / math.sqrt(variance + 1e-8)
    loss = torch.zeros((), dtype=torch.float64)
    for prompt, ids, given, advantage in sequences:
        own, behaviour = logprobs(lm, prompt, ids), torch.tensor(given, dtype=torch.float64)
        old = behaviour if c.correction in ("auto", "behaviour") else own.detach()
        w = (own.detach() - behaviour).exp()
        weight = {
            "decoupled": w,
            "tis_token": w.clamp(max=c.correction_high),
            "tis_sequence": w.log().sum().exp().clamp(max=c.correction_high).expand_as(w),
            "icepop": w * ((w >= c.correction_low) & (w <= c.correction_high)),
            "reject_sequence": torch.ones_like(w) * (c.correction_low <= w.log().mean().exp() <= c.correction_high),
        }.get(c.correction, torch.ones_like(w))
        ratio = (own - old).exp()
        low, high = 1 - c.clip_low, 1 + c.clip_high
        if c.policy_loss == "gspo":  # the sequence's ratio, the same at each token
            ratio = (own - old).mean().exp().expand_as(own)
        token = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        if c.policy_loss == "cispo":
            token = -ratio.detach().clamp(low, high) * advantage * own
        if c.dual_clip and advantage < 0:
            token = torch.minimum(token, torch.full_like(token, -advantage * c.dual_clip))
        token = weight * token
        if c.kl == "loss":
            with torch.no_grad():
                far = logprobs(start, prompt, ids)
            d = own - far
            token = token + c.kl_coefficient * (d**2 / 2 if c.kl_estimator == "k2" else (-d).exp() - 1 + d)
        loss = (
            loss
            + {
                "token_mean": token.sum() / total,
                "sequence_mean": token.mean() / len(sequences),
                "sequence_sum": token.sum() / len(sequences),
                "fixed": token.sum() / (len(sequences) * BUDGET),
            }[c.aggregation]
        )
    lm.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in lm.named_parameters()} | {"loss": loss.detach()}


def config(**algorithm: Any) -> RunConfig:
    values = {
        "generation": {"temperature": TEMPERATURE, "max_new_tokens": BUDGET},
        "model": {"max_model_len": 32},
        "training": {"micro_batch_tokens": 32},  # several micro-batches
        "algorithm": algorithm,
    }
    return parse_config(values, "test")


def learner(model: Path, settings: RunConfig, seed: int = 1) -> tuple[Learner, PlainBackend]:
    backend = PlainBackend(PolicyModel(load(model, seed), TEMPERATURE))
    far = PolicyModel(load(model), TEMPERATURE)
    reference = Reference(far, torch.device("cpu"), True) if settings.algorithm.kl != "none" else None
    ranks: Any = Alone()
    return Learner(settings, ranks, backend.module.lm, backend, reference), backend  # type: ignore[arg-type]


CASES: list[dict[str, Any]] = [
    {},
    {"advantage": "dr_grpo", "aggregation": "fixed", "correction": "none"},
    {"advantage": "rloo", "policy_loss": "gspo", "aggregation": "sequence_mean", "clip_low": 0.02, "clip_high": 0.03},
    {"advantage": "reinforce_baseline", "policy_loss": "cispo", "correction": "tis_token", "correction_high": 1.2},
    {"correction": "decoupled", "aggregation": "sequence_sum"},
    {"correction": "tis_sequence", "kl": "loss", "kl_coefficient": 0.3},
    {"correction": "icepop", "correction_low": 0.8, "correction_high": 1.25, "overlong_buffer": 6},
    {"correction": "reject_sequence", "correction_low": 0.9, "correction_high": 1.1, "dual_clip": 1.5},
    {"kl": "loss", "kl_estimator": "k2", "kl_coefficient": 0.5, "dual_clip": 1.2},
    {"kl": "reward", "kl_coefficient": 0.2, "advantage": "dr_grpo"},
]


@pytest.mark.parametrize("algorithm", CASES, ids=lambda case: "-".join(map(str, case.values())) or "default")
def test_gradients_equal_a_plain_loop(model: Path, algorithm: dict[str, Any]) -> None:
    settings = config(**algorithm)
    policy, start = load(model, 1), load(model)
    found = groups(policy)
    expected = plain_gradients(policy, start, found, settings.algorithm)
    own, backend = learner(model, settings)
    body = msgpack.packb({"step": 1, "version": 3, "complete": True, "groups": found})
    own.accumulate(decode_chunk(body, settings.algorithm, BUDGET))
    metrics = own.update(1)
    assert metrics["loss"] == pytest.approx(float(expected.pop("loss")), rel=1e-4, abs=1e-6)
    scale = max(float(g.abs().max()) for g in expected.values())
    for name, gradient in backend.gradients.items():
        torch.testing.assert_close(gradient.double(), expected[name].double(), rtol=1e-3, atol=2e-5 * scale)
    assert backend.gradients.keys() == expected.keys()


def test_chunks_give_what_the_whole_batch_gives(model: Path) -> None:
    settings = config(aggregation="sequence_mean", kl="loss", kl_coefficient=0.3, correction="tis_sequence")
    found = groups(load(model, 1))
    results = []
    for parts in ([found], [found[:1], found[1:]]):
        own, backend = learner(model, settings)
        for place, part in enumerate(parts):
            body = msgpack.packb({"step": 1, "version": 3, "complete": place == len(parts) - 1, "groups": part})
            own.accumulate(decode_chunk(body, settings.algorithm, BUDGET))
        results.append((own.update(1), backend.gradients))
    (one, whole), (two, chunked) = results
    assert one.keys() == two.keys()
    assert all(one[name] == pytest.approx(two[name], rel=1e-4, abs=1e-6) for name in one)
    assert all(torch.allclose(whole[name], chunked[name], atol=1e-6) for name in whole)


class Descent(PlainBackend):
    """Plain gradient descent."""

    def step(self, divisor: float, learning_rate: float) -> float:
        norm = super().step(divisor, learning_rate)
        with torch.no_grad():
            for name, parameter in self.module.lm.named_parameters():
                parameter.sub_(0.5 * self.gradients[name])
        return norm


@pytest.mark.parametrize("correction", ["behaviour", "decoupled"])
def test_several_updates_equal_a_plain_loop_over_the_same_parts(model: Path, correction: str) -> None:
    """Two passes over two parts; what they are compared with is of before the first. Whole or in chunks."""
    settings = config(correction=correction, mismatch_alarm=9.0)
    settings = settings.model_copy(
        update={"training": settings.training.model_copy(update={"updates_per_batch": 2, "mini_batches": 2})}
    )
    lm = load(model, 1)
    found = groups(lm)
    sequences = []
    for group in found:
        rewards = torch.tensor([sample["reward"] for sample in group["samples"]], dtype=torch.float64)
        for sample, advantage in zip(
            group["samples"], (rewards - rewards.mean()) / (rewards.std() + 1e-6), strict=True
        ):
            behaviour = torch.tensor(sample["logprobs"], dtype=torch.float64)
            with torch.no_grad():
                proximal = logprobs(lm, group["prompt_ids"], sample["ids"])
            sequences.append((group["prompt_ids"], sample["ids"], behaviour, proximal, float(advantage)))
    total = clipped = 0.0
    for round in range(2):
        order = np.random.default_rng((settings.seed, 7, round)).permutation(len(sequences))
        for part in np.array_split(order, 2):
            loss, tokens = torch.zeros((), dtype=torch.float64), 0
            for prompt, ids, behaviour, proximal, advantage in (sequences[i] for i in part):
                own = logprobs(lm, prompt, ids)
                ratio = (own - (behaviour if correction == "behaviour" else proximal)).exp()
                weight = 1.0 if correction == "behaviour" else (proximal - behaviour).exp()
                bounded = ratio.clamp(0.8, 1.28)
                loss = loss - (weight * torch.minimum(ratio * advantage, bounded * advantage)).sum()
                clipped += int((bounded * advantage < ratio * advantage).sum())
                tokens += len(ids)
            total += float(loss.detach())
            lm.zero_grad()
            (loss / tokens).backward()
            with torch.no_grad():
                for parameter in lm.parameters():
                    parameter.sub_(0.5 * parameter.grad)
    every = sum(len(s[1]) for s in sequences)
    start = torch.cat([s[3] - s[2] for s in sequences]).abs().mean()
    for parts in ([found], [found[:1], found[1:]]):
        backend = Descent(PolicyModel(load(model, 1), TEMPERATURE))
        ranks: Any = Alone()
        own_learner = Learner(settings, ranks, backend.module.lm, backend)  # type: ignore[arg-type]
        for place, part in enumerate(parts):
            body = msgpack.packb({"step": 7, "version": 3, "complete": place == len(parts) - 1, "groups": part})
            own_learner.accumulate(decode_chunk(body, settings.algorithm, BUDGET))
        metrics = own_learner.update(7)
        assert metrics["loss"] == pytest.approx(total / (2 * every), rel=1e-4, abs=1e-6)
        assert metrics["clip_fraction"] == pytest.approx(clipped / (2 * every))
        assert metrics["mismatch/mean_abs"] == pytest.approx(float(start), rel=1e-4)
        for (name, one), other in zip(backend.module.lm.named_parameters(), lm.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5, msg=name)


def test_metrics_say_what_the_correction_did_and_alarm_on_a_mismatch(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config(correction="icepop", correction_low=0.8, correction_high=1.25)
    found = groups(load(model, 1))
    found[1]["samples"][1]["oldest_version"] = 2  # one token, of an older version
    own, _ = learner(model, settings)
    own.accumulate(decode_chunk(msgpack.packb({"step": 1, "version": 3, "groups": found}), settings.algorithm, BUDGET))
    metrics = own.update(1)
    gaps, older, masked = [], [], 0
    for group in found:
        for sample in group["samples"]:
            with torch.no_grad():
                d = logprobs(load(model, 1), group["prompt_ids"], sample["ids"]) - torch.tensor(sample["logprobs"])
            gaps += d.abs().tolist()
            older += d.abs().tolist() if sample["oldest_version"] == 2 else []
            masked += int(((d.exp() < 0.8) | (d.exp() > 1.25)).sum())
    assert metrics["correction/masked"] == pytest.approx(masked / len(gaps))
    assert metrics["off_policy/mean_abs"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-4)
    alike = (sum(gaps) - sum(older)) / (len(gaps) - len(older))
    assert metrics["mismatch/mean_abs"] == pytest.approx(alike, rel=1e-4)
    assert metrics["mismatch/alarm"] == 1.0
    assert "engine and trainer disagree" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_updates_nothing(model: Path) -> None:
    settings = config()
    found = groups(load(model, 1))
    own, backend = learner(model, settings)
    with torch.no_grad():
        backend.module.lm.lm_head.weight.fill_(float("nan"))
    own.accumulate(decode_chunk(msgpack.packb({"step": 1, "version": 3, "groups": found}), settings.algorithm, BUDGET))
    with pytest.raises(RunError, match="step 1: the loss is nan"):
        own.update(1)
    assert not backend.gradients
