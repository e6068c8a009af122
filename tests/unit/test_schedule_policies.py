"""Every policy gives every prompt exactly once, in the order that it promises."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.config import ScheduleConfig
from forebay.scheduling.batch_groups import variation
from forebay.scheduling.minibatches import utilisation
from forebay.scheduling.policies import load, make_order, order_prompts, resolve

POLICIES = ("fifo", "asp", "balanced", "longest_first")
MODES = ("sync", "one_step_off", "fully_async")


def order(predicted, *, mode="fully_async", batch_groups=16, seed=0, prompt_tokens=None, **settings):
    return order_prompts(
        np.asarray(predicted, float), prompt_tokens, ScheduleConfig(**settings), mode, batch_groups, seed
    )


def flat(groups):
    return [prompt for group in groups for minibatch in group for prompt in minibatch]


weird_lengths = st.lists(
    st.floats(min_value=1e-3, max_value=1e9) | st.sampled_from([1.0, 7.3, 8192.0]), min_size=1, max_size=80
)


@settings(max_examples=300, deadline=None)
@given(
    predicted=weird_lengths,
    policy=st.sampled_from((*POLICIES, "auto")),
    mode=st.sampled_from(MODES),
    grouping=st.sampled_from(("lpt", "karmarkar_karp", "snake")),
    objective=st.sampled_from(("utilisation", "padded_area")),
    kind=st.sampled_from(("tokens", "kv_area")),
    base=st.integers(1, 9),
    slack=st.integers(0, 8),
    period=st.integers(1, 9),
    window=st.integers(1, 100),
    batch_groups=st.integers(1, 40),
    seed=st.integers(0, 2**31 - 1),
)
def test_every_prompt_comes_exactly_once(
    predicted, policy, mode, grouping, objective, kind, base, slack, period, window, batch_groups, seed
):
    groups = order(
        predicted,
        mode=mode,
        batch_groups=batch_groups,
        seed=seed,
        prompt_tokens=np.full(len(predicted), 20, np.int32),
        policy=policy,
        grouping=grouping,
        objective=objective,
        load=kind,
        minibatch_prompts=base,
        minibatch_slack=min(slack, base - 1),
        period_minibatches=period,
        window=window,
    )
    assert sorted(flat(groups)) == list(range(len(predicted)))
    assert all(group and all(group) for group in groups)
    largest = base + (min(slack, base - 1) if policy == "asp" else 0)
    assert all(len(minibatch) <= largest for group in groups for minibatch in group)
    if resolve(policy, mode) != "longest_first":
        assert all(len(group) <= period for group in groups)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_seed_decides_and_nothing_else_does(policy):
    predicted = np.random.default_rng(1).lognormal(6, 0.8, 300)
    assert order(predicted, policy=policy, seed=5) == order(predicted, policy=policy, seed=5)
    assert order(predicted, policy=policy, seed=5) != order(predicted, policy=policy, seed=6)
    assert order([], policy=policy) == []


def test_auto_means_length_order_behind_a_barrier_and_even_load_without_one():
    assert [resolve("auto", mode) for mode in MODES] == ["longest_first", "balanced", "balanced"]
    assert [resolve(policy, mode) for policy in POLICIES for mode in MODES] == [p for p in POLICIES for _ in MODES]


def test_longest_first_sorts_each_batch_and_moves_no_prompt_to_another_one():
    predicted = np.random.default_rng(2).lognormal(6, 0.8, 100)
    groups = order(predicted, policy="longest_first", batch_groups=24, minibatch_prompts=5)
    arrived = flat(order(predicted, policy="fifo"))
    assert [len(flat([group])) for group in groups] == [24, 24, 24, 24, 4]
    for number, group in enumerate(groups):
        prompts = flat([group])
        assert set(prompts) == set(arrived[24 * number : 24 * (number + 1)])
        assert list(predicted[prompts]) == sorted(predicted[prompts], reverse=True)
        assert all(len(minibatch) == 1 for minibatch in group)


def test_balanced_reorders_within_its_window_only_and_evens_the_units():
    predicted = np.random.default_rng(3).lognormal(6, 0.8, 1200)
    groups = order(predicted, policy="balanced", window=512, minibatch_prompts=8, period_minibatches=4)
    arrived, come = flat(order(predicted, policy="fifo")), flat(groups)
    for start in range(0, 1200, 512):
        assert set(come[start : start + 512]) == set(arrived[start : start + 512])
    units = [sum(predicted[prompts]) for group in groups for prompts in group]
    by_chance = [sum(predicted[arrived[start : start + 8]]) for start in range(0, 1200, 8)]
    assert variation(units[:128]) < variation(by_chance) / 4
    longest = [max(predicted[prompts]) for group in groups for prompts in group][:64]
    assert abs(np.corrcoef(longest, range(64))[0, 1]) < 0.5  # long ones do not all come first


def test_asp_has_homogeneous_minibatches_in_balanced_groups():
    predicted = np.random.default_rng(4).lognormal(6, 0.8, 2000)
    asp, fifo = (order(predicted, policy=policy, minibatch_prompts=8, minibatch_slack=2) for policy in ("asp", "fifo"))
    shares, loads = [], []
    for groups in (asp, fifo):
        sizes = [len(minibatch) for group in groups for minibatch in group]
        shares.append(utilisation(predicted[flat(groups)], sizes))
        loads.append(variation([sum(predicted[flat([group])]) for group in groups]))
    assert shares[0] > 0.95 > 0.6 > shares[1]
    assert loads[0] < 0.75 * loads[1]  # the longest minibatch alone outweighs a mean group: no better is possible
    spans = [max(predicted[m]) / min(predicted[m]) for group in asp for m in group]
    assert np.median(spans) < 1.1


def test_kv_area_weighs_prompt_and_response():
    predicted, tokens = np.array([10.0, 100.0]), np.array([1000, 1], np.int32)
    assert load(predicted, None, ScheduleConfig()).tolist() == [10, 100]
    assert load(predicted, tokens, ScheduleConfig(load="kv_area")).tolist() == [10 * 1000 + 50, 100 + 5000]
    with pytest.raises(ValueError, match="number of tokens"):
        load(predicted, None, ScheduleConfig(load="kv_area"))


def test_kv_area_balances_another_quantity_than_tokens():
    rng = np.random.default_rng(5)
    predicted, tokens = rng.lognormal(6, 0.8, 512), rng.integers(10, 5000, 512)
    spread = {}
    for kind in ("tokens", "kv_area"):
        groups = order(predicted, policy="balanced", load=kind, prompt_tokens=tokens, minibatch_prompts=16)
        area = load(predicted, tokens, ScheduleConfig(load="kv_area"))
        spread[kind] = variation([area[m].sum() for group in groups for m in group])
    assert spread["kv_area"] < spread["tokens"] / 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, 0.0])
def test_lengths_that_make_no_sense_are_refused(bad):
    with pytest.raises(ValueError, match="finite and positive"):
        order([1.0, bad], policy="fifo")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_hundred_thousand_prompts_take_a_moment(policy):
    predicted = np.random.default_rng(0).lognormal(7.3, 0.8, 100_000)
    started = time.process_time()
    made = make_order(predicted, None, ScheduleConfig(policy=policy), "sync", 16, 0)
    assert time.process_time() - started < 3.0
    assert np.array_equal(np.sort(made.prompts), np.arange(100_000))
    assert made.minibatches.sum() == 100_000
    assert made.batch_groups.sum() == made.minibatches.size
    assert list(itertools.chain(*made.nested()[0])) == made.prompts[: made.group_prompts[0]].tolist()
