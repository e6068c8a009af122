"""The asyncio shell with stub engines, scorer and trainer: the two costly seams replaced, everything else real."""

import asyncio
import itertools
import socket

import httpx
import msgpack
import pyarrow.parquet as pq
import pytest

from forebay.control.controller import Controller, Rules
from forebay.control.recorder import Recorder
from forebay.control.server import control_app, serve
from forebay.control.types import EngineFailure, EngineLoad, Prompt, RefreshRecord, RequestRefused, Sample, VersionSpan
from forebay.control.unit import ControlUnit, Patience
from forebay.control.wire import SnapshotReport, StepReport
from forebay.errors import DataError, DeadlineError, RunError

STEPS = 5


class StubEngine:
    def __init__(self):
        self.version = 0
        self.calls = 0
        self.seeds = []
        self.prefixes = []
        self.fail_on = set()
        self.refuse = set()
        self.hang = False
        self.slow = set()
        self.modes = []

    async def generate(self, prompt_ids, prefixes, seed, on_finished=None, images=()):
        self.calls += 1
        self.seeds.append(seed)
        self.prefixes.append(prefixes)
        if self.hang:
            await asyncio.sleep(60)
        if self.calls in self.slow:
            await asyncio.sleep(60)
        if self.calls in self.fail_on:
            partial = Sample((4,), (-0.5,), (VersionSpan(self.version, 0, 1),), None)
            raise EngineFailure("engine 0: connection reset", [partial, *prefixes[1:]])
        if tuple(prompt_ids) in self.refuse:
            raise RequestRefused("the prompt is too long")
        version = self.version
        await asyncio.sleep(0.001)
        return [Sample((4, 1), (-0.5, -0.1), (VersionSpan(version, 0, 2),), "stop") for _ in prefixes]

    def load(self):
        return EngineLoad(self.calls, 0, 0, 0)

    async def refresh(self, snapshot, mode):
        self.modes.append(mode)
        self.version = snapshot.version
        return RefreshRecord(snapshot.version, 0.01, 7, 0)


class StubFleet:
    def __init__(self, count=1):
        self.engines = [StubEngine() for _ in range(count)]
        self.restarted = []
        self.healthy = False
        self.broken_restarts = 0

    async def in_order(self, index):
        return self.healthy

    async def restart(self, index):
        self.restarted.append(index)
        self.engines[index] = StubEngine()


class StubScorer:
    async def score(self, responses, answer, prompt, verifier):
        assert verifier == "boxed"
        if prompt == "bad":
            raise DataError("reward math: no number in the answer")
        return [float(i % 2) for i in range(len(responses))]


def prompts():
    for number in itertools.count():
        yield (Prompt(f"p{number}", (number,), "bad" if number == 3 else "good", "null", 5.0, "boxed"),)


def build(
    tmp_path, fleet, *, stall=30.0, restarts=2, deadline=None, first_wave_s=0.0, on_step=lambda record: None, **changes
):
    rules = Rules(STEPS, 4, 2, 1, 2, 2.0, 64, **changes)
    recorder = Recorder(tmp_path, on_step)
    controller = Controller(rules, prompts(), recorder.settled)
    patience = Patience(stall, stall, restarts, deadline, first_wave_s, backoff_s=0.0)
    return ControlUnit(controller, fleet, StubScorer(), recorder, seed=1, patience=patience)


def ledger(unit, tmp_path):
    unit._recorder.close()
    return pq.read_table(tmp_path / "ledger.parquet").to_pylist()


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
    rows = ledger(unit, tmp_path)
    assert sorted(row["group_id"] for row in rows) == list(range(21))
    assert [row["reason"] for row in rows if row["fate"] == "failed"] == ["reward math: no number in the answer"]
    trained = [row for row in rows if row["fate"] == "trained"]
    assert all(0 <= row["admitted_t"] <= row["finished_t"] <= row["settled_t"] for row in trained)
    assert all(row["staleness"] == row["trained_version"] - row["oldest_version"] <= 2 for row in trained)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    assert records[0]["step_time_s"] == pytest.approx(0.3)
    assert len(set(fleet.engines[0].seeds)) == fleet.engines[0].calls


def test_a_dead_engine_is_restarted_refreshed_and_its_groups_are_generated_again(tmp_path):
    fleet = StubFleet(2)
    fleet.engines[0].fail_on = {5}
    unit = build(tmp_path, fleet)
    drive(unit)
    assert fleet.restarted == [0]
    assert unit.controller.ledger.fates()["trained"] == 20
    assert unit.engine_restarts == 1
    assert max(row["attempts"] for row in ledger(unit, tmp_path)) >= 2
    again = [prefixes for engine in fleet.engines for prefixes in engine.prefixes if any(p.ids for p in prefixes)]
    assert again  # the token that was known before the failure is continued from
    assert fleet.engines[0].version >= 1  # brought up to date before it got work


def catch_up(tmp_path, outcomes):
    """An engine that was started anew loads what is newest; `outcomes` of its refreshes, each the error that it raises
    or None. While it loads, a newer version is published. Returns (version that it joined with, its fleet)."""
    fleet = StubFleet(1)
    fleet.healthy = True
    unit = build(tmp_path, fleet)
    left = list(outcomes)

    async def publish(version):
        await unit.snapshot_published(SnapshotReport(version=version, path="x", manifest_sha256="0" * 64))

    class Late(StubEngine):
        async def refresh(self, snapshot, mode):
            await publish(snapshot.version + 1) if left else None
            if left and (error := left.pop(0)) is not None:
                raise error
            return await super().refresh(snapshot, mode)

    async def restart(index):
        fleet.restarted.append(index)
        fleet.engines[index] = Late()

    async def go():
        fleet.restart = restart
        unit.controller.engine_joined(0, 0)
        await publish(1)
        await unit._recover(0, EngineFailure("engine 0 is dead"))

    asyncio.run(go())
    return unit.controller.engines[0].version, fleet


def test_a_snapshot_that_newer_ones_replace_while_a_new_engine_loads_it_costs_no_restart(tmp_path):
    gone = EngineFailure("snapshot v00000001 is refused: No such file or directory")
    version, fleet = catch_up(tmp_path, [gone, gone])
    assert (version, fleet.restarted) == (3, [0])


def test_a_new_engine_that_refuses_its_first_weights_is_started_again(tmp_path):
    version, fleet = catch_up(tmp_path, [RequestRefused("engine 0 refuses the request: nothing is staged")] * 3)
    assert (version, fleet.restarted) == (4, [0, 0])


class Looks:
    """An examination of the first version."""

    def __init__(self):
        self.seen = []

    def is_due(self, version):
        return version == 0

    async def examine(self, index, version):
        self.seen.append((index, version))


def test_an_engine_that_dies_just_before_its_examination_ends_no_run(tmp_path):
    fleet = StubFleet(2)
    unit = build(tmp_path, fleet)
    unit._examination = looks = Looks()
    real, lost = unit.controller.engine_joined, []

    def joined(index, version):
        real(index, version)
        if index == 1 and not lost:  # between the decision to examine engine 0 and the examination
            lost.append(unit.controller.engine_lost(0))

    unit.controller.engine_joined = joined
    drive(unit)
    assert (0, 0) in looks.seen
    assert unit.controller.ledger.fates()["trained"] == 20


def test_an_engine_that_is_to_be_examined_takes_no_newer_weights_before(tmp_path):
    unit = build(tmp_path, StubFleet())
    unit._examination = Looks()

    async def go():
        unit.controller.engine_joined(0, 0)
        unit._examine(0, 0)
        unit.controller.snapshot_published(1)
        assert unit.controller.next_refresh() is None
        await asyncio.sleep(0.01)
        assert unit.controller.next_refresh() == 0

    asyncio.run(go())


def test_a_failed_call_on_a_healthy_engine_costs_no_restart(tmp_path):
    fleet = StubFleet()
    fleet.healthy = True
    fleet.engines[0].fail_on = {2, 5}
    unit = build(tmp_path, fleet)
    drive(unit)
    assert fleet.restarted == []
    assert unit.controller.ledger.fates()["trained"] == 20


def test_a_straggler_past_its_deadline_is_made_afresh(tmp_path):
    fleet = StubFleet()
    fleet.engines[0].slow = {1}
    unit = build(tmp_path, fleet, deadline=0.2)
    drive(unit)
    rows = {row["group_id"]: row for row in ledger(unit, tmp_path)}
    assert (rows[0]["fate"], rows[0]["attempts"]) == ("trained", 2)


def test_engines_refresh_in_the_mode_of_the_rules(tmp_path):
    fleet = StubFleet(2)
    unit = build(tmp_path, fleet, refresh="drain", refresh_all=True)
    drive(unit)
    assert {mode for engine in fleet.engines for mode in engine.modes} == {"drain"}
    assert unit._recorder.tokens_recomputed == 7 * len(unit._recorder.pauses) > 0


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


@pytest.mark.parametrize(("dynamic", "reason"), [(False, "no number"), (True, "max_refills")])
def test_groups_that_all_come_to_nothing_end_the_run_with_the_reason(tmp_path, dynamic, reason):
    class Fruitless(StubScorer):
        async def score(self, responses, answer, prompt, verifier):
            if dynamic:
                return [1.0] * len(responses)
            raise DataError("no number in the answer")

    unit = build(tmp_path, StubFleet(), dynamic_sampling=dynamic, max_refills=10.0)
    unit._scorer = Fruitless()
    with pytest.raises(RunError, match=reason):
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
            assert (await client.post("/v1/checkpoints", content=msgpack.packb({"step": 3}))).status_code == 200
            again = await client.post("/v1/batches/next", content=msgpack.packb({"step": STEPS}))
            assert again.status_code == 200  # a trainer that died before it wrote the model does the step again
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


@pytest.mark.parametrize("path", ["/v1/batches/next", "/v1/steps", "/v1/snapshots", "/v1/checkpoints"])
@pytest.mark.parametrize("sent", [b"", b"\x81\xa4"], ids=["headers only", "a part of the body"])
def test_a_trainer_that_is_killed_in_the_middle_of_a_request_does_not_end_the_run(tmp_path, path, sent):
    unit = build(tmp_path, StubFleet())
    head = f"POST {path} HTTP/1.1\r\nHost: cu\r\nAuthorization: Bearer secret\r\nContent-Length: 7\r\n\r\n"

    async def go():
        held = socket.create_server(("127.0.0.1", 0))
        running = asyncio.create_task(unit.run(lambda: None))
        async with serve(control_app(unit, "secret"), held):
            _, writer = await asyncio.open_connection(*held.getsockname())
            writer.write(head.encode() + sent)
            await writer.drain()
            await asyncio.sleep(0.1)  # it has read what there is, and waits for the rest
            writer.close()
            await writer.wait_closed()
            await asyncio.sleep(0.1)  # it has seen that, too
            trainer = asyncio.create_task(stub_trainer(unit))
            await asyncio.wait_for(asyncio.gather(running, trainer), 20)

    asyncio.run(go())
    assert unit.controller.finished


def test_groups_stream_over_http_until_the_batch_is_complete(tmp_path):
    unit = build(tmp_path, StubFleet())

    async def go():
        running = asyncio.create_task(unit.run(lambda: None))
        transport = httpx.ASGITransport(control_app(unit, "secret"))
        async with httpx.AsyncClient(transport=transport, base_url="http://cu") as client:
            client.headers["authorization"] = "Bearer secret"
            for step in range(1, STEPS + 1):
                groups, complete = [], False
                while not complete:
                    body = msgpack.packb(dict(step=step, streaming=True, received=len(groups)))
                    chunk = msgpack.unpackb((await client.post("/v1/batches/next", content=body)).content)
                    groups += [group["group_id"] for group in chunk["groups"]]
                    complete = chunk["complete"]
                assert len(set(groups)) == 4
                report = msgpack.packb(dict(step=step, train_wait_s=0.1, train_s=0.1, publish_s=0.0, metrics={}))
                assert (await client.post("/v1/steps", content=report)).status_code == 200
                snapshot = msgpack.packb(dict(version=step, path="x", manifest_sha256="0" * 64))
                assert (await client.post("/v1/snapshots", content=snapshot)).status_code == 200
        await asyncio.wait_for(running, 5)

    asyncio.run(go())


def test_the_first_wave_is_let_out_over_its_time(tmp_path):
    fleet = StubFleet()
    unit = build(tmp_path, fleet, first_wave_s=0.6)
    calls = []

    async def go():
        fleet.engines[0].hang = True
        work = asyncio.create_task(unit.run(lambda: None))
        for _ in range(3):
            calls.append(fleet.engines[0].calls)
            await asyncio.sleep(0.3)
        calls.append(fleet.engines[0].calls)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    asyncio.run(go())
    assert calls[0] <= 1 < calls[1] < calls[3] == 8  # two batches of four, in the end


def test_an_engine_tells_of_each_response_and_the_controller_hears_of_it(tmp_path):
    fleet = StubFleet()
    unit = build(tmp_path, fleet)
    heard = []
    unit.controller.sample_finished = lambda *event: heard.append(event)

    class Telling(StubEngine):
        async def generate(self, prompt_ids, prefixes, seed, on_finished=None, images=()):
            on_finished(2)
            return await super().generate(prompt_ids, prefixes, seed, on_finished)

    fleet.engines[0] = Telling()
    drive(unit)
    assert sorted(group_id for group_id, *_ in heard) == list(range(21))
    assert {event[1:] for event in heard} == {(1, 2)}  # attempt, tokens
