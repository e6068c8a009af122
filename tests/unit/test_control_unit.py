"""The asyncio shell with stub engines, scorer and trainer: the two costly seams replaced, everything else real."""

import asyncio
import itertools

import httpx
import msgpack
import pytest

from forebay.control.controller import Controller, Rules
from forebay.control.recorder import Recorder
from forebay.control.server import control_app
from forebay.control.types import EngineFailure, Fate, Prompt, RefreshRecord, RequestRefused, Sample, VersionSpan
from forebay.control.unit import ControlUnit
from forebay.control.wire import SnapshotReport, StepReport
from forebay.errors import DataError, DeadlineError, RunError

STEPS = 5


class StubEngine:
    def __init__(self):
        self.version = 0
        self.calls = 0
        self.seeds = []
        self.fail_on = set()
        self.refuse = set()
        self.hang = False

    async def generate(self, prompt_ids, n, seed):
        self.calls += 1
        self.seeds.append(seed)
        if self.hang:
            await asyncio.sleep(60)
        if self.calls in self.fail_on:
            raise EngineFailure("engine 0: connection reset")
        if tuple(prompt_ids) in self.refuse:
            raise RequestRefused("the prompt is too long")
        version = self.version
        await asyncio.sleep(0.001)
        return [Sample((4, 1), (-0.5, -0.1), (VersionSpan(version, 0, 2),), "stop") for _ in range(n)]

    async def refresh(self, snapshot):
        self.version = snapshot.version
        return RefreshRecord(snapshot.version, 0.01)


class StubFleet:
    def __init__(self, count=1):
        self.engines = [StubEngine() for _ in range(count)]
        self.restarted = []

    async def restart(self, index):
        self.restarted.append(index)
        self.engines[index] = StubEngine()


class StubScorer:
    async def score(self, responses, answer, prompt):
        if prompt == "bad":
            raise DataError("reward math: no number in the answer")
        return [float(i % 2) for i in range(len(responses))]


def prompts():
    for number in itertools.count():
        yield (Prompt(f"p{number}", (number,), "bad" if number == 3 else "good", "null", 5.0),)


def build(tmp_path, fleet, *, stall=30.0, restarts=2, on_step=lambda record: None, **changes):
    rules = Rules(STEPS, 4, 2, 1, 2, 2.0, 64, **changes)
    recorder = Recorder(tmp_path / "metrics.jsonl", on_step)
    controller = Controller(rules, prompts())
    return ControlUnit(
        controller,
        fleet,
        StubScorer(),
        recorder,
        seed=1,
        stall_timeout_s=stall,
        step_timeout_s=stall,
        max_restarts=restarts,
    )


async def stub_trainer(unit):
    for step in range(1, STEPS + 1):
        while (batch := await unit.next_batch(step)) is None:
            assert not unit.is_over
        assert len(batch.groups) == 4
        await unit.step_trained(
            StepReport(step=step, train_wait_s=0.1, train_s=0.2, publish_s=0.0, metrics={"loss": 1})
        )
        await unit.snapshot_published(SnapshotReport(version=step, path="x", manifest_sha256="0" * 64))


def drive(unit, *, trainer=True):
    async def go():
        work = asyncio.create_task(stub_trainer(unit)) if trainer else None
        try:
            await asyncio.wait_for(unit.run(lambda: None), 20)
            if work:
                await work
        finally:
            if work:
                work.cancel()

    asyncio.run(go())


def test_a_run_trains_every_step_and_accounts_for_a_bad_row(tmp_path):
    records = []
    fleet = StubFleet()
    unit = build(tmp_path, fleet, on_step=records.append)
    drive(unit)
    fates = unit.controller.ledger.fates()
    assert fates == {"admitted": 21, "trained": 20, "filtered": 0, "stale": 0, "failed": 1, "in_flight": 0}
    failed = [entry for entry in unit.controller.ledger.entries if entry.fate is Fate.FAILED]
    assert failed[0].reason == "reward math: no number in the answer"
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    assert records[0]["step_time_s"] == pytest.approx(0.3)
    assert len(set(fleet.engines[0].seeds)) == fleet.engines[0].calls


def test_a_dead_engine_is_restarted_refreshed_and_its_groups_are_generated_again(tmp_path):
    fleet = StubFleet(2)
    fleet.engines[0].fail_on = {7}
    unit = build(tmp_path, fleet)
    drive(unit)
    assert fleet.restarted == [0]
    assert unit.controller.ledger.fates()["trained"] == 20
    assert max(entry.attempts for entry in unit.controller.ledger.entries) >= 2


def test_nothing_is_started_once_the_run_is_over(tmp_path):
    fleet = StubFleet()
    unit = build(tmp_path, fleet)

    async def go():
        training = asyncio.create_task(stub_trainer(unit))
        await unit.run(lambda: None)
        await training  # its last snapshot comes when the last step has ended the run
        await asyncio.sleep(0.05)
        assert not unit._tasks

    asyncio.run(go())
    assert fleet.restarted == []


@pytest.mark.parametrize(("dynamic", "reason"), [(False, "no number"), (True, "all rewards are equal")])
def test_groups_that_all_come_to_nothing_end_the_run_with_the_reason(tmp_path, dynamic, reason):
    class Fruitless(StubScorer):
        async def score(self, responses, answer, prompt):
            if dynamic:
                return [1.0] * len(responses)
            raise DataError("no number in the answer")

    unit = build(tmp_path, StubFleet(), dynamic_sampling=dynamic)
    unit._scorer = Fruitless()
    with pytest.raises(RunError, match=f"64 groups in a row.*{reason}"):
        drive(unit)


def test_too_many_restarts_end_the_run_with_the_reason(tmp_path):
    fleet = StubFleet()
    fleet.engines[0].fail_on = {3}
    with pytest.raises(RunError, match=r"no restart is left \(generation.max_restarts\): engine 0: connection reset"):
        drive(build(tmp_path, fleet, restarts=0))


def test_a_refused_prompt_fails_once_and_is_replaced(tmp_path):
    fleet = StubFleet()
    fleet.engines[0].refuse = {(0,)}
    unit = build(tmp_path, fleet)
    drive(unit)
    fates = unit.controller.ledger.fates()
    assert (fates["failed"], fates["trained"]) == (2, 20)


@pytest.mark.parametrize(("hang", "culprit"), [(True, "are being generated by engines"), (False, "has not asked for")])
def test_a_run_without_progress_ends_and_names_the_culprit(tmp_path, hang, culprit):
    fleet = StubFleet()
    fleet.engines[0].hang = hang
    with pytest.raises(DeadlineError, match=culprit):
        drive(build(tmp_path, fleet, stall=0.5), trainer=False)


def test_a_dead_trainer_ends_the_run(tmp_path):
    def dead():
        raise RunError("the trainer ended early (exit code 1): out of memory")

    with pytest.raises(RunError, match="out of memory"):
        asyncio.run(asyncio.wait_for(build(tmp_path, StubFleet()).run(dead), 20))


def test_http_needs_the_token_and_speaks_msgpack(tmp_path):
    unit = build(tmp_path, StubFleet())

    async def go():
        running = asyncio.create_task(unit.run(lambda: None))
        transport = httpx.ASGITransport(control_app(unit, "secret"))
        async with httpx.AsyncClient(transport=transport, base_url="http://cu") as client:
            for method, path in (
                ("POST", "/v1/batches/next"),
                ("POST", "/v1/steps"),
                ("POST", "/v1/snapshots"),
                ("GET", "/v1/status"),
            ):
                assert (await client.request(method, path)).status_code == 401
                wrong = await client.request(method, path, headers={"authorization": "Bearer wrong"})
                assert wrong.status_code == 401
            client.headers["authorization"] = "Bearer secret"
            assert (await client.get("/v1/status")).json()["steps"] == STEPS
            bad = await client.post("/v1/batches/next", content=b"\xc1")
            assert bad.status_code == 400
            assert "malformed BatchRequest" in bad.json()["reason"]
            early = await client.post(
                "/v1/steps", content=msgpack.packb(dict(step=3, train_wait_s=0, train_s=0, publish_s=0, metrics={}))
            )
            assert early.status_code == 400
            for step in range(1, STEPS + 1):
                answer = await client.post("/v1/batches/next", content=msgpack.packb({"step": step}))
                batch = msgpack.unpackb(answer.content)
                assert (batch["step"], batch["version"], len(batch["groups"])) == (step, step - 1, 4)
                report = msgpack.packb(dict(step=step, train_wait_s=0.1, train_s=0.1, publish_s=0.0, metrics={}))
                for _ in range(2):  # a repeated report counts once
                    assert (await client.post("/v1/steps", content=report)).status_code == 200
                snapshot = msgpack.packb(dict(version=step, path="x", manifest_sha256="0" * 64))
                for _ in range(2):
                    assert (await client.post("/v1/snapshots", content=snapshot)).status_code == 200
            over = await client.post("/v1/batches/next", content=msgpack.packb({"step": STEPS + 1}))
            assert over.status_code == 410
        await asyncio.wait_for(running, 5)

    asyncio.run(go())


def test_a_bug_in_a_handler_ends_the_run_instead_of_starving_the_trainer(tmp_path):
    unit = build(tmp_path, StubFleet())
    unit.controller.next_batch = None  # calling it raises TypeError

    async def go():
        running = asyncio.create_task(unit.run(lambda: None))
        await asyncio.sleep(0)
        transport = httpx.ASGITransport(control_app(unit, "secret"), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://cu") as client:
            client.headers["authorization"] = "Bearer secret"
            answer = await client.post("/v1/batches/next", content=msgpack.packb({"step": 1}))
            assert answer.status_code == 500
        with pytest.raises(TypeError):
            await asyncio.wait_for(running, 5)

    asyncio.run(go())
