"""The state machine under random events. The oracle keeps its own record of what engines and trainer really did."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.control.controller import Controller, Rules, Stage
from forebay.control.ledger import LedgerError
from forebay.control.types import Fate, Prompt, Sample, VersionSpan
from forebay.errors import RunError


def prompts():
    for number in itertools.count():
        yield tuple(
            Prompt(f"p{number}.{i}", (1, 2, 3), "text", "null", 10.0 + number % 7) for i in range(1 + number % 4)
        )


def make_rules(**changes):
    base = dict(
        steps=6,
        batch_groups=4,
        group_size=2,
        sync_every=1,
        max_staleness=2,
        work_in_progress=2.0,
        max_concurrent_samples=64,
    )
    return Rules(**(base | changes))


class World:
    """Engines and a trainer as they are, apart from what the controller believes."""

    def __init__(self, rules, engines, seed):
        self.rules, self.rng = rules, random.Random(seed)
        self.controller = Controller(rules, prompts())
        self.engine_version = {}
        self.work = {}  # group id -> (engine, oldest version that gave it a token)
        self.scoring = set()
        self.version = 0
        self.steps = 0
        self.trained = []
        for key in range(engines):
            self.join(key)

    def attempts(self, group_id):
        return self.controller.groups[group_id].attempts

    def join(self, key):
        self.engine_version[key] = 0
        self.controller.engine_joined(key, 0)

    def dispatch(self):
        while (decision := self.controller.next_dispatch()) is not None:
            assert decision.groups
            for group in decision.groups:
                assert group.group_id not in self.work
                self.work[group.group_id] = (decision.engine, self.engine_version[decision.engine])
        for key in self.engine_version:
            load = sum(engine == key for engine, _ in self.work.values())
            assert load * self.rules.group_size <= self.rules.max_concurrent_samples

    def finish(self):
        if not self.work:
            return
        group_id = self.rng.choice(sorted(self.work))
        engine, oldest = self.work.pop(group_id)
        newest = self.engine_version[engine]
        spans = (
            (VersionSpan(oldest, 0, 1), VersionSpan(newest, 1, 2)) if newest > oldest else (VersionSpan(oldest, 0, 2),)
        )
        samples = tuple(Sample((5, 6), (-0.1, -0.2), spans, "stop") for _ in range(self.rules.group_size))
        assert self.controller.generated(group_id, self.attempts(group_id), samples)
        self.scoring.add(group_id)

    def score(self):
        if not self.scoring:
            return
        group_id = self.rng.choice(sorted(self.scoring))
        self.scoring.discard(group_id)
        kind = self.rng.random()
        if kind < 0.05:
            self.controller.scoring_failed(group_id, "bad answer")
        else:
            value = 1.0 if kind < 0.5 else 0.0
            self.controller.scored(group_id, (1.0, value) + (1.0,) * (self.rules.group_size - 2))

    def train(self):
        if self.controller.finished:
            return
        batch = self.controller.next_batch(self.steps + 1)
        if batch is None:
            return
        assert batch.version == self.version
        assert len(batch.groups) + len(batch.skipped) == self.rules.batch_groups
        for group in batch.groups + batch.skipped:
            age = self.version - min(sample.oldest_version for sample in group.samples)
            assert 0 <= age <= self.rules.staleness_bound
        self.trained.extend(group.group_id for group in batch.groups)
        self.steps += 1
        self.controller.step_trained(self.steps)
        if self.steps % self.rules.sync_every == 0:
            self.version += 1
            self.controller.snapshot_published(self.version)

    def refresh(self):
        key = self.controller.next_refresh()
        if key is not None:
            self.controller.refresh_started(key)
            assert self.controller.next_refresh() is None
            self.engine_version[key] = self.version
            self.controller.refresh_done(key, self.version)

    def break_engine(self):
        if len(self.engine_version) < 2:
            return
        key = self.rng.choice(sorted(self.engine_version))
        del self.engine_version[key]
        late = {group: self.attempts(group) for group, held in self.work.items() if held[0] == key}
        self.controller.engine_lost(key)
        self.work = {group: held for group, held in self.work.items() if held[0] != key}
        self.join(key)
        self.dispatch()
        for group_id, attempt in late.items():  # its answers come after all: none may count
            assert not self.controller.generated(group_id, attempt, ())
            self.controller.generation_failed(group_id, attempt)
            self.controller.refused(group_id, attempt, "late")

    def break_request(self):
        if self.work:
            group_id = self.rng.choice(sorted(self.work))
            del self.work[group_id]
            if self.rng.random() < 0.3:
                self.controller.refused(group_id, self.attempts(group_id), "the prompt is too long")
            else:
                self.controller.generation_failed(group_id, self.attempts(group_id))

    def check(self):
        held = len(self.controller.groups)
        self.controller.ledger.check(held)
        fates = self.controller.ledger.fates()
        assert fates["admitted"] == sum(count for fate, count in fates.items() if fate != "admitted")
        assert len(self.trained) == len(set(self.trained))
        stages = [group.stage for group in self.controller.groups.values()]
        assert stages.count(Stage.GENERATING) == len(self.work)
        assert stages.count(Stage.SCORING) == len(self.scoring)

    def drain(self):
        """Whatever happened, a fair world reaches the end."""
        for _ in range(4000):
            if self.controller.finished:
                return
            self.dispatch()
            for action in (self.finish, self.score, self.train, self.refresh):
                action()
        raise AssertionError(f"stuck: {[(g.stage, g.engine) for g in self.controller.groups.values()]}")


ACTIONS = ("dispatch", "finish", "finish", "score", "score", "train", "refresh", "break_engine", "break_request")


@settings(max_examples=150, deadline=None)
@given(
    actions=st.lists(st.sampled_from(ACTIONS), max_size=120),
    engines=st.integers(1, 3),
    staleness=st.sampled_from([0, 0.5, 1, 2, 4]),
    sync_every=st.sampled_from([1, 2, 3]),
    wip=st.sampled_from([1.0, 1.5, 3.0]),
    stale=st.sampled_from(["drop", "retry"]),
    dynamic=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_bound_account_and_progress_under_random_events(
    actions, engines, staleness, sync_every, wip, stale, dynamic, seed
):
    rules = make_rules(
        max_staleness=staleness, sync_every=sync_every, work_in_progress=wip, stale=stale, dynamic_sampling=dynamic
    )
    world = World(rules, engines, seed)
    for action in actions:
        getattr(world, action)()
        world.check()
    world.drain()
    world.check()
    assert world.steps == rules.steps
    assert world.controller.ledger.fates()["in_flight"] == 0
    trained = [entry for entry in world.controller.ledger.entries if entry.fate is Fate.TRAINED]
    assert [entry.group_id for entry in trained] == world.trained
    assert all(entry.staleness <= rules.staleness_bound for entry in trained)


def test_sync_is_staleness_zero_and_never_runs_ahead():
    world = World(make_rules(max_staleness=0, work_in_progress=1.0), engines=1, seed=1)
    for step in range(6):
        world.dispatch()
        assert len(world.work) == 4  # one batch and no more
        while world.work or world.scoring:
            world.finish()
            world.score()
            world.dispatch()  # replaces a failed group, if any
        world.train()
        assert world.steps == step + 1
        world.dispatch()
        assert not world.work  # the engine still has the old weights: nothing may start
        world.refresh()
    entries = world.controller.ledger.entries
    assert all(entry.staleness == 0 for entry in entries if entry.fate is Fate.TRAINED)


def test_one_step_off_generates_the_next_batch_while_training():
    world = World(make_rules(max_staleness=1, work_in_progress=2.0), engines=1, seed=2)
    world.dispatch()
    assert len(world.work) == 8


def test_a_group_overtaken_by_others_is_dropped_with_its_reason_or_retried():
    for stale in ("drop", "retry"):
        world = World(make_rules(max_staleness=1, work_in_progress=3.0, stale=stale, steps=8), engines=1, seed=3)
        world.dispatch()
        straggler = min(world.work)
        held = world.work.pop(straggler)
        while world.version < 3:
            world.dispatch()
            world.finish()
            world.score()
            world.train()
            world.refresh()
        world.work[straggler] = held
        while straggler in world.work:
            world.finish()
        while world.scoring:
            world.score()
        world.dispatch()
        while world.version < 5:
            world.dispatch()
            world.finish()
            world.score()
            world.train()
            world.refresh()
        entry = next((e for e in world.controller.ledger.entries if e.group_id == straggler), None)
        if stale == "drop":
            assert entry is not None
            assert entry.fate is Fate.STALE
            assert "the bound is 1" in entry.reason
        else:
            assert entry is None or entry.attempts == 2


def test_least_loaded_engine_is_chosen():
    controller = Controller(make_rules(batch_groups=8, work_in_progress=8.0, max_staleness=8), prompts())
    controller.engine_joined(0, 0)
    controller.engine_joined(1, 0)
    loads = {0: 0.0, 1: 0.0}
    for _ in range(6):
        decision = controller.next_dispatch()
        assert loads[decision.engine] == min(loads.values())
        loads[decision.engine] += sum(group.prompt.predicted_length for group in decision.groups)


def test_a_refreshing_engine_gets_no_work():
    controller = Controller(make_rules(), prompts())
    controller.engine_joined(0, 0)
    controller.snapshot_published(1)
    controller.refresh_started(controller.next_refresh())
    assert controller.next_dispatch() is None
    controller.refresh_done(0, 1)
    assert controller.next_dispatch() is not None


def test_the_same_batch_is_served_again_until_its_step_is_reported():
    world = World(make_rules(), engines=1, seed=4)
    while world.controller.count(Stage.QUEUED) < 4:
        world.dispatch()
        world.finish()
        world.score()
    assert world.controller.next_batch(1) is world.controller.next_batch(1)
    with pytest.raises(RunError, match="step 2"):
        Controller(make_rules(), prompts()).next_batch(2)


def test_ledger_refuses_a_second_fate_and_a_wrong_sum():
    world = World(make_rules(), engines=1, seed=5)
    world.dispatch()
    group_id = min(world.work)
    world.controller.refused(group_id, 1, "reason")
    entry = world.controller.ledger.entries[0]
    with pytest.raises(LedgerError, match="second fate"):
        world.controller.ledger.settle(entry)
    with pytest.raises(LedgerError, match="held in flight"):
        world.controller.ledger.check(len(world.controller.groups) + 1)


def test_events_out_of_order_are_refused():
    controller = Controller(make_rules(), prompts())
    with pytest.raises(RunError, match="reports step 1"):
        controller.step_trained(1)
    with pytest.raises(RunError, match="version 2 was published after 0"):
        controller.snapshot_published(2)
