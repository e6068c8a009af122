"""What the fleet makes of an engine that is started again; the server is a function, its process a stub."""

import asyncio

import httpx
import pytest

from forebay.config import parse_config
from forebay.control.types import EngineFailure, Snapshot
from forebay.errors import RunError
from forebay.generation import fleet as module
from forebay.generation.fleet import Fleet
from forebay.launch.cores import CorePlan
from forebay.run import RunContext
from tests.support.tiny_lm import make_start_model


class Process:
    def poll(self):
        return None

    def stop(self, grace_s):
        pass

    def log_tail(self, lines):
        return ""


def test_a_refresh_that_breaks_late_does_not_condemn_the_server_that_was_started_since(tmp_path, monkeypatch):
    """On a busy machine the new server may be there before the old one's calls are known to be broken."""
    values = {"storage": {"scratch": str(tmp_path)}, "generation": {"startup_timeout_s": 5.0}}
    run = RunContext.create(parse_config(values, "test"))
    monkeypatch.setattr(module, "start_engine", lambda *_: Process())
    swapping, broken, asked = asyncio.Event(), asyncio.Event(), []

    async def answer(request):
        if request.url.path == "/health":
            asked.append(request)
            broken.set()
            return httpx.Response(503 if len(asked) < 3 else 200)
        if b"forebay_refresh" in request.content:
            swapping.set()
            await broken.wait()
            raise httpx.ReadError("reset by peer")
        return httpx.Response(200, json={"results": ["staged"]})

    async def go():
        fleet = Fleet(run, make_start_model(tmp_path / "model"), CorePlan([None], None))
        fleet._take_ports()
        fleet._processes = [Process()]
        engine = fleet.engines[0]
        engine._http = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url=engine.url)
        refresh = asyncio.create_task(engine.refresh(Snapshot(1, "somewhere", "0" * 64), "retract"))
        await swapping.wait()
        await fleet.restart(0)
        with pytest.raises(EngineFailure, match="reset by peer"):
            await refresh
        await engine.health()
        await fleet._stop_all()

    asyncio.run(go())


def test_an_engine_that_does_not_start_again_is_not_tried_once_for_each_who_waits_for_it(tmp_path, monkeypatch):
    values = {"storage": {"scratch": str(tmp_path)}, "generation": {"max_restarts": 3}}
    run = RunContext.create(parse_config(values, "test"))
    starts = []

    async def broken(self, i):
        starts.append(i)
        raise RunError("engine-0 ended (exit code 1) while starting")

    async def go():
        fleet = Fleet(run, make_start_model(tmp_path / "model"), CorePlan([None], None))
        fleet._take_ports()
        monkeypatch.setattr(Fleet, "restart", broken)
        results = await asyncio.gather(*(fleet.revive(0) for _ in range(100)), return_exceptions=True)
        await fleet._stop_all()
        return results

    results = asyncio.run(go())
    assert all(isinstance(result, RunError) for result in results)
    assert starts == [0] * 3
    assert "no restart is left (generation.max_restarts: 3); see " in str(results[-1])


def test_a_start_ends_when_the_fleet_is_closed(tmp_path, monkeypatch):
    run = RunContext.create(parse_config({"storage": {"scratch": str(tmp_path)}}, "test"))
    monkeypatch.setattr(module, "start_engine", lambda *_: Process())

    async def go():
        fleet = Fleet(run, make_start_model(tmp_path / "model"), CorePlan([None], None))
        fleet._take_ports()
        start = asyncio.create_task(fleet._start(0))
        await asyncio.sleep(0.2)
        await fleet._stop_all()
        with pytest.raises(RunError, match="its fleet is closed"):
            await asyncio.wait_for(start, 5)

    asyncio.run(go())
