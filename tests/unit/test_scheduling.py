"""Scheduling against exhaustive search and plain counting."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.config import ScheduleConfig
from forebay.control.source import scheduled
from forebay.control.types import Prompt
from forebay.scheduling.batch_groups import balance, variation
from forebay.scheduling.minibatches import partition, utilisation
from forebay.scheduling.schedule import build, read_schedule, write_schedule

lengths_lists = st.lists(st.floats(1, 500, allow_nan=False), min_size=1, max_size=13).map(sorted)


def compositions(total, low, high):
    if total == 0:
        yield []
    for size in range(low, min(high, total) + 1):
        for rest in compositions(total - size, low, high):
            yield [size, *rest]


@settings(max_examples=200, deadline=None)
@given(lengths=lengths_lists, base=st.integers(1, 5), slack=st.integers(0, 2))
def test_partition_equals_exhaustive_search(lengths, base, slack):
    slack = min(slack, base - 1)
    sizes = partition(lengths, base, slack)
    assert sum(sizes) == len(lengths)
    every = list(compositions(len(lengths), base - slack, base + slack))
    if every:
        assert all(base - slack <= size <= base + slack for size in sizes)
        assert utilisation(lengths, sizes) == pytest.approx(max(utilisation(lengths, s) for s in every), abs=1e-12)
    else:
        assert sizes[0] < base - slack
        assert all(base - slack <= size <= base + slack for size in sizes[1:])


def test_partition_of_a_known_case():
    assert partition([1, 1, 1, 10, 10], 2, 1) == [3, 2]


@pytest.mark.parametrize("lengths", [[2, 1], [1, float("nan")], [0, 1], [-1, 2], [1, float("inf")]])
def test_partition_refuses_lengths_that_make_no_sense(lengths):
    with pytest.raises(ValueError, match="finite, positive and sorted"):
        partition(lengths, 2, 1)


@given(loads=st.lists(st.floats(0.1, 100), max_size=60), per_group=st.integers(1, 8))
def test_batch_groups_hold_every_minibatch_once_within_the_cap(loads, per_group):
    groups = balance(loads, per_group)
    assert sorted(itertools.chain(*groups)) == list(range(len(loads)))
    assert all(1 <= len(group) <= per_group for group in groups)


def test_batch_groups_are_more_even_than_sorted_or_random_order():
    rng = random.Random(0)
    loads = sorted(rng.lognormvariate(3, 0.8) for _ in range(256))
    balanced = variation([sum(loads[i] for i in group) for group in balance(loads, 4)])
    shuffled = rng.sample(loads, len(loads))
    in_order = variation([sum(loads[i : i + 4]) for i in range(0, 256, 4)])
    at_random = variation([sum(shuffled[i : i + 4]) for i in range(0, 256, 4)])
    assert balanced < at_random / 2 < in_order / 2


@settings(deadline=None)
@given(lengths=st.lists(st.floats(1, 99), min_size=1, max_size=60), seed=st.integers(0, 99))
def test_schedule_holds_every_prompt_once_and_survives_the_file(lengths, seed, tmp_path_factory):
    predicted = [(f"p{i}", length) for i, length in enumerate(lengths)]
    groups = build(predicted, ScheduleConfig(), seed)
    flat = [prompt for group in groups for minibatch in group for prompt in minibatch]
    assert sorted(flat) == sorted(prompt for prompt, _ in predicted)
    path = tmp_path_factory.mktemp("schedule") / "schedule.parquet"
    write_schedule(path, groups, dict(predicted))
    again = read_schedule(path)
    assert [[[prompt for prompt, _ in minibatch] for minibatch in group] for group in again] == groups


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
