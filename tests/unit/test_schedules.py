"""Against torch's own schedulers, which know nothing of ours."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from forebay.training.schedules import Schedule, learning_rate

PEAK = 3e-4


def torch_rates(schedule: Schedule, warmup: int, total: int, minimum: float) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    after: LRScheduler
    if schedule == "constant":
        after = ConstantLR(optimizer, factor=1.0)
    elif schedule == "linear":
        after = LinearLR(optimizer, start_factor=1.0, end_factor=minimum, total_iters=total - warmup)
    else:
        after = CosineAnnealingLR(optimizer, T_max=total - warmup, eta_min=PEAK * minimum)
    scheduler = after
    if warmup:
        rise = LinearLR(optimizer, start_factor=1 / warmup, total_iters=max(warmup - 1, 1))
        scheduler = SequentialLR(optimizer, [rise, after], milestones=[warmup])
    rates = []
    for _ in range(total):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("warmup", "total", "minimum"), [(0, 12, 0.1), (2, 9, 0.0), (5, 30, 0.25), (1, 6, 1.0)])
def test_rates_equal_torchs(schedule: Schedule, warmup: int, total: int, minimum: float) -> None:
    rates = [
        learning_rate(n, peak=PEAK, warmup=warmup, total=total, schedule=schedule, min_ratio=minimum)
        for n in range(total)
    ]
    assert rates == pytest.approx(torch_rates(schedule, warmup, total, minimum), rel=1e-6)


@given(
    st.sampled_from(["constant", "linear", "cosine"]),
    st.integers(0, 20),
    st.integers(1, 40),
    st.floats(0, 1),
    st.integers(0, 100),
)
def test_rates_rise_to_the_peak_and_fall_to_the_minimum(
    schedule: Schedule, warmup: int, total: int, minimum: float, update: int
) -> None:
    def rate(n: int) -> float:
        return learning_rate(n, peak=PEAK, warmup=warmup, total=total, schedule=schedule, min_ratio=minimum)

    assert all(0 < rate(n) <= PEAK for n in range(total))
    lowest = 1.0 if schedule == "constant" else minimum
    if update < warmup:
        assert rate(update) <= rate(update + 1) or update + 1 == warmup
    else:
        assert rate(update + 1) <= rate(update)
        assert PEAK * lowest * (1 - 1e-12) <= rate(update) <= PEAK
    assert rate(max(warmup, total) + update + 1) == pytest.approx(PEAK * lowest)
