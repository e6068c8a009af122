"""Held-out prompts during training: which versions, by whom, and that the engine keeps them meanwhile."""

import asyncio

import pytest

from forebay.config import RunConfig, parse_config
from forebay.control.types import EngineFailure, Sample, VersionSpan
from forebay.data.schema import Row
from forebay.errors import DataError, UserError
from forebay.evaluation.during import AT_ONCE, HeldOut
from tests.unit.test_control_unit import StubEngine, StubFleet, build, drive

ROWS = [Row(f"p{i}", (), f"prompt {i}", (i,), "null", "here", "choice") for i in range(40)]


class Engine(StubEngine):
    """Answers greedily, slowly enough for newer weights to be published meanwhile."""

    running = most = 0
    pace_s = 0.0

    async def generate(self, *arguments):
        await asyncio.sleep(self.pace_s)
        return await super().generate(*arguments)

    async def greedy(self, prompt_ids, max_tokens, images=()):
        self.running += 1
        self.most = max(self.most, self.running)
        version = self.version
        await asyncio.sleep(0.01)
        self.running -= 1
        spans = [VersionSpan(version, 0, 1)] + [VersionSpan(self.version, 1, 2)] * (self.version != version)
        return Sample((prompt_ids[0], 1), (-0.1, -0.1), tuple(spans), "stop")


class Hanging(Engine):
    async def greedy(self, *_):
        await asyncio.sleep(60)


class Scorer:
    async def score(self, responses, answer, prompt, verifier, *, counted):
        assert (verifier, counted) == ("choice", False)
        if responses[0][0][0] == 3:
            raise DataError("no number in the answer")
        return [float(responses[0][0][0] % 2)]


def config(**evaluation):
    return RunConfig.model_validate({"evaluation": {"every_versions": 2, **evaluation}})


def held_out(engines, told, **evaluation):
    return HeldOut(ROWS, config(**evaluation), engines, Scorer(), told.append)


def test_every_second_version_is_due_once():
    examination = held_out([], [])
    assert [version for version in (0, 1, 2, 2, 3, 4, 0) if examination.is_due(version)] == [0, 2, 4]
    assert not held_out([], [], every_versions=0).is_due(0)
    assert not HeldOut([], config(), [], Scorer(), print).is_due(0)


def test_the_result_counts_what_could_be_scored():
    told, engine = [], Engine()
    asyncio.run(held_out([engine], told).examine(0, 0))
    assert told[0] | {"seconds": 0} == {
        "version": 0, "engine": 0, "prompts": 39, "left_out": 1, "reward_mean": 19 / 39, "tokens": 80, "seconds": 0
    }  # fmt: skip
    assert engine.most == AT_ONCE


def test_an_answer_of_another_version_is_no_result():
    told, engine = [], Engine()
    engine.version = 1
    asyncio.run(held_out([engine], told).examine(0, 0))
    assert told[0]["given_up"] == "engine 0 answered with version 1, not 0"
    assert "reward_mean" not in told[0]


def test_what_breaks_or_hangs_is_given_up_with_its_reason():
    class Broken(Engine):
        async def greedy(self, *_):
            raise EngineFailure("engine 0: connection reset")

    told = []
    asyncio.run(held_out([Broken()], told).examine(0, 0))
    asyncio.run(held_out([Hanging()], told, timeout_s=0.05).examine(0, 0))
    assert [one["given_up"] for one in told] == [
        "engine 0: connection reset",
        "not done within 0.05 s (evaluation.timeout_s)",
    ]


def test_after_a_failure_nothing_is_asked_any_more():
    class Dying(Engine):
        asked = 0

        async def greedy(self, *arguments):
            self.asked += 1
            if self.asked == 3:
                raise EngineFailure("engine 0: connection reset")
            return await super().greedy(*arguments)

    async def go():
        engine = Dying()
        await held_out([engine], []).examine(0, 0)
        await asyncio.sleep(0.05)
        return engine.asked

    assert asyncio.run(go()) <= AT_ONCE + 1  # the place of the one that failed was taken


def test_the_engine_keeps_an_examined_version_and_trains_on(tmp_path):
    """Versions are published every few milliseconds here; an examination takes thirty of them."""
    told, fleet = [], StubFleet(2)
    fleet.engines[:] = [Engine(), Engine()]
    for engine in fleet.engines:
        engine.pace_s = 0.2
    unit = build(tmp_path, fleet)
    unit._examination = held_out(fleet.engines, told)
    drive(unit)
    assert unit.controller.ledger.fates()["trained"] == 20
    assert [one["version"] for one in told if "given_up" not in one][:2] == [0, 2]
    assert all(one.get("given_up", "the run ended before") == "the run ended before" for one in told)


def test_an_examination_that_the_run_outruns_says_so(tmp_path):
    told, fleet = [], StubFleet(2)
    fleet.engines[:] = [Hanging(), Engine()]
    unit = build(tmp_path, fleet)
    unit._examination = held_out(fleet.engines, told)
    drive(unit)
    assert unit.controller.ledger.fates()["trained"] == 20
    assert [one["given_up"] for one in told if one["engine"] == 0] == ["the run ended before"]


def test_asking_for_validation_prompts_that_are_none_is_refused():
    with pytest.raises(UserError, match=r"evaluation.every_versions asks the validation prompts"):
        parse_config({"data": {"validation_prompts": 0}, "evaluation": {"every_versions": 1}}, "p")
