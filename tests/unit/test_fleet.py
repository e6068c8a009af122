"""What the fleet makes of an engine that is started again; the server is a function, its process a stub."""

import asyncio

import httpx
import pytest

from forebay.config import parse_config
from forebay.control.types import EngineFailure, Snapshot
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
