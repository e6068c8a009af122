from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.config import AlgorithmConfig
from forebay.errors import RunError
from forebay.training.batches import Before, decode_chunk
from tests.support import ppo_reference


def message(**changes: Any) -> dict[str, Any]:
    samples = [
        {"ids": [5, 6, 1], "logprobs": [-1.0, -2.0, -0.5], "reward": 1.0, "oldest_version": 4},
        {"ids": [7], "logprobs": [-3.0], "reward": 0.0, "oldest_version": 3},
        {"ids": [], "logprobs": [], "reward": 0.0, "oldest_version": 4},
    ]
    samples[0] |= changes
    return {
        "step": 5,
        "version": 4,
        "groups": [{"group_id": 9, "prompt_ids": [2, 3], "staleness": 1, "samples": samples}],
    }


def test_a_batch_becomes_sequences_with_advantages() -> None:
    batch = decode_chunk(msgpack.packb(message()), AlgorithmConfig(advantage="dr_grpo"), 8)
    assert (batch.step, batch.version, batch.complete) == (5, 4, True)
    assert [list(s.ids) for s in batch.sequences] == [[5, 6, 1], [7]]
    taught = batch.taught(AlgorithmConfig(advantage="dr_grpo"))
    assert [s.advantage for s in taught] == pytest.approx([2 / 3, -1 / 3])
    assert [s.current for s in batch.sequences] == [True, False]
    assert (batch.totals.groups, batch.totals.responses, batch.totals.tokens) == (1, 3, 4)
    assert batch.totals.metrics() == pytest.approx(
        {"tokens": 4, "reward_mean": 1 / 3, "shaped_reward_mean": 1 / 3, "response_length_mean": 4 / 3}
    )


@pytest.mark.parametrize(("step", "own"), [(4, True), (5, False), (6, False), (7, True)])
def test_only_a_versions_first_step_has_its_very_weights(step: int, own: bool) -> None:
    body = msgpack.packb(message() | {"step": step})
    batch = decode_chunk(body, AlgorithmConfig(), 8, sync_every=3)
    assert [s.current for s in batch.sequences] == [own, False]


def test_an_empty_batch_has_no_sequences() -> None:
    batch = decode_chunk(msgpack.packb({"step": 1, "version": 0, "groups": []}), AlgorithmConfig(), 8)
    assert (batch.sequences, batch.totals.metrics()) == ((), {"tokens": 0.0})


def test_chunks_add_up_to_the_batch() -> None:
    first, second = message(), message(reward=0.5, ids=[9], logprobs=[-1.0])
    whole = decode_chunk(msgpack.packb(first | {"groups": first["groups"] + second["groups"]}), AlgorithmConfig(), 8)
    chunks = [decode_chunk(msgpack.packb(m | {"complete": m is second}), AlgorithmConfig(), 8) for m in (first, second)]
    assert [chunk.complete for chunk in chunks] == [False, True]
    taught = [s for chunk in chunks for s in chunk.taught(AlgorithmConfig())]
    assert taught == list(whole.taught(AlgorithmConfig()))
    assert len({s.advantage for s in taught}) > 2
    totals = chunks[0].totals + chunks[1].totals
    assert totals.metrics() == pytest.approx(whole.totals.metrics())
    assert (totals.groups, totals.responses, totals.tokens) == (2, 6, 6)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"\xc1", "malformed batch"),
        (msgpack.packb([1]), "malformed batch"),
        (msgpack.packb({"step": 1, "version": 0}), "groups"),
        (msgpack.packb(message(logprobs=[-1.0, -2.0])), "group 9 has a response without one finite log-prob"),
        (msgpack.packb(message(logprobs=[-1.0, float("nan"), -2.0])), "group 9 has a response without one finite"),
        (msgpack.packb(message(reward=float("inf"))), "group 9 has a reward that is not finite"),
    ],
)
def test_a_malformed_batch_is_refused_with_the_reason(body: bytes, reason: str) -> None:
    with pytest.raises(RunError, match=reason):
        decode_chunk(body, AlgorithmConfig(), 8)


def test_long_responses_lose_reward_before_the_advantages() -> None:
    """Budget 4, buffer 2: three tokens cost half of the penalty. The response without tokens counts in the mean."""
    algorithm = AlgorithmConfig(advantage="dr_grpo", overlong_buffer=2, overlong_penalty=0.6)
    batch = decode_chunk(msgpack.packb(message()), algorithm, 4)
    assert batch.rewards == (pytest.approx((0.7, 0.0, 0.0)),)
    assert batch.totals.metrics()["reward_mean"] == pytest.approx(1 / 3)
    assert batch.totals.metrics()["shaped_reward_mean"] == pytest.approx(0.7 / 3)
    assert [s.advantage for s in batch.taught(algorithm)] == pytest.approx([0.7 * 2 / 3, -0.7 / 3])


def test_whitened_advantages_have_mean_zero_and_deviation_one_over_tokens() -> None:
    algorithm = AlgorithmConfig(advantage="reinforce_baseline")
    second = message(reward=0.5, ids=[9, 9], logprobs=[-1.0, -1.0])
    body = msgpack.packb(message() | {"groups": message()["groups"] + second["groups"]})
    taught = decode_chunk(body, algorithm, 8).taught(algorithm)
    tokens = [s.advantage for s in taught for _ in s.ids]
    assert sum(tokens) == pytest.approx(0.0, abs=1e-12)
    assert sum(a * a for a in tokens) / (len(tokens) - 1) == pytest.approx(1.0, rel=1e-6)


def test_penalties_change_rewards_within_their_group() -> None:
    algorithm = AlgorithmConfig(advantage="dr_grpo")
    batch = decode_chunk(msgpack.packb(message()), algorithm, 8)
    penalties = np.array([-0.1, -0.2, 0.0, 0.0], np.float32)
    taught = batch.taught(algorithm, Before(np.zeros(4, np.float32), penalties, np.zeros(4, np.float32)))
    assert [s.advantage for s in taught] == pytest.approx([0.7 * 2 / 3, -0.7 / 3])


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(lambda lengths: sum(lengths) > 1),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.9, 1.0]),
    st.sampled_from([0.0, 0.95, 1.0]),
)
def test_what_ppo_learns_equals_a_plain_loop(lengths: list[int], seed: int, gamma: float, lam: float) -> None:
    """Advantages and returns of a whole batch from recorded values, with KL and length penalties in the rewards."""
    rng, budget = np.random.default_rng(seed), 9
    samples = [
        {"ids": [3] * n, "logprobs": [-1.0] * n, "reward": float(rng.normal()), "oldest_version": 0} for n in lengths
    ]
    algorithm = AlgorithmConfig(
        advantage="gae", gamma=gamma, gae_lambda=lam, overlong_buffer=4, overlong_penalty=0.5, kl="reward"
    )
    logprobs, penalties, values = rng.normal(size=(3, sum(lengths))).astype(np.float32)
    groups = [{"group_id": i, "prompt_ids": [1], "samples": samples[i::2]} for i in range(2)]
    order = [i for start in range(2) for i in range(start, len(lengths), 2)]
    found = decode_chunk(msgpack.packb({"step": 1, "version": 0, "groups": groups}), algorithm, budget).taught(
        algorithm, Before(logprobs, penalties, values)
    )
    ends = np.cumsum([lengths[i] for i in order])
    spans = [slice(end - lengths[i], end) for i, end in zip(order, ends, strict=True) if lengths[i]]
    outcomes = [samples[i]["reward"] - 0.5 * max(0, lengths[i] - 5) / 4 for i in order if lengths[i]]
    rewards = [penalties[span].astype(np.float64) for span in spans]
    for r, outcome in zip(rewards, outcomes, strict=True):
        r[-1] += outcome
    advantages, returns = ppo_reference.targets(rewards, [values[s].astype(np.float64) for s in spans], gamma, lam)
    for sequence, span, advantage, target in zip(found, spans, advantages, returns, strict=True):
        assert sequence.advantage == pytest.approx(advantage, rel=1e-7, abs=1e-7)
        assert sequence.returns == pytest.approx(target, rel=1e-9, abs=1e-9)
        assert np.array_equal(sequence.values, values[span])
        assert np.array_equal(sequence.proximal, logprobs[span])
