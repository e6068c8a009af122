"""Whole runs: against a token-by-token simulation around the same controller, by hand, and by their invariants."""

import math
import random
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.config.sections import AssumedLengthsConfig
from forebay.control.controller import Controller
from forebay.control.rules import Rules
from forebay.errors import RunError, UserError
from forebay.simulation.bound import Work, bound, bound_of
from forebay.simulation.model import EngineModel, Scenario, TrainerModel, Workload, lognormal
from forebay.simulation.result import autocorrelation
from forebay.simulation.run import Simulation, simulate
from forebay.telemetry.metrics import read_metrics
from tests.support.brute_force_engine import BruteForceRun


def make_rules(**changes):
    base = dict(
        steps=12,
        batch_groups=4,
        group_size=2,
        sync_every=1,
        max_staleness=2,
        work_in_progress=2.0,
        max_concurrent_samples=8,
        max_new_tokens=60,
    )
    return Rules(**(base | changes))


def make_workload(seed=0, prompts=40, group_size=2, longest=60):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, (prompts, group_size), dtype=np.int32)
    return Workload(lengths, lengths.mean(axis=1), rng.integers(1, 30, prompts, dtype=np.int32))


def make_scenario(**changes):
    workload = changes.pop("workload", None) or make_workload()
    engine = EngineModel(a=0.01, b=0.001, c=1e-5, slots=8, prefill_s=1e-4, pause_s=0.1)
    order = [[[row, row + 1]] for row in range(0, len(workload.lengths) - 1, 2)]
    base = dict(
        rules=make_rules(),
        streaming=False,
        engines=2,
        engine=engine,
        trainer=TrainerModel(0.2, 1e-4, 0.05),
        workload=workload,
        order=order,
        refresh_s=0.013,
        warm_up=2,
    )
    return Scenario(**(base | changes))


def random_scenario(seed, **changes):
    """Whatever the rules allow to be said."""
    rng = random.Random(seed)
    group_size = rng.choice([2, 4])
    slots = rng.choice([4, 6, 8])
    rules = make_rules(
        batch_groups=rng.choice([2, 3, 6]),
        group_size=group_size,
        sync_every=rng.choice([1, 2]),
        max_staleness=rng.choice([0, 1, 2.5, 5]),
        work_in_progress=rng.choice([1.0, 1.5, 2.0, 3.0, None]),
        max_concurrent_samples=rng.choice([slots, slots, 2 * slots]),
        refresh=rng.choice(["retract", "in_place", "drain"]),
        refresh_all=rng.random() < 0.5,
        queue_low=rng.choice([0, 1.0]),
        wait_for_oldest=rng.random() < 0.3,
    )
    engine = EngineModel(
        a=rng.uniform(0.005, 0.05),
        b=rng.uniform(0, 0.004),
        c=rng.uniform(1e-6, 1e-4),
        slots=slots,
        kv_tokens=rng.choice([math.inf, 200, 400]),
        prefill_s=rng.choice([0, 1e-3]),
        pause_s=rng.choice([0.02, 0.3, 1.7]),
    )
    return make_scenario(
        rules=replace(rules, **changes.pop("rules", {})),
        engine=replace(engine, **changes.pop("engine", {})),
        workload=make_workload(seed, group_size=group_size),
        trainer=TrainerModel(rng.uniform(0, 2), rng.uniform(0, 2e-3), rng.uniform(0, 0.5)),
        engines=rng.choice([1, 2, 3]),
        refresh_s=rng.choice([0.013, 0.1]),
        seed=seed,
        **changes,
    )


def recorded(scenario, folder):
    """(the steps' ends, the ledger's rows) of a simulation."""
    simulate(scenario, folder)
    rows = pq.read_table(folder / "ledger.parquet").to_pylist()
    return [step["t"] for step in read_metrics(folder / "metrics.jsonl").steps], rows


# ---- against brute force


@pytest.mark.parametrize("seed", range(40))
def test_steps_end_when_a_token_by_token_simulation_says(seed, tmp_path):
    scenario = random_scenario(seed)
    ends, _ = recorded(scenario, tmp_path)
    assert ends == pytest.approx(BruteForceRun(scenario).run(), rel=1e-3, abs=1e-4)  # recorded to a tenth of a ms


# ---- by hand


def test_a_run_behind_a_barrier_takes_what_its_parts_take():
    """Two responses of 10 and 20 tokens on prompts of 5, in turn with training: every second can be added up."""
    workload = Workload(np.array([[10, 20]], dtype=np.int32), np.array([15.0]), np.array([5], dtype=np.int32))
    engine = EngineModel(a=0.1, b=0.01, c=0.001, slots=2, prefill_s=0.02, pause_s=0.7)
    scenario = make_scenario(
        rules=make_rules(batch_groups=1, max_staleness=0, work_in_progress=1.0, refresh="in_place"),
        workload=workload,
        order=[[[0]]],
        engine=engine,
        engines=1,
        trainer=TrainerModel(2.0, 0.03, 0.4),
        refresh_s=0.25,
        reward_s=0.5,
    )
    result = simulate(scenario)
    prefill = 5 * 0.02
    both = sum(0.1 + 2 * 0.01 + 0.001 * (10 + 2 * i) for i in range(10))
    alone = sum(0.1 + 0.01 + 0.001 * (15 + i) for i in range(10))
    train = 2.0 + 0.03 * (30 + 2 * 5)
    step = prefill + both + alone + 0.5 + train + 0.4 + 0.25 + 0.7
    assert result.step_times == pytest.approx([step] * 10)
    assert result.train_wait_ratio == pytest.approx(1 - (train + 0.4) / step)
    # While the prompt is computed for the first response, the second one has no slot yet.
    assert result.slots_idle == pytest.approx(1 - (prefill / 2 + both + alone / 2) / step)
    assert result.engine_paused == pytest.approx(0.7 / step)
    assert result.engine_idle == pytest.approx((0.5 + train + 0.4 + 0.25) / step)
    assert result.tokens_per_s == pytest.approx(30 / step)
    assert (result.autocorrelation, result.staleness.max, result.queue_sd) == (0.0, 0, 0.0)


def test_a_streaming_trainer_does_its_share_while_the_others_are_generated():
    """One group after another on one engine: only the last group's work is left when it arrives."""
    workload = Workload(np.full((4, 2), 10, dtype=np.int32), np.full(4, 10.0), np.zeros(4, dtype=np.int32))
    scenario = make_scenario(
        rules=make_rules(batch_groups=4, max_staleness=0, work_in_progress=1.0, max_concurrent_samples=2),
        workload=workload,
        order=[[[0, 1, 2, 3]]],
        engine=EngineModel(a=0.1, b=0, c=0, slots=2),
        engines=1,
        trainer=TrainerModel(0.5, 0.02, 0.0, share_streamed=0.75),
        refresh_s=0.0,
        streaming=True,
    )
    # 4 x 10 decode steps, three quarters of the last group's work, a quarter of everybody's, the update.
    assert simulate(scenario).step_times == pytest.approx([4.0 + 0.75 * 0.4 + 0.25 * 1.6 + 0.5] * 10)
    whole = simulate(replace(scenario, streaming=False))
    assert whole.step_times == pytest.approx([4.0 + 1.6 + 0.5] * 10)


def test_a_static_batch_lasts_as_long_as_its_longest_response():
    workload = Workload(np.array([[10, 20], [30, 5]], dtype=np.int32), np.full(2, 16.0), np.zeros(2, dtype=np.int32))
    scenario = make_scenario(
        rules=make_rules(batch_groups=2, max_staleness=0, work_in_progress=1.0, minibatch_barrier=True),
        workload=workload,
        order=[[[0], [1]]],
        engine=EngineModel(a=0.0, b=1.0, c=0.0, slots=8, padded=True),
        engines=1,
        trainer=TrainerModel(0.0, 0.0),
        refresh_s=0.0,
    )
    assert simulate(scenario).step_times == pytest.approx([2 * 20 + 2 * 30.0] * 10)


def test_the_first_wave_comes_gradually(tmp_path):
    scenario = make_scenario(rules=make_rules(work_in_progress=3.0, max_staleness=5))
    _, at_once = recorded(scenario, tmp_path)
    assert sorted(row["admitted_t"] for row in at_once)[7] == 0.0
    _, spread = recorded(replace(scenario, first_wave_s=0.2), tmp_path)
    begun = sorted(row["admitted_t"] for row in spread)[:8]
    assert begun == pytest.approx([0.0, *(0.2 * group / 12 for group in range(2, 9))])


def with_deadline(seconds):
    """One prompt that takes a second to answer and one that takes a hundred, in turn on one engine."""
    workload = Workload(np.array([[10, 9], [9, 1000]], dtype=np.int32), np.full(2, 10.0), np.zeros(2, dtype=np.int32))
    return make_scenario(
        rules=make_rules(batch_groups=1, max_staleness=0, work_in_progress=1.0),
        workload=workload,
        order=[[[0], [1]]],
        engine=EngineModel(a=0.1, b=0, c=0, slots=2),
        engines=1,
        trainer=TrainerModel(0.5, 0.0),
        refresh_s=0.0,
        group_deadline_s=seconds,
    )


def test_a_group_beyond_its_deadline_is_made_afresh_twice_and_then_fails(tmp_path):
    # Given up at the boundaries after 2.03, 4.06 and 6.09 s; then the other prompt's second comes.
    ends, rows = recorded(with_deadline(2.03), tmp_path)
    assert np.diff(ends) == pytest.approx([6.1 + 1 + 0.5] * 11)
    failed = [row for row in rows if row["fate"] == "failed"]
    assert len(failed) == 11
    assert all(row["attempts"] == 3 and row["prompt_id"] == "p0000001" for row in failed)
    assert failed[0]["reason"] == "3 times longer than control.group_deadline_s 2.03"
    result = simulate(with_deadline(101.0))
    assert sorted(result.step_times) == pytest.approx([1.5] * 5 + [100.5] * 5)
    assert result.fates["failed"] == 0


def test_a_deadline_that_no_group_keeps_is_one_line():
    with pytest.raises(UserError, match=r"^simulation: no group .* control.group_deadline_s \(0.5 s\): raise it$"):
        simulate(with_deadline(0.5))


# ---- invariants


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    streaming=st.booleans(),
    teaching=st.sampled_from([1.0, 0.7]),
    dynamic=st.booleans(),
    stale=st.sampled_from(["drop", "retry"]),
    refresh=st.sampled_from(["retract", "in_place", "abort", "drain"]),
    barrier=st.sampled_from(["none", "minibatch", "static"]),
    limit=st.sampled_from([None, 6.0]),
)
def test_every_run_keeps_its_bound_and_its_account(
    tmp_path_factory, seed, streaming, teaching, dynamic, stale, refresh, barrier, limit
):
    changes = dict(dynamic_sampling=dynamic, stale=stale, refresh=refresh, minibatch_barrier=barrier != "none")
    scenario = random_scenario(
        seed,
        rules=changes,
        engine=dict(padded=barrier == "static"),
        streaming=streaming,
        teaching=teaching,
        reward_s=0.01 * (seed % 3),
        group_deadline_s=limit,
    )
    folder = tmp_path_factory.mktemp("run")
    result = simulate(scenario, folder)
    rows = pq.read_table(folder / "ledger.parquet").to_pylist()
    trained = [row for row in rows if row["fate"] == "trained"]
    assert all(0 <= row["staleness"] <= scenario.rules.staleness_bound for row in trained)
    assert result.staleness.max <= scenario.rules.staleness_bound
    assert result.fates["admitted"] == sum(count for fate, count in result.fates.items() if fate != "admitted")
    assert len({row["group_id"] for row in rows}) == len(rows) == result.fates["admitted"] - result.fates["in_flight"]
    for row in trained:  # what was trained are the responses of its prompt
        assert row["lengths"] == scenario.workload.lengths[int(row["prompt_id"][1:])].tolist()
    assert len(result.step_times) == scenario.rules.steps - scenario.warm_up
    shares = [result.slots_idle, result.engine_idle, result.engine_paused, result.train_wait_ratio]
    assert all(-1e-9 <= share <= 1 + 1e-9 for share in shares)


def test_admission_is_the_controllers_own(monkeypatch):
    scenario = make_scenario(rules=make_rules(work_in_progress=3.0, max_staleness=5))
    free = simulate(scenario)
    monkeypatch.setattr(Controller, "_room", lambda self: 4 - self.outstanding)
    bound = simulate(scenario)
    assert bound.staleness.mean < free.staleness.mean
    assert bound.step_time_s > free.step_time_s


def test_it_says_the_same_each_time():
    scenario = random_scenario(3, streaming=True, teaching=0.8)
    assert simulate(scenario).step_times.tolist() == simulate(scenario).step_times.tolist()


def test_without_progress_it_ends_with_one_line():
    with pytest.raises(RunError, match=r"nothing goes on after step 0.*work_in_progress"):
        simulate(make_scenario(rules=make_rules(work_in_progress=0.5)))


def test_later_steps_are_not_those_of_a_run_that_ends():
    """A longer run begins with the same steps: the pipeline does not empty towards the last one."""
    ends = [
        Simulation(make_scenario(rules=make_rules(steps=steps, max_staleness=5))).run().step_times for steps in (12, 30)
    ]
    assert ends[0].tolist() == ends[1][:10].tolist()


# ---- the bound


def test_bound_is_the_formula_of_the_study():
    engine = EngineModel(a=0.008, b=5e-5, c=4.5e-8, slots=64, prefill_s=2e-5, pause_s=1.5)
    scenario = make_scenario(
        rules=make_rules(batch_groups=64, sync_every=2, max_staleness=3),
        engine=engine,
        engines=8,
        trainer=TrainerModel(1.0, 2e-5, 0.6),
    )
    work = Work(64, 48, 8, 2000.0, 5e6, 200.0, 8192)
    context = 200 + 5e6 / 4000
    step = 0.008 + 5e-5 * 64 + 4.5e-8 * 64 * context
    found = bound_of(scenario, work)
    train = 1.0 + 2e-5 * 48 * 8 * 2200 + 0.6 / 2
    assert found.train_s == pytest.approx(train)
    assert found.rollout_s == pytest.approx(64 * 8 * 2000 * step / (8 * 64) + 64 * 200 * 2e-5 / 8 + 1.5 / 2)
    alone = sum(0.008 + 5e-5 + 4.5e-8 * (200 + i) for i in range(8192)) + 200 * 2e-5
    assert found.tail_s == pytest.approx((alone + train) / (4 * 2))
    assert (found.step_time_s, found.binding) == (max(found.train_s, found.rollout_s), "rollout")
    half = bound_of(replace(scenario, engine=replace(engine, kv_tokens=32 * context)), work)
    assert half.rollout_s > found.rollout_s
    assert bound_of(replace(scenario, rules=make_rules(max_staleness=math.inf)), work).tail_s is None


@pytest.mark.parametrize("regime", [0.5, 1.0, 1.5])
def test_a_streaming_run_with_default_credits_comes_within_two_percent_of_its_bound(regime):
    """In the three regimes: rollout-bound, balanced, train-bound."""
    workload = lognormal(2000, 8, AssumedLengthsConfig(median=300), 2000, 0)
    scenario = make_scenario(
        rules=make_rules(
            steps=45,
            batch_groups=64,
            group_size=8,
            max_staleness=8,
            work_in_progress=2.0,
            max_concurrent_samples=64,
            max_new_tokens=2000,
            refresh="in_place",
        ),
        streaming=True,
        engines=8,
        engine=EngineModel(a=0.008, b=5e-5, c=4.5e-8, slots=64, pause_s=0.1),
        workload=workload,
        order=[[[row]] for row in range(2000)],
        warm_up=12,
    )
    rollout = bound(scenario).rollout_s
    tokens = 64 * 8 * (workload.lengths.mean() + 200)
    result = simulate(replace(scenario, trainer=TrainerModel(0.1, (regime * rollout - 0.1) / tokens)))
    assert 0.99 < result.over_bound < 1.02


def test_autocorrelation_of_what_is_known():
    assert autocorrelation(np.array([1.0, 3.0] * 50)) == pytest.approx(-0.99)
    assert autocorrelation(np.full(10, 0.1)) == 0.0
    walk = np.repeat(np.array([1.0, 2.0]), 50)
    assert autocorrelation(walk) > 0.9


# ---- bad input


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: EngineModel(1, 0, 0, slots=0), "0 slots"),
        (lambda: EngineModel(math.nan, 0, 0, slots=1), "engine a is nan"),
        (lambda: EngineModel(0, 0, 0, slots=1), "no time"),
        (lambda: EngineModel(1, 0, 0, slots=1, pause_s=-1.0), "pause_s is -1"),
        (lambda: EngineModel(1, 0, 0, slots=1, prefill_s=math.inf), "prefill_s is inf"),
        (lambda: TrainerModel(math.inf, 0), "fixed_s is inf"),
        (lambda: TrainerModel(1, 0, share_streamed=1.5), "share"),
        (lambda: Workload(np.zeros((0, 2), np.int32), np.zeros(0), np.zeros(0, np.int32)), "empty"),
        (lambda: Workload(np.ones((1, 2), np.int32), np.array([np.nan]), np.zeros(1, np.int32)), "prompt 0 .* nan"),
        (lambda: Workload(np.zeros((1, 2), np.int32), np.ones(1), np.zeros(1, np.int32)), "1 token or more"),
        (lambda: Workload(np.ones((2, 2), np.int32), np.ones(1), np.zeros(2, np.int32)), "2 prompts"),
        (lambda: lognormal(0, 2, AssumedLengthsConfig(), 10, 0), "no prompts"),
        (lambda: make_scenario(engine=EngineModel(1, 0, 0, slots=1, kv_tokens=50)), "would never fit"),
        (lambda: make_scenario(engines=0), "0 engines"),
        (lambda: make_scenario(order=[[[]]]), "no prompt"),
        (lambda: make_scenario(order=[[[40]]]), "40"),
        (lambda: make_scenario(warm_up=11), "12 steps leave"),
        (lambda: make_scenario(rules=make_rules(group_size=4)), "4 responses"),
        (lambda: make_scenario(teaching=0.0), "share of 0"),
        (lambda: make_scenario(reward_s=-1.0), "reward_s"),
    ],
)
def test_bad_input_is_refused_in_one_line(make, says):
    with pytest.raises(UserError, match=says) as refused:
        make()
    assert "\n" not in str(refused.value)


def test_responses_of_one_length_are_fine():
    equal = Workload(np.full((8, 2), 7, dtype=np.int32), np.full(8, 7.0), np.full(8, 3, dtype=np.int32))
    assert simulate(make_scenario(workload=equal)).step_time_s > 0
