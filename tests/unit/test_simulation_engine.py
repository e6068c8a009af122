"""The virtual engine against one that is simulated token by token."""

import math
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.control.groups import Group, Stage
from forebay.simulation.engine import Engine
from forebay.simulation.model import EngineModel
from forebay.simulation.responses import Job
from tests.support.brute_force_engine import BruteForceEngine, Refresh, Request

MODES = ("retract", "in_place", "abort", "drain")


def job_of(request, lengths):
    count = len(lengths)
    group = Group(request.group, None, count, Stage.GENERATING)
    wholes, moments = [range(length) for length in lengths], array("q", [0] * count)
    return Job(group, 1, request.prompt, wholes, group.prefixes, moments, count)


def play(model, requests, refreshes):
    """Drive an engine through the same story; (when each response ended or None, its sample, the engine)."""
    engine = Engine(model)
    jobs, responses, ended, samples = {}, [], [None] * len(requests), {}
    for request in requests:
        lengths = [other.length for other in requests if other.group == request.group]
        job = jobs.setdefault(request.group, job_of(request, lengths))
        responses.append((job, sum(other is job for other, _ in responses)))
    coming, pending, answered, refreshing = list(range(len(requests))), list(refreshes), 0.0, False
    while True:
        events = [(engine.due, 2)]
        if coming:
            events.append((requests[coming[0]].at, 0))
        if pending and not refreshing:
            events.append((max(pending[0].at, answered), 1))
        now, kind = min(events)
        if now == math.inf:
            break
        if kind == 0:
            together = [place for place in coming if requests[place].at == now]
            coming = coming[len(together) :]
            engine.submit(now, [responses[place] for place in together])
        elif kind == 1:
            refresh = pending.pop(0)
            engine.refresh(now, refresh.mode, refresh.version)
            refreshing = True
        else:
            for response in engine.fire():
                ended[responses.index(response)] = now
                job = response[0]
                job.unfinished -= 1
                if not job.unfinished:
                    samples[job] = engine.samples(job)
            if engine.swap is not None:
                refreshing, answered = False, engine.swap.answered
                samples |= engine.swap.aborted
    return ended, [samples[job][place] for job, place in responses], engine


def moments(least, most, root):
    """Irrational, so that nothing comes at the very end of a decode step, when rounding would say what is first."""
    return st.integers(least, most).map(lambda number: number * math.sqrt(root) / 1000)


@st.composite
def stories(draw, padded=False):
    longest, prompt = 40, 12
    slots = draw(st.integers(1, 6))
    tight = draw(st.booleans())
    model = EngineModel(
        a=draw(st.integers(1, 100)) / 1000,
        b=draw(st.integers(0, 10)) / 1000,
        c=draw(st.sampled_from([0.0, 1e-5, 1e-3])),
        slots=slots,
        kv_tokens=draw(st.integers(longest + prompt, 4 * longest)) if tight else math.inf,
        prefill_s=draw(st.sampled_from([0.0, 1e-4, 1e-2])),
        pause_s=draw(st.sampled_from([0.0, 0.05, 1.0])),
        padded=padded,
    )
    requests, now = [], 0.0
    for group in range(draw(st.integers(1, 6))):
        tokens = draw(st.integers(0, prompt))
        for length in draw(st.lists(st.integers(1, longest), min_size=1, max_size=4)):
            requests.append(Request(now, group, tokens, length))
        now += draw(moments(0, 1000, root=2))
    published = sorted(draw(st.lists(moments(1, 3000, root=3), max_size=3)))
    return (
        model,
        requests,
        [Refresh(at, draw(st.sampled_from(MODES)), version + 1) for version, at in enumerate(published)],
    )


def versions(sample):
    return [(span.version, span.stale_cache) for span in sample.versions for _ in range(span.start, span.end)]


def check(story):
    model, requests, refreshes = story
    ended, samples, engine = play(model, requests, refreshes)
    brute = BruteForceEngine(
        **{name: getattr(model, name) for name in model.__dataclass_fields__}, requests=requests, refreshes=refreshes
    )
    for mine, sample, reference in zip(ended, samples, brute.run(), strict=True):
        if reference.ended is None:
            assert mine is None
        else:
            assert mine == pytest.approx(reference.ended, rel=1e-9)
        assert versions(sample) == reference.tokens
        assert (sample.finish_reason == "stop") == (reference.ended is not None)
    usage = engine.account(engine.time)
    assert (usage.preempted, usage.recomputed) == (brute.preempted, brute.recomputed)
    assert engine.load().tokens == sum(len(outcome.tokens) for outcome in brute.outcomes)


@settings(max_examples=400, deadline=None)
@given(stories())
def test_times_tokens_and_versions_are_those_of_a_token_by_token_simulation(story):
    check(story)


@settings(max_examples=150, deadline=None)
@given(stories(padded=True))
def test_static_batches_too(story):
    check(story)
