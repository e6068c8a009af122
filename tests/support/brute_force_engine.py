"""Engines and runs simulated token by token, as plainly as it can be said: the reference for `forebay.simulation`."""

import math
from dataclasses import dataclass, field, replace
from itertools import groupby

from forebay.control.controller import Controller
from forebay.control.source import scheduled
from forebay.control.types import Prompt, Sample, VersionSpan


@dataclass
class Request:
    """A response that is asked for. `group`: those of one group share the computation of their prompt."""

    at: float
    group: int
    prompt: int
    length: int


@dataclass
class Refresh:
    """New weights that are there from `at` on, or from when the ones before are served."""

    at: float
    mode: str
    version: int


@dataclass(eq=False)
class Outcome:
    tokens: list[tuple[int, bool]] = field(default_factory=list)
    """(version, computed over a cache of other versions) of each token."""
    ended: float | None = None
    """When it was complete; None if it was aborted."""


@dataclass(eq=False)
class _Response:
    request: Request
    outcome: Outcome
    computed_before: bool = False
    over_old_cache: bool = False
    padding: int = 0

    @property
    def cached(self):
        return self.request.prompt + len(self.outcome.tokens) + self.padding

    @property
    def missing(self):
        return self.request.length - len(self.outcome.tokens)


class BruteForceEngine:
    def __init__(self, *, a, b, c, slots, kv_tokens, prefill_s, pause_s, padded, requests, refreshes):
        self.a, self.b, self.c, self.slots, self.kv_tokens = a, b, c, slots, kv_tokens
        self.prefill_s, self.pause_s, self.padded = prefill_s, pause_s, padded
        self.time, self.version, self.preempted, self.recomputed = 0.0, 0, 0, 0
        self.outcomes = [Outcome() for _ in requests]
        self.coming = [_Response(r, o) for r, o in zip(requests, self.outcomes, strict=True)]
        self.waiting, self.running, self.prompts_computed = [], [], set()
        self.refreshes, self.answered = list(refreshes), 0.0

    def run(self):
        """Until everything that was asked for is done."""
        while self.coming or self.waiting or self.running or self.refreshes:
            self.give_up()
            while self.take():
                pass
            if self.running:
                self.decode()
            else:
                upcoming = [r.request.at for r in self.coming[:1]]
                upcoming += [max(r.at, self.answered) for r in self.refreshes[:1]]
                if upcoming:
                    self.time = max(self.time, min(upcoming))
        return self.outcomes

    def decode(self):
        cached = sum(response.cached for response in self.running)
        self.time += self.a + self.b * len(self.running) + self.c * cached
        for response in self.running:
            if response.missing:
                response.outcome.tokens.append((self.version, response.over_old_cache))
            else:
                response.padding += 1

    def give_up(self):
        """Between two decode steps, first: responses end, or lose their cache."""
        ended = self.finish()
        while len(self.running) > 1 and not self.padded and self.needed_next() > self.kv_tokens:
            youngest = self.running.pop()
            self.preempted += youngest.cached
            youngest.computed_before = True
            self.waiting.insert(0, youngest)
        return ended

    def take(self):
        """Then: new weights, new responses. Whether that took time, in which more may have come."""
        before, left = self.time, len(self.refreshes)
        while self.coming and self.coming[0].request.at <= before:
            self.waiting.append(self.coming.pop(0))
        if self.refreshes and max(self.refreshes[0].at, self.answered) <= before:
            self.swap()
        self.admit()
        return self.time > before or len(self.refreshes) < left

    def needed_next(self):
        return sum(response.cached + 1 for response in self.running)

    def finish(self):
        if self.padded and any(response.missing for response in self.running):
            return []
        ended = [response for response in self.running if not response.missing]
        for response in ended:
            response.outcome.ended = self.time
            self.running.remove(response)
        return ended

    def swap(self):
        mode, version = self.refreshes[0].mode, self.refreshes[0].version
        if mode == "drain" and (self.running or self.waiting):
            return
        del self.refreshes[0]
        if mode == "abort":
            self.running, self.waiting = [], []
        self.version = version
        self.time += self.pause_s
        self.answered = self.time
        for response in self.running:
            response.over_old_cache = mode == "in_place"
            if mode == "retract":
                self.recomputed += response.cached
                self.time += self.prefill_s * response.cached

    def admit(self):
        if self.padded:
            self.admit_static_batch()
            return
        while self.waiting and len(self.running) < self.slots:
            candidate = self.waiting[0]
            if self.running and self.needed_next() + candidate.cached + 1 > self.kv_tokens:
                break
            self.start(self.waiting.pop(0))

    def admit_static_batch(self):
        batch = []
        while not self.running and self.waiting and len(batch) < self.slots:
            larger = [*batch, self.waiting[0]]
            rectangle = sum(r.cached for r in larger) + len(larger) * max(r.missing for r in larger)
            if batch and rectangle > self.kv_tokens:
                break
            batch.append(self.waiting.pop(0))
        for response in batch:
            self.start(response)

    def start(self, response):
        response.over_old_cache = False
        if response.computed_before:
            cost = response.cached
            self.recomputed += cost
        else:
            cost = 0 if response.request.group in self.prompts_computed else response.request.prompt
        self.prompts_computed.add(response.request.group)
        self.time += self.prefill_s * cost
        self.running.append(response)


class BruteForceRun:
    """A whole run with the real controller, its engines going on one decode step at a time. Whole batches; every group
    teaches; rewards take no time."""

    def __init__(self, scenario):
        self.scenario, self.rules = scenario, scenario.rules
        model = {name: getattr(scenario.engine, name) for name in scenario.engine.__dataclass_fields__}
        self.engines = [BruteForceEngine(**model, requests=[], refreshes=[]) for _ in range(scenario.engines)]
        self.boundaries = [math.inf] * scenario.engines
        self.groups = {}  # id -> (group, its outcomes, those of them that have not ended)
        self.now, self.trainer_free, self.batch = 0.0, math.inf, None
        self.trainer_asked = self.trainer_began = 0.0
        self.answers = {}  # engine -> (when it serves the version, the version)
        order = [[tuple(self.prompt(row) for row in part) for part in batch] for batch in scenario.order]
        unending = replace(self.rules, steps=self.rules.steps + 1000)
        self.controller = Controller(unending, scheduled(order, scenario.seed), lambda entry: None)

    def prompt(self, row):
        tokens = int(self.scenario.workload.prompt_tokens[row])
        return Prompt(str(row), tuple(range(tokens)), "", "", float(self.scenario.workload.predicted[row]))

    def run(self):
        """The ends of the steps."""
        ends = []
        for key in range(len(self.engines)):
            self.controller.engine_joined(key, 0)
        self.wake()
        while len(ends) < self.rules.steps:
            self.now, what, key = min(
                (self.trainer_free, "trained", 0),
                *((when, "answered", key) for key, (when, _) in self.answers.items()),
                *((when, "boundary", key) for key, when in enumerate(self.boundaries)),
            )
            if what == "trained":
                ends.append(self.now)
                self.trained()
            elif what == "answered":
                self.controller.refresh_done(key, self.answers.pop(key)[1])
                self.wake()
            else:
                self.boundary(key)
        return ends

    def trained(self):
        waited = (self.trainer_began - self.trainer_asked) / (self.now - self.trainer_asked)
        self.controller.step_trained(self.batch.step, waited)
        self.trainer_free, self.batch, self.trainer_asked = math.inf, None, self.now
        self.pump()
        if self.controller.steps_trained % self.rules.sync_every == 0:
            self.controller.snapshot_published(self.controller.published + 1)
        self.wake()

    def boundary(self, key):
        engine = self.engines[key]
        engine.time, refreshes = max(engine.time, self.now), len(engine.refreshes)
        ended, changed = engine.give_up(), engine.take()
        if len(engine.refreshes) < refreshes:
            self.answers[key] = (engine.answered, self.answers[key][1])
        complete = []
        for response in ended:
            group, outcomes, unfinished = self.groups[response.request.group]
            unfinished.remove(response.outcome)
            if not unfinished:
                complete.append((group, outcomes))
            else:
                self.controller.sample_finished(group.group_id, group.attempts, len(response.outcome.tokens))
        for group, outcomes in complete:
            self.controller.generated(group.group_id, group.attempts, tuple(sample(outcome) for outcome in outcomes))
            self.pump()
            self.controller.scored(group.group_id, (1.0,) + (0.0,) * (group.size - 1))
            self.wake()
        self.pump()
        self.boundaries[key] = engine.time
        if not changed and not engine.coming:
            self.boundaries[key] = min((refresh.at for refresh in engine.refreshes), default=math.inf)
            if engine.running:
                engine.decode()
                self.boundaries[key] = engine.time

    def pump(self):
        while (dispatch := self.controller.next_dispatch()) is not None:
            engine = self.engines[dispatch.engine]
            for group in dispatch.groups:
                lengths = self.scenario.workload.lengths[int(group.prompt.prompt_id)]
                outcomes = [Outcome() for _ in lengths]
                self.groups[group.group_id] = group, outcomes, list(outcomes)
                for length, outcome in zip(lengths, outcomes, strict=True):
                    request = Request(self.now, group.group_id, len(group.prompt.ids), int(length))
                    engine.coming.append(_Response(request, outcome))
            self.call(dispatch.engine, self.now)
        while (key := self.controller.next_refresh()) is not None:
            self.controller.refresh_started(key)
            version, at = self.controller.published, self.now + self.scenario.refresh_s
            self.answers[key] = (math.inf, version)
            self.engines[key].refreshes.append(Refresh(at, self.rules.refresh, version))
            self.call(key, at)

    def call(self, key, when):
        """An engine that does nothing has to look."""
        if not self.engines[key].running:
            self.boundaries[key] = min(self.boundaries[key], max(when, self.engines[key].time))

    def wake(self):
        self.pump()
        if self.batch is None:
            self.batch = self.controller.next_batch(self.controller.steps_trained + 1)
            if self.batch is not None:
                groups, trainer = self.batch.groups, self.scenario.trainer
                tokens = sum(len(s.ids) + len(group.prompt.ids) for group in groups for s in group.samples)
                publish = trainer.publish_s if self.batch.step % self.rules.sync_every == 0 else 0.0
                self.trainer_began = self.now
                self.trainer_free = self.now + trainer.per_token_s * tokens + trainer.fixed_s + publish
            self.pump()


def sample(outcome):
    spans, ids = [], range(len(outcome.tokens))
    for (version, stale), places in groupby(ids, key=lambda place: outcome.tokens[place]):
        together = list(places)
        spans.append(VersionSpan(version, together[0], together[-1] + 1, stale))
    return Sample(ids, ids, tuple(spans), "stop")
