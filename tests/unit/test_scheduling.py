"""Minibatches and batch groups against exhaustive search and plain counting."""

import itertools
import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.control.source import scheduled
from forebay.control.types import Prompt
from forebay.scheduling.batch_groups import balance, variation
from forebay.scheduling.minibatches import partition, utilisation

OBJECTIVES = ("utilisation", "padded_area")
GROUPINGS = ("lpt", "karmarkar_karp", "snake")

lengths_lists = st.lists(st.floats(1, 500) | st.integers(1, 6).map(float), min_size=1, max_size=14).map(sorted)


def compositions(total, low, high):
    if total == 0:
        yield []
    for size in range(low, min(high, total) + 1):
        for rest in compositions(total - size, low, high):
            yield [size, *rest]


def minibatches(lengths, sizes):
    ends = list(itertools.accumulate(sizes))
    return [lengths[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def padded_area(lengths, sizes):
    return sum(len(part) * max(part) for part in minibatches(lengths, sizes))


def mean_utilisation(lengths, sizes):
    shares = [sum(part) / (len(part) * max(part)) for part in minibatches(lengths, sizes)]
    return sum(shares) / len(shares)


@settings(max_examples=300, deadline=None)
@given(lengths=lengths_lists, base=st.integers(1, 6), slack=st.integers(0, 4))
def test_partition_equals_exhaustive_search(lengths, base, slack):
    slack = min(slack, base - 1)
    every = list(compositions(len(lengths), base - slack, base + slack))
    area, mean = (partition(lengths, base, slack, objective).tolist() for objective in ("padded_area", "utilisation"))
    for sizes in (area, mean):
        assert sum(sizes) == len(lengths)
        assert all(base - slack <= size <= base + slack for size in sizes[0 if every else 1 :])
    if every:
        assert padded_area(lengths, area) == pytest.approx(min(padded_area(lengths, s) for s in every), rel=1e-12)
        assert mean_utilisation(lengths, mean) == pytest.approx(
            max(mean_utilisation(lengths, s) for s in every), abs=1e-12
        )
    else:
        assert area[0] == mean[0] < base - slack


@pytest.mark.parametrize(("base", "slack"), [(4, 1), (7, 3), (3, 2)])
def test_partition_equals_a_plain_table_beyond_one_part(base, slack, monkeypatch):
    """Many small parts and blocks, against the textbook recurrences; the one for the mean keeps the number of
    minibatches as a state."""
    monkeypatch.setattr("forebay.scheduling.minibatches.PART", 64)
    rng = random.Random(base)
    lengths = sorted(rng.lognormvariate(5, 0.8) for _ in range(301))
    low, high = base - slack, base + slack
    prefix = [0.0, *itertools.accumulate(lengths)]
    area = [0.0] + [float("inf")] * len(lengths)
    shares = [{0: 0.0}] + [{} for _ in lengths]
    for end in range(1, len(lengths) + 1):
        for size in range(low, min(high, end) + 1):
            start, longest = end - size, lengths[end - 1]
            area[end] = min(area[end], area[start] + size * longest)
            for number, share in shares[start].items():
                share += (prefix[end] - prefix[start]) / (size * longest)
                shares[end][number + 1] = max(share, shares[end].get(number + 1, 0.0))
    best = max(share / number for number, share in shares[-1].items())
    assert padded_area(lengths, partition(lengths, base, slack, "padded_area")) == pytest.approx(area[-1], rel=1e-12)
    assert utilisation(lengths, partition(lengths, base, slack, "utilisation")) == pytest.approx(best, abs=1e-12)


def test_partition_of_known_cases():
    # [2, 3]: areas 4 + 27, utilisations 3/4 and 20/27; [3, 2]: areas 9 + 18, utilisations 6/9 and 17/18
    assert partition([1, 2, 3, 8, 9], 3, 1).tolist() == [3, 2]
    assert partition([1, 2, 3, 8, 9], 3, 1, "padded_area").tolist() == [3, 2]


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(
    ("count", "base", "slack", "sizes"),
    [
        (0, 4, 1, []),
        (3, 8, 2, [3]),  # fewer prompts than a minibatch has
        (8, 4, 0, [4, 4]),
        (9, 4, 0, [1, 4, 4]),  # the remainder at the short end
        (4, 1, 0, [1, 1, 1, 1]),
        (12, 4, 1, [4, 4, 4]),  # equal lengths: the base size
        (17, 8, 1, [8, 9]),
        (10, 8, 1, [1, 9]),
    ],
)
def test_partition_at_the_edges(objective, count, base, slack, sizes):
    found = partition([7.3] * count, base, slack, objective).tolist()
    assert sorted(found) == sorted(sizes)
    assert found[:1] == sizes[:1] or slack


@pytest.mark.parametrize("lengths", [[2, 1], [1, float("nan")], [0, 1], [-1, 2], [1, float("inf")]])
def test_partition_refuses_lengths_that_make_no_sense(lengths):
    with pytest.raises(ValueError, match="finite, positive and sorted"):
        partition(lengths, 2, 1)


@given(lengths=lengths_lists, data=st.data())
def test_utilisation_counts_what_a_loop_counts(lengths, data):
    lengths = data.draw(st.permutations(lengths))
    sizes = data.draw(st.sampled_from(list(compositions(len(lengths), 1, 4))[:50]))
    assert utilisation(lengths, sizes) == pytest.approx(mean_utilisation(lengths, sizes))
    assert utilisation([], []) == 1.0


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_hundred_thousand_prompts_take_a_moment(objective):
    lengths = np.sort(np.random.default_rng(0).lognormal(7.3, 0.8, 100_000))
    started = time.process_time()
    sizes = partition(lengths, 16, 4, objective)
    assert time.process_time() - started < 3.0
    assert sizes.sum() == 100_000
    assert utilisation(lengths, sizes) >= utilisation(lengths, partition(lengths, 16, 0))


# ---- batch groups


def groups_of(loads, per_group, grouping="lpt"):
    chosen = balance(loads, per_group, grouping).tolist()
    return [[i for i, group in enumerate(chosen) if group == g] for g in range(max(chosen, default=-1) + 1)]


@settings(deadline=None)
@given(
    loads=st.lists(st.floats(0.1, 100), max_size=60), per_group=st.integers(1, 70), grouping=st.sampled_from(GROUPINGS)
)
def test_batch_groups_hold_every_minibatch_once_within_the_cap(loads, per_group, grouping):
    groups = groups_of(loads, per_group, grouping)
    assert sorted(itertools.chain(*groups)) == list(range(len(loads)))
    assert len(groups) == -(-len(loads) // per_group)
    assert all(1 <= len(group) <= per_group for group in groups)


def plain_lpt(loads, cap):
    groups = [[] for _ in range(-(-len(loads) // cap))]
    for i in sorted(range(len(loads)), key=lambda i: -loads[i]):
        open_groups = [group for group in groups if len(group) < cap]
        min(open_groups, key=lambda group: sum(loads[j] for j in group)).append(i)
    return groups


def plain_differencing(loads, cap):
    """Layers of one item for each group, as lists; the two of the widest spread are joined crosswise."""
    count = -(-len(loads) // cap)
    heaviest = sorted(range(len(loads)), key=lambda i: -loads[i])
    layers = [heaviest[i * count : (i + 1) * count] for i in range(cap)]
    parts = [[[i] for i in layer] + [[]] * (count - len(layer)) for layer in layers]

    def weight(group):
        return sum(loads[i] for i in group)

    def spread(part):
        return max(map(weight, part)) - min(map(weight, part))

    while len(parts) > 1:
        parts.sort(key=spread)
        one, other = sorted(parts.pop(), key=weight), sorted(parts.pop(), key=weight, reverse=True)
        parts.append([a + b for a, b in zip(one, other, strict=True)])
    return parts[0]


@pytest.mark.parametrize(("grouping", "plain"), [("lpt", plain_lpt), ("karmarkar_karp", plain_differencing)])
@pytest.mark.parametrize("per_group", [1, 2, 3, 7, 40])
def test_batch_groups_equal_a_plain_implementation(grouping, plain, per_group):
    rng = random.Random(per_group)
    for count in (1, 6, 21, 40):
        loads = [rng.lognormvariate(3, 0.8) for _ in range(count)]
        found = groups_of(loads, per_group, grouping)
        assert sorted(map(sorted, found)) == sorted(map(sorted, plain(loads, per_group)))


def test_karmarkar_karp_of_a_known_case():
    """Differences of the layers (8,7), (6,5), (4,3): 1, 1, 1 -> 8+5 | 7+6 differ by 0 -> with (4,3): 1."""
    loads = [3, 8, 5, 4, 7, 6]
    sums = sorted(sum(loads[i] for i in group) for group in groups_of(loads, 3, "karmarkar_karp"))
    assert sums == [16, 17]


def test_snake_goes_to_and_fro():
    assert balance([9, 8, 7, 6, 5, 4, 3], 3, "snake").tolist() == [0, 1, 2, 2, 1, 0, 0]


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_batch_groups_are_more_even_than_sorted_or_random_order(grouping):
    rng = random.Random(0)
    loads = sorted(rng.lognormvariate(3, 0.8) for _ in range(256))
    balanced = variation([sum(loads[i] for i in group) for group in groups_of(loads, 4, grouping)])
    shuffled = rng.sample(loads, len(loads))
    in_order = variation([sum(loads[i : i + 4]) for i in range(0, 256, 4)])
    at_random = variation([sum(shuffled[i : i + 4]) for i in range(0, 256, 4)])
    assert balanced < at_random / 2 < in_order / 2


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("per_group", [1, 4, 5000])
def test_fifty_thousand_minibatches_take_a_moment(grouping, per_group):
    loads = np.random.default_rng(0).lognormal(7.3, 0.8, 50_000)
    started = time.process_time()
    chosen = balance(loads, per_group, grouping)
    assert time.process_time() - started < 2.0
    assert np.bincount(chosen).max() == per_group


def test_variation_of_a_known_case():
    assert variation([1, 3]) == pytest.approx(0.5)
    assert variation([2, 2, 2]) == variation([]) == 0.0


def test_epochs_repeat_every_prompt_in_another_order():
    groups = [[(Prompt(f"{g}.{m}", (1,), "", "null", 1.0),) for m in range(2)] for g in range(8)]
    stream = scheduled(groups, seed=0)
    first = [next(stream)[0].prompt_id for _ in range(16)]
    second = [next(stream)[0].prompt_id for _ in range(16)]
    assert first == [f"{g}.{m}" for g in range(8) for m in range(2)]
    assert sorted(second) == sorted(first)
    assert second != first
    with pytest.raises(ValueError, match="empty"):
        next(scheduled([[]], seed=0))


@settings(max_examples=200, deadline=None)
@given(more=st.integers(0, 50), step=st.integers(1, 16), seed=st.integers(0, 9))
def test_longest_first_every_step_is_sorted_in_every_epoch(more, step, seed):
    """Also with a last block that is smaller than a step; and none has a prompt twice."""
    prompts = step + more
    lengths = np.random.default_rng(seed).lognormal(5, 1, prompts)
    everyone = [Prompt(str(i), (1,), "", "null", float(length)) for i, length in enumerate(lengths)]
    blocks = [sorted(everyone[i : i + step], key=lambda p: -p.predicted_length) for i in range(0, prompts, step)]
    stream = scheduled([[(p,) for p in block] for block in blocks], seed, step)
    steps = [[next(stream)[0] for _ in range(step)] for _ in range(5 * prompts)]
    assert steps[: prompts // step] == blocks[: prompts // step]
    for batch in steps:
        assert [p.predicted_length for p in batch] == sorted((p.predicted_length for p in batch), reverse=True)
        assert len({p.prompt_id for p in batch}) == step
    turns = np.bincount([int(p.prompt_id) for batch in steps for p in batch], minlength=prompts)
    assert turns.max() - turns.min() <= 2  # the last epoch is not over, and one may be put off


def test_what_is_left_of_an_epoch_is_like_the_rest():
    """Were blocks cut anew as they are, some steps would have the ends of two blocks: the shortest and the longest."""
    lengths = np.random.default_rng(0).lognormal(5, 1, 1000 * 8 + 3)
    everyone = [Prompt(str(i), (1,), "", "null", float(length)) for i, length in enumerate(lengths)]
    blocks = [sorted(everyone[i : i + 8], key=lambda p: -p.predicted_length) for i in range(0, len(everyone), 8)]
    stream = scheduled([[(p,) for p in block] for block in blocks], 0, 8)
    longest = [max(next(stream)[0].predicted_length for _ in range(8)) for _ in range(3000)]
    by_epoch = [np.log(longest[start : start + 1000]) for start in (0, 1001, 2001)]
    assert np.mean(by_epoch[1]) == pytest.approx(np.mean(by_epoch[0]), abs=0.06)
    assert np.std(by_epoch[1]) == pytest.approx(np.std(by_epoch[0]), rel=0.1)
    assert np.std(by_epoch[2]) == pytest.approx(np.std(by_epoch[0]), rel=0.1)


def test_fewer_prompts_than_a_step_come_again_in_it():
    stream = scheduled([[(Prompt(name, (1,), "", "null", 1.0),) for name in "abc"]], 0, 8)
    assert {next(stream)[0].prompt_id for _ in range(80)} == set("abc")
