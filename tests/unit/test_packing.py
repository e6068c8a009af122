import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import RunError
from forebay.training.packing import TrainSequence, pack, plan_micro_batches

LENGTHS = st.lists(st.integers(2, 60), max_size=60)


@given(LENGTHS, st.integers(1, 5), st.integers(60, 200))
def test_a_plan_holds_every_sequence_once_within_the_budget_and_alike_on_all_ranks(
    lengths: list[int], ranks: int, budget: int
) -> None:
    plan = plan_micro_batches(lengths, ranks, budget)
    assert len(plan) == ranks
    assert sorted(i for share in plan for micro in share for i in micro) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in micro) <= budget for share in plan for micro in share)
    assert len({len(share) for share in plan}) == 1


@given(LENGTHS.filter(bool), st.integers(1, 5), st.integers(60, 200))
def test_ranks_are_balanced_and_no_micro_batch_is_wasted(lengths: list[int], ranks: int, budget: int) -> None:
    plan = plan_micro_batches(lengths, ranks, budget)
    loads = [sum(lengths[i] for micro in share for i in micro) for share in plan]
    assert max(loads) - min(loads) <= max(lengths)
    # First fit leaves at most one micro-batch of a rank half empty.
    assert len(plan[0]) <= 2 * max(loads) / budget + 1


def test_a_sequence_over_the_budget_is_refused() -> None:
    with pytest.raises(RunError, match="a sequence has 70 tokens but training"):
        plan_micro_batches([3, 70], 2, 64)


@st.composite
def sequences(draw: st.DrawFn) -> list[TrainSequence]:
    count = draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    result = []
    for k in range(count):
        prompt, answer = rng.integers(1, 12), rng.integers(1, 12)
        result.append(
            TrainSequence(
                prompt_ids=rng.integers(0, 100, prompt).tolist(),
                ids=rng.integers(0, 100, answer).tolist(),
                behaviour=(-rng.random(answer)).tolist(),
                advantage=float(k + 1),
                current=bool(rng.integers(2)),
            )
        )
    return result


@settings(deadline=None)
@given(sequences())
def test_packing_keeps_every_token_in_its_place(items: list[TrainSequence]) -> None:
    batch = pack(items)
    at, row = 0, 0
    for item in items:
        whole = [*item.prompt_ids, *item.ids]
        assert batch.input_ids[0, at : at + len(whole)].tolist() == whole
        assert batch.position_ids[0, at : at + len(whole)].tolist() == list(range(len(whole)))
        for j, token in enumerate(item.ids):
            assert int(batch.sources[row]) == at + len(item.prompt_ids) - 1 + j
            assert int(batch.targets[row]) == token == int(batch.input_ids[0, int(batch.sources[row]) + 1])
            assert float(batch.behaviour[row]) == pytest.approx(item.behaviour[j])
            assert float(batch.advantages[row]) == item.advantage
            assert bool(batch.current[row]) == item.current
            row += 1
        at += len(whole)
    assert batch.input_ids.shape == (1, at)
    assert batch.targets.shape == (row,)
    assert batch.starts.tolist() == [0, *np.cumsum([len(s) for s in items])]
    assert batch.longest == max(len(s) for s in items)
    assert batch.weights.tolist() == [1.0] * row


def test_a_padding_micro_batch_weighs_nothing() -> None:
    batch = pack([])
    assert batch.input_ids.shape[1] > 0
    assert float(batch.weights.sum()) == 0
    assert float(batch.advantages.abs().sum()) == 0
    assert not bool(batch.current.any())
    assert batch.starts.dtype == torch.int32
