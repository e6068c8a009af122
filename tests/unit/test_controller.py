"""The state machine under random events. The oracle is a world of engines and a trainer that keeps its own record of
what was really generated, trained and published, and asks of the controller only that its promises hold there."""

import itertools
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forebay.control.controller import Controller, Rules, Stage
from forebay.control.ledger import LedgerError
from forebay.control.types import Fate, Prompt, Sample, VersionSpan
from forebay.errors import RunError

LONGEST = 5


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


def as_sample(tokens, finished):
    """Tokens are (value, version) pairs."""
    spans = []
    for place, (_, version) in enumerate(tokens):
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, place + 1)
        else:
            spans.append(VersionSpan(version, place, place + 1))
    values = tuple(value for value, _ in tokens)
    return Sample(values, tuple(-0.1 for _ in values), tuple(spans), "stop" if finished else None)


class Job:
    """One group on one engine: the tokens of its responses, each with the version that really made it."""

    def __init__(self, engine, group, rng):
        self.engine, self.attempt = engine, group.attempts
        self.lengths = [rng.randint(1, LONGEST) for _ in range(group.size)]
        self.responses = [self.tokens_of(prefix) for prefix in group.prefixes]
        self.lengths = [max(length, len(r)) for length, r in zip(self.lengths, self.responses, strict=True)]
        finished = [sample.finish_reason is not None for sample in group.prefixes]
        self.lengths = [len(r) if f else n for n, r, f in zip(self.lengths, self.responses, finished, strict=True)]
        self.ended = finished  # as the controller knows

    @staticmethod
    def tokens_of(sample):
        return [
            (value, next(span.version for span in sample.versions if span.start <= place < span.end))
            for place, value in enumerate(sample.ids)
        ]

    def decode(self, version, serial):
        for response, length in zip(self.responses, self.lengths, strict=True):
            if len(response) < length:
                response.append((next(serial), version))

    def news(self):
        """Tokens of the responses that have ended since it was asked last, all but the very last one."""
        for place, (response, length) in enumerate(zip(self.responses, self.lengths, strict=True)):
            if len(response) == length and not self.ended[place] and sum(self.ended) < len(self.ended) - 1:
                self.ended[place] = True
                yield len(response)

    @property
    def done(self):
        return all(len(r) == length for r, length in zip(self.responses, self.lengths, strict=True))

    def samples(self):
        return tuple(
            as_sample(response, len(response) == length)
            for response, length in zip(self.responses, self.lengths, strict=True)
        )


class World:
    """Engines and a trainer as they are, apart from what the controller believes."""

    def __init__(self, rules, engines, seed, streaming=False):
        self.rules, self.rng, self.streaming = rules, random.Random(seed), streaming
        self.entries = []
        self.controller = Controller(rules, prompts(), self.entries.append, streaming)
        self.serial = itertools.count()
        self.engine_version = {}
        self.work = {}
        self.scoring = {}
        self.history = {}  # step -> ids of the groups it trained
        self.received = []
        self.version = self.steps = self.checkpoint = 0
        for key in range(engines):
            self.join(key)

    def join(self, key):
        self.engine_version[key] = 0
        self.controller.engine_joined(key, 0)

    def dispatch(self):
        while (decision := self.controller.next_dispatch()) is not None:
            assert decision.groups
            if self.rules.minibatch_barrier:
                assert all(job.engine != decision.engine for job in self.work.values())
            for group in decision.groups:
                assert group.group_id not in self.work
                self.work[group.group_id] = Job(decision.engine, group, self.rng)
        for key in self.engine_version:
            running = sum(job.ended.count(False) for job in self.work.values() if job.engine == key)
            most = self.rules.max_concurrent_samples + self.rules.group_size - 1
            assert running <= (4 * self.rules.group_size if self.rules.minibatch_barrier else most)

    def decode(self):
        for group_id, job in self.work.items():
            job.decode(self.engine_version[job.engine], self.serial)
            for tokens in job.news():
                self.controller.sample_finished(group_id, job.attempt, tokens)
                self.controller.sample_finished(group_id, job.attempt - 1, tokens)  # an old attempt's: ignored

    def finish(self):
        self.decode()
        for group_id in [key for key, job in self.work.items() if job.done]:
            job = self.work.pop(group_id)
            assert self.controller.generated(group_id, job.attempt, job.samples())
            self.scoring[group_id] = job.samples()

    def score(self):
        if not self.scoring:
            return
        group_id = self.rng.choice(sorted(self.scoring))
        del self.scoring[group_id]
        kind = self.rng.random()
        if kind < 0.05:
            self.controller.scoring_failed(group_id, "bad answer")
        else:
            value = 1.0 if kind < 0.5 else 0.0
            self.controller.scored(group_id, (1.0, value) + (1.0,) * (self.rules.group_size - 2))

    def take(self):
        """The batch of the next step if it is complete, streamed or whole; groups are looked at when they come."""
        step = self.steps + 1
        if not self.streaming:
            batch = self.controller.next_batch(step)
            if batch is None:
                return None
            self.look_at(batch.groups + batch.skipped)
            return batch.groups
        chunk = self.controller.next_groups(step, len(self.received))
        if chunk is None:
            return None
        batch, complete = chunk
        self.look_at(batch.groups)
        self.received.extend(batch.groups)
        return tuple(self.received) if complete else None

    def look_at(self, groups):
        for group in groups:
            tokens = [token for sample in group.samples for token in Job.tokens_of(sample)]
            assert all(version <= self.steps // self.rules.sync_every for _, version in tokens)
            oldest = min(version for _, version in tokens)
            assert self.steps // self.rules.sync_every - oldest <= self.rules.staleness_bound
            assert all(1 <= len(sample.ids) <= LONGEST and sample.finish_reason for sample in group.samples)
            assert len({value for value, _ in tokens}) == len(tokens)  # no token is used twice

    def train(self):
        if self.steps >= self.rules.steps:
            return
        groups = self.take()
        if groups is None:
            return
        self.steps += 1
        ids = [group.group_id for group in groups]
        assert self.history.setdefault(self.steps, ids) == ids  # a step done again trains the same groups
        self.received = []
        self.controller.step_trained(self.steps, self.rng.random())
        if self.steps % self.rules.sync_every == 0:
            version = self.steps // self.rules.sync_every
            assert self.controller.snapshot_published(version) == (version > self.version)
            self.version = max(self.version, version)

    def save(self):
        self.checkpoint = self.steps
        self.controller.checkpointed(self.steps)

    def break_trainer(self):
        """It comes back from its last checkpoint and does the steps since then again."""
        self.steps, self.received = self.checkpoint, []

    def refresh(self):
        while (key := self.controller.next_refresh()) is not None:
            self.controller.refresh_started(key)
            assert self.rules.refresh_all or self.controller.next_refresh() is None
            if self.rules.refresh == "abort":
                for group_id in [g for g, job in self.work.items() if job.engine == key]:
                    job = self.work.pop(group_id)
                    self.controller.aborted(group_id, job.attempt, job.samples())
            self.engine_version[key] = self.version
            self.controller.refresh_done(key, self.version)

    def break_engine(self):
        key = self.rng.choice(sorted(self.engine_version))
        self.controller.engine_lost(key)
        del self.engine_version[key]
        lost = {group: job for group, job in self.work.items() if job.engine == key}
        for group_id, job in lost.items():
            del self.work[group_id]
            partials = job.samples() if self.rng.random() < 0.5 else ()
            assert self.controller.generation_failed(group_id, job.attempt, partials)
        self.join(key)
        self.dispatch()
        for group_id, job in lost.items():  # its answers come after all: none may count
            assert not self.controller.generated(group_id, job.attempt, job.samples())
            assert not self.controller.generation_failed(group_id, job.attempt)
            self.controller.refused(group_id, job.attempt, "late")

    def break_request(self):
        if self.work:
            group_id = self.rng.choice(sorted(self.work))
            attempt = self.work.pop(group_id).attempt
            kind = self.rng.random()
            if kind < 0.2:
                self.controller.refused(group_id, attempt, "the prompt is too long")
            elif kind < 0.5:
                self.controller.deadline_passed(group_id, attempt, 1.0)
            else:
                self.controller.generation_failed(group_id, attempt)

    def check(self):
        groups = self.controller.groups.values()
        self.controller.ledger.check(len(groups))
        fates = self.controller.ledger.fates()
        assert fates["admitted"] == sum(count for fate, count in fates.items() if fate != "admitted")
        assert len(self.entries) == fates["admitted"] - fates["in_flight"]
        for stage in Stage:
            assert self.controller.count(stage) == sum(group.stage is stage for group in groups)
        assert self.controller.count(Stage.GENERATING) == len(self.work)
        assert self.controller.count(Stage.SCORING) == len(self.scoring)
        pool = self.controller._pool
        pool._weigh_changed()
        most = self.rules.max_concurrent_samples
        taken = [min(engine.samples, most) for engine in self.controller.engines.values()]
        assert pool.filled == pytest.approx(sum(taken) / (most * len(taken)))
        barrier = self.rules.max_staleness == 0 and any(
            engine.version < self.controller.published for engine in self.controller.engines.values()
        )
        for key, engine in self.controller.engines.items():
            jobs = [job for job in self.work.values() if job.engine == key]
            assert engine.groups == {g for g, job in self.work.items() if job.engine == key}
            assert engine.samples == sum(job.ended.count(False) for job in jobs)
            assert engine.load >= -1e-6
            full = bool(jobs) if self.rules.minibatch_barrier else engine.samples >= self.rules.max_concurrent_samples
            assert (key in pool.free()) == (not full and not engine.refreshing and not barrier)
            assert engine.load > 0 if engine.samples else engine.load == pytest.approx(0, abs=1e-6 if jobs else 0)

    def drain(self):
        """Whatever happened, a fair world reaches the end."""
        for _ in range(6000):
            if self.steps >= self.rules.steps:
                return
            self.dispatch()
            for action in (self.finish, self.score, self.train, self.refresh):
                action()
        raise AssertionError(f"stuck: {[(g.stage, g.engine) for g in self.controller.groups.values()]}")


ACTIONS = (
    *("dispatch", "finish", "score", "train", "refresh") * 3,
    *("decode", "save", "break_engine", "break_request", "break_trainer"),
)


@example(  # responses that are all there when their engine breaks still hold up a minibatch barrier
    actions=["dispatch", "finish", "finish", "break_engine", "break_engine", "break_engine"],
    engines=1,
    staleness=0,
    sync_every=1,
    wip=1.0,
    changes=dict(max_concurrent_samples=1, minibatch_barrier=True, queue_high=1.0, require_batches=1),
    streaming=False,
    seed=1,
)
@settings(max_examples=250, deadline=None)
@given(
    actions=st.lists(st.sampled_from(ACTIONS), max_size=150),
    engines=st.integers(1, 3),
    staleness=st.sampled_from([0, 0.5, 1, 2, 4]),
    sync_every=st.sampled_from([1, 2, 3]),
    wip=st.sampled_from([1.0, 1.5, 3.0, None]),
    changes=st.fixed_dictionaries(
        {
            "stale": st.sampled_from(["drop", "retry"]),
            "dynamic_sampling": st.booleans(),
            "refresh": st.sampled_from(["retract", "abort"]),
            "refresh_all": st.booleans(),
            "queue_high": st.sampled_from([1.0, 4.0]),
            "queue_low": st.sampled_from([0.0, 1.0]),
            "max_predicted_tokens": st.sampled_from([float("inf"), 60.0]),
            "over_sampling": st.sampled_from([1.0, 1.5]),
            "require_batches": st.sampled_from([1, 1, 2]),
            "max_concurrent_samples": st.sampled_from([1, 3, 64]),
            "minibatch_barrier": st.booleans(),
            "wait_for_oldest": st.booleans(),
            "correct_lengths": st.booleans(),
            "max_new_tokens": st.sampled_from([float("inf"), float(LONGEST)]),
        }
    ),
    streaming=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_bound_account_and_progress_under_random_events(
    actions, engines, staleness, sync_every, wip, changes, streaming, seed
):
    most = min((int(staleness) + 1) * sync_every, wip or 2.0, changes["queue_high"])
    changes["require_batches"] = min(changes["require_batches"], int(most))  # as the profile's checks see to
    rules = make_rules(max_staleness=staleness, sync_every=sync_every, work_in_progress=wip, **changes)
    world = World(rules, engines, seed, streaming)
    for action in actions:
        getattr(world, action)()
        world.check()
    world.drain()
    world.check()
    if rules.over_sampling == 1.0:
        assert world.controller.ledger.fates()["in_flight"] == 0
    trained = [entry for entry in world.entries if entry.fate is Fate.TRAINED]
    assert sorted(entry.group_id for entry in trained) == sorted(itertools.chain(*world.history.values()))
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
    assert all(entry.staleness == 0 for entry in world.entries if entry.fate is Fate.TRAINED)


def test_fully_async_with_staleness_zero_trains_what_sync_trains():
    def trained(work_in_progress):
        world = World(make_rules(max_staleness=0, work_in_progress=work_in_progress), engines=1, seed=6)
        world.drain()
        return {step: sorted(ids) for step, ids in world.history.items()}

    assert trained(3.0) == trained(1.0)


def test_one_step_off_generates_the_next_batch_while_training():
    world = World(make_rules(max_staleness=1, work_in_progress=2.0), engines=1, seed=2)
    world.dispatch()
    assert len(world.work) == 8


@pytest.mark.parametrize("stale", ["drop", "retry"])
def test_a_group_overtaken_by_others_is_dropped_with_its_reason_or_retried(stale):
    world = World(make_rules(max_staleness=1, work_in_progress=3.0, stale=stale, steps=12), engines=1, seed=3)
    world.dispatch()
    straggler = min(world.work)
    world.decode()
    held = world.work.pop(straggler)
    while world.version < 3:
        for action in (world.dispatch, world.finish, world.score, world.train, world.refresh):
            action()
    world.work[straggler] = held
    world.drain()
    entry = next(entry for entry in world.entries if entry.group_id == straggler)
    if stale == "drop":
        assert entry.fate is Fate.STALE
        assert "the bound is 1" in entry.reason
        assert world.controller.tokens_discarded > 0
    else:
        assert entry.attempts == 2
        assert entry.fate is not Fate.STALE


def test_partial_tokens_are_kept_while_their_version_allows():
    for bound, version_gap, kept in ((4, 0, True), (4, 3, True), (4, 4, False), (0, 0, True)):
        world = World(make_rules(max_staleness=bound, work_in_progress=9.0, steps=20), engines=1, seed=4)
        controller = world.controller
        world.dispatch()
        world.decode()
        group_id = next(key for key, job in world.work.items() if not job.done)
        job = world.work.pop(group_id)
        controller.steps_trained = version_gap
        controller.published = version_gap
        controller.engines[0].version = version_gap
        assert controller.generation_failed(group_id, job.attempt, job.samples())
        assert bool(controller.groups[group_id].samples) == kept


@pytest.mark.parametrize("alike_teaches", [False, True])
def test_equal_rewards_are_trained_where_they_teach(alike_teaches):
    world = World(make_rules(group_size=1, alike_teaches=alike_teaches), engines=1, seed=5)
    while world.controller.next_batch(1) is None:
        world.dispatch()
        world.finish()
        for group_id in sorted(world.scoring):
            world.controller.scored(group_id, (0.0,))
        world.scoring.clear()
    batch = world.controller.next_batch(1)
    assert (len(batch.groups), len(batch.skipped)) == ((4, 0) if alike_teaches else (0, 4))


def test_a_deadline_gives_a_group_three_tries():
    world = World(make_rules(), engines=1, seed=5)
    world.dispatch()
    group_id = min(world.work)
    for attempt in (1, 2, 3):
        del world.work[group_id]
        world.controller.deadline_passed(group_id, attempt, 2.5)
        world.dispatch()
    entry = next(entry for entry in world.entries if entry.group_id == group_id)
    assert entry.fate is Fate.FAILED
    assert "control.group_deadline_s 2.5" in entry.reason


def test_the_least_loaded_engine_is_chosen_within_its_token_budget():
    rules = make_rules(batch_groups=8, work_in_progress=8.0, max_staleness=8, max_predicted_tokens=100.0)
    controller = Controller(rules, prompts(), lambda entry: None)
    controller.engine_joined(0, 0)
    controller.engine_joined(1, 0)
    loads = {0: 0.0, 1: 0.0}
    while (decision := controller.next_dispatch()) is not None:
        assert loads[decision.engine] <= min(loads.values()) + 100
        loads[decision.engine] += sum(2 * group.prompt.predicted_length for group in decision.groups)
    assert all(60 < load <= 100 for load in loads.values())


def test_a_low_queue_prefers_quick_minibatches_but_overtakes_each_at_most_four_times():
    def source():
        for number in itertools.count():
            yield (Prompt(f"p{number}", (1,), "", "null", 100.0 if number == 0 else 1.0),)

    rules = make_rules(queue_low=1.0, work_in_progress=30.0, max_staleness=30, batch_groups=4, steps=40)
    controller = Controller(rules, source(), lambda entry: None)
    controller.engine_joined(0, 0)
    order = [controller.next_dispatch().groups[0].prompt.prompt_id for _ in range(8)]
    assert order.index("p0") == 4


def test_automatic_credits_rise_when_the_trainer_starves_and_fall_when_stock_is_high():
    rules = make_rules(steps=400, max_staleness=8, work_in_progress=None, max_concurrent_samples=8)
    world = World(rules, engines=1, seed=7)
    credits = world.controller.credits
    assert credits.batches == 1.5 * 8 / (4 * 2) + 1.0  # near the analytic value: what the slots hold, and the trainer's
    credits.step(waited_share=1.0)  # of the first step it waited for a cold start
    assert credits.batches == 2.5
    for _ in range(64):
        credits.filled(0.5)
    credits.step(waited_share=0.5)  # starved while slots are empty
    assert credits.batches == pytest.approx(2.65)
    for _ in range(64):
        credits.filled(1.0)
    credits.step(waited_share=0.5)  # starved, but every slot is taken: credits are not what is missing
    assert credits.batches == pytest.approx(2.63)
    for _ in range(400):
        credits.step(waited_share=0.0)
    assert credits.batches == 1.0
    for _ in range(400):
        credits.filled(0.0)
        credits.step(waited_share=0.9)
    assert credits.batches == 9.0  # never beyond what the staleness bound admits


def test_automatic_credits_fall_by_what_goes_stale_and_rise_no_more_for_a_while():
    credits = Controller(make_rules(max_staleness=8, work_in_progress=None), prompts(), lambda entry: None).credits
    credits.step(1.0)
    credits.batches = 5.0
    for _ in range(64):
        credits.filled(0.5)
    credits.went_stale(1)
    credits.went_stale(2)
    credits.step(0.5)  # starved, slots are empty; but 3 groups of batches of 4 were made for nothing
    assert credits.batches == pytest.approx(5 - 3 / 4)
    falling = [credits.step(0.5) or credits.batches for _ in range(20)]
    turn = falling.index(min(falling))
    assert falling[: turn + 1] == pytest.approx([5 - 3 / 4 - 0.02 * (i + 1) for i in range(turn + 1)])
    assert 5 <= turn <= 15
    assert falling[-1] > falling[turn] + 0.15


def test_groups_that_a_streaming_trainer_has_accumulated_cost_no_credit():
    """Their work is done; the staleness rule counts them still."""

    def in_flight_at_most(streaming):
        world = World(make_rules(work_in_progress=2.0, batch_groups=8, max_staleness=4, steps=6), 1, 3, streaming)
        most = 0
        for _ in range(40):
            for action in (world.dispatch, world.finish, world.score):
                action()
            if streaming and world.steps == 0:
                world.controller.next_groups(1, 0)
            generating = world.controller.count(Stage.GENERATING) + world.controller.count(Stage.SCORING)
            most = max(most, generating + world.controller.count(Stage.QUEUED) + world.controller.count(Stage.TRAINING))
        return most

    assert in_flight_at_most(False) == 16
    assert 16 < in_flight_at_most(True) <= 16 + 8


def test_the_first_wave_is_let_out_gradually():
    world = World(make_rules(batch_groups=8, work_in_progress=2.0), engines=1, seed=7)
    started = []
    for share in (0.0, 0.25, 0.5, 1.0):
        world.controller.launched(share)
        world.dispatch()
        started.append(len(world.work))
    assert started == [1, 4, 8, 16]


def test_one_step_off_waits_for_the_oldest_instead_of_dropping_them():
    """Of two batches in flight the second one's groups finish first, as short ones do."""

    def fates(wait):
        rules = make_rules(max_staleness=1, work_in_progress=2.0, steps=12, wait_for_oldest=wait)
        world = World(rules, engines=1, seed=11)
        for _ in range(4000):
            if world.steps >= rules.steps:
                break
            world.dispatch()
            newest = sorted(world.work, reverse=True)[: max(1, len(world.work) // 3)]
            kept = {key: job for key, job in world.work.items() if key not in newest}
            world.work = {key: world.work[key] for key in newest}
            world.finish()
            world.work |= kept
            for action in (world.score, world.train, world.refresh):
                action()
        assert world.steps == rules.steps
        return world.controller.ledger.fates()

    assert fates(wait=False)["stale"] > 0
    assert fates(wait=True)["stale"] == 0


def test_behind_a_minibatch_barrier_an_engine_gets_whole_minibatches_when_it_is_empty():
    world = World(make_rules(batch_groups=8, work_in_progress=4.0, max_staleness=8, minibatch_barrier=True), 2, seed=3)
    world.dispatch()
    sizes = [sum(job.engine == key for job in world.work.values()) for key in (0, 1)]
    assert sorted(sizes) == [1, 2]  # the first two minibatches


def test_without_staleness_nothing_starts_until_all_engines_have_the_new_weights():
    world = World(make_rules(max_staleness=0, work_in_progress=1.0), engines=2, seed=4)
    while world.steps < 1:
        for action in (world.dispatch, world.finish, world.score, world.train):
            action()
    controller = world.controller
    for key in (0, 1):
        assert controller.next_dispatch() is None
        assert controller.next_refresh() == key
        controller.refresh_started(key)
        assert controller.next_dispatch() is None
        controller.refresh_done(key, 1)
    world.dispatch()
    assert sorted(sum(job.engine == key for job in world.work.values()) for key in (0, 1)) == [2, 2]


def test_a_finished_response_frees_its_slot_and_sharpens_the_rest():
    rules = make_rules(group_size=4, max_concurrent_samples=4, batch_groups=8, max_new_tokens=100.0)
    world = World(rules, engines=1, seed=5)
    world.dispatch()
    (group_id,) = world.work
    engine, attempt = world.controller.engines[0], world.work[group_id].attempt
    pool = world.controller._pool
    pool._weigh_changed()
    before = engine.load
    world.controller.sample_finished(group_id, attempt, 40)  # four times what was predicted
    pool._weigh_changed()
    assert engine.samples == 3
    assert engine.load > before  # three long ones are more than four of 10 tokens
    assert world.controller.next_dispatch() is not None  # into the slot that is free
    assert world.controller.next_dispatch() is None


def test_several_batches_must_be_queued_before_the_first_of_them_is_trained():
    world = World(make_rules(require_batches=2, work_in_progress=3.0, steps=3), engines=1, seed=9)
    world.dispatch()
    while world.controller.count(Stage.QUEUED) < 7:
        world.finish()
        world.score()
        world.dispatch()
    assert world.controller.next_batch(1) is None
    while world.controller.count(Stage.QUEUED) < 8:
        world.finish()
        world.score()
        world.dispatch()
    world.train()
    world.train()
    assert world.steps == 2  # the second batch was there already
    world.drain()  # the last one needs no second


def test_too_many_refills_end_the_run_with_what_to_do():
    world = World(make_rules(dynamic_sampling=True, max_refills=1.0, work_in_progress=3.0), engines=1, seed=8)
    world.dispatch()
    while len(world.scoring) < 5:
        world.finish()
    with pytest.raises(RunError, match=r"control\.max_refills"):  # noqa: PT012
        for group_id in sorted(world.scoring):
            world.controller.scored(group_id, (1.0, 1.0))


def test_a_refreshing_engine_gets_no_work():
    controller = Controller(make_rules(), prompts(), lambda entry: None)
    controller.engine_joined(0, 0)
    controller.snapshot_published(1)
    controller.refresh_started(controller.next_refresh())
    assert controller.next_dispatch() is None
    controller.refresh_done(0, 1)
    assert controller.next_dispatch() is not None


def test_an_engine_whose_refresh_failed_tries_again_though_it_was_the_last():
    controller = Controller(make_rules(), prompts(), lambda entry: None)
    for key in range(8):  # two at a time
        controller.engine_joined(key, 0)
    controller.snapshot_published(1)
    for key in range(8):
        assert controller.next_refresh() == key
        controller.refresh_started(key)
        if key < 7:
            controller.refresh_done(key, 1)
    assert controller.next_refresh() is None
    controller.refresh_failed(7)
    assert controller.next_refresh() == 7


def test_a_held_engine_works_on_with_the_weights_that_it_has():
    controller = Controller(make_rules(), prompts(), lambda entry: None)
    controller.engine_joined(0, 0)
    controller.hold(0, True)
    controller.snapshot_published(1)
    assert controller.next_refresh() is None
    assert controller.next_dispatch() is not None
    controller.hold(0, False)
    assert controller.next_refresh() == 0


def test_the_same_batch_is_served_again_until_it_is_in_a_checkpoint():
    world = World(make_rules(), engines=1, seed=4)
    while world.steps < 2:
        world.dispatch()
        for action in (world.finish, world.score, world.train, world.refresh):
            action()
    again = world.controller.next_batch(1)
    assert [group.group_id for group in again.groups] == world.history[1]
    assert world.controller.step_trained(1) is None
    world.controller.checkpointed(1)
    with pytest.raises(RunError, match="asks for step 1"):
        world.controller.next_batch(1)


def test_ledger_refuses_a_second_fate_and_a_wrong_sum():
    world = World(make_rules(), engines=1, seed=5)
    world.dispatch()
    group_id = min(world.work)
    world.controller.refused(group_id, 1, "reason")
    with pytest.raises(LedgerError, match="second fate"):
        world.controller.ledger.settle(world.entries[0])
    with pytest.raises(LedgerError, match="held in flight"):
        world.controller.ledger.check(len(world.controller.groups) + 1)


def test_events_out_of_order_are_refused():
    controller = Controller(make_rules(), prompts(), lambda entry: None)
    with pytest.raises(RunError, match="reports step 1"):
        controller.step_trained(1)
    with pytest.raises(RunError, match="version 2 was published after 0"):
        controller.snapshot_published(2)
