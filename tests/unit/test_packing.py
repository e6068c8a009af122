import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from forebay.errors import RunError
from forebay.training.logprobs import PolicyModel
from forebay.training.packing import Balance, TrainSequence, pack, plan_micro_batches
from tests.support.tiny_lm import VOCABULARY, make_start_model

LENGTHS = st.lists(st.integers(2, 60), max_size=60)
BALANCE = st.sampled_from(["longest_first", "karmarkar_karp"])


@given(LENGTHS, st.integers(1, 5), st.integers(60, 200), BALANCE)
def test_a_plan_holds_every_sequence_once_within_the_budget_and_alike_on_all_ranks(
    lengths: list[int], ranks: int, budget: int, balance: Balance
) -> None:
    plan = plan_micro_batches(lengths, ranks, budget, balance)
    assert len(plan) == ranks
    assert sorted(i for share in plan for micro in share for i in micro) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in micro) <= budget for share in plan for micro in share)
    assert len({len(share) for share in plan}) == 1
    assert plan == plan_micro_batches(lengths, ranks, budget, balance)


@given(LENGTHS.filter(bool), st.integers(1, 5), st.integers(60, 200), BALANCE)
def test_ranks_are_balanced_and_no_micro_batch_is_wasted(
    lengths: list[int], ranks: int, budget: int, balance: Balance
) -> None:
    plan = plan_micro_batches(lengths, ranks, budget, balance)
    loads = loads_of(plan, lengths)
    assert max(loads) - min(loads) <= max(lengths)
    # First fit leaves at most one micro-batch of a rank half empty.
    assert len(plan[0]) <= 2 * max(loads) / budget + 1


@settings(deadline=None)
@given(st.lists(st.integers(2, 60), min_size=1, max_size=7), st.integers(2, 3), BALANCE)
def test_the_heaviest_rank_is_within_grahams_bound_of_the_best(
    lengths: list[int], ranks: int, balance: Balance
) -> None:
    ways = np.array(list(itertools.product(range(ranks), repeat=len(lengths))))
    best = min(max(((way == rank) * lengths).sum() for rank in range(ranks)) for way in ways)
    heaviest = max(loads_of(plan_micro_batches(lengths, ranks, 1000, balance), lengths))
    assert heaviest <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9


def test_differencing_finds_what_longest_first_misses() -> None:
    """{8, 7} and {6, 5, 4} are even. Longest first gives {8, 5, 4} and {7, 6}, differencing {8, 6} and {7, 5, 4}."""
    lengths = [8, 7, 6, 5, 4]
    assert sorted(loads_of(plan_micro_batches(lengths, 2, 100, "longest_first"), lengths)) == [13, 17]
    assert sorted(loads_of(plan_micro_batches(lengths, 2, 100, "karmarkar_karp"), lengths)) == [14, 16]


def test_differencing_is_nearer_to_even_on_long_tailed_lengths() -> None:
    rng = np.random.default_rng(1)
    excess = {}
    for balance in ("longest_first", "karmarkar_karp"):
        worst = []
        for _ in range(20):
            lengths = np.minimum(rng.lognormal(7.3, 0.9, 64), 16384).astype(int).tolist()
            loads = loads_of(plan_micro_batches(lengths, 8, 16384, balance), lengths)  # type: ignore[arg-type]
            worst.append(max(loads) * 8 / sum(lengths) - 1)
        excess[balance] = float(np.mean(worst))
    assert excess["karmarkar_karp"] < excess["longest_first"]


def loads_of(plan: list[list[list[int]]], lengths: list[int]) -> list[int]:
    return [sum(lengths[i] for micro in share for i in micro) for share in plan]


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
    for number, item in enumerate(items):
        whole = [*item.prompt_ids, *item.ids]
        assert batch.input_ids[0, at : at + len(whole)].tolist() == whole
        assert batch.position_ids[0, at : at + len(whole)].tolist() == list(range(len(whole)))
        for j, token in enumerate(item.ids):
            assert int(batch.sources[row]) == at + len(item.prompt_ids) - 1 + j
            assert int(batch.targets[row]) == token == int(batch.input_ids[0, int(batch.sources[row]) + 1])
            assert float(batch.behaviour[row]) == pytest.approx(item.behaviour[j])
            assert float(batch.advantages[row]) == item.advantage
            assert bool(batch.current[row]) == item.current
            assert int(batch.sequence[row]) == number
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


def test_packed_equals_padded(tmp_path: Path) -> None:
    """Log-probabilities, and the gradient of a sum of them, of a right-padded batch under an attention mask."""
    make_start_model(tmp_path)
    rng = np.random.default_rng(4)
    items = [
        TrainSequence(
            rng.integers(2, VOCABULARY, p).tolist(), rng.integers(2, VOCABULARY, r).tolist(), [0.0] * r, 0, True
        )
        for p, r in [(5, 9), (1, 1), (17, 30), (3, 44), (8, 2)]
    ]
    width = max(len(s) for s in items)
    ids = torch.tensor([[*s.prompt_ids, *s.ids] + [0] * (width - len(s)) for s in items])
    mask = torch.tensor([[1] * len(s) + [0] * (width - len(s)) for s in items])
    padded, packed = (AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32) for _ in range(2))
    table = (padded(input_ids=ids, attention_mask=mask, use_cache=False).logits / 0.8).log_softmax(-1)
    expected = torch.cat(
        [
            table[row, len(s.prompt_ids) - 1 : len(s) - 1].gather(-1, torch.tensor(s.ids)[:, None])[:, 0]
            for row, s in enumerate(items)
        ]
    )
    found, _ = PolicyModel(packed, 0.8)(pack(items))
    assert (found - expected).abs().max() < 1e-5
    factors = torch.linspace(-1, 1, len(expected)) / len(expected)
    (expected * factors).sum().backward()
    (found * factors).sum().backward()
    for (name, one), other in zip(padded.named_parameters(), packed.parameters(), strict=True):
        assert (one.grad - other.grad).abs().max() < 1e-5, name
