"""The Control Unit's HTTP face. Every route needs the run's token; bodies are msgpack, answers msgpack or JSON.

Bound to the profile's host (loopback by default). Routes: see `wire.py`; for people and probes `GET /v1/status` (JSON)
and `GET /v1/metrics` (Prometheus's text format).
"""

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import AsyncIterator

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from forebay.control.unit import ControlUnit
from forebay.control.wire import (
    MEDIA_TYPE,
    BatchRequest,
    CheckpointReport,
    SnapshotReport,
    StepReport,
    pack_batch,
    unpack,
)
from forebay.errors import DeadlineError, ForebayError
from forebay.telemetry.prometheus import CONTENT_TYPE, exposition

START_TIMEOUT_S = 30.0
CLIENT_GONE = 499
"""What proxies call a request whose client left before it was whole; nobody reads the answer."""


def control_app(unit: ControlUnit, token: str) -> FastAPI:
    """The application; without the token every route answers 401."""

    def authorised(request: Request) -> None:
        given = request.headers.get("authorization", "")
        if not secrets.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise HTTPException(401, "the run's token is missing or wrong")

    app = FastAPI(dependencies=[Depends(authorised)], docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(ForebayError)
    async def refused(_: Request, error: ForebayError) -> JSONResponse:
        return JSONResponse({"reason": str(error)}, status_code=400)

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_GONE)  # a trainer that is killed asks again once it is back

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> JSONResponse:
        unit.fail(error)
        return JSONResponse({"reason": "the Control Unit is broken"}, status_code=500)

    @app.post("/v1/batches/next")
    async def next_batch(request: Request) -> Response:
        message = unpack(BatchRequest, await request.body())
        if unit.refuses(message.step):
            return JSONResponse({"reason": "the run is over"}, status_code=410)
        if message.streaming:
            chunk = await unit.next_groups(message.step, message.received)
        else:
            batch = await unit.next_batch(message.step)
            chunk = None if batch is None else (batch, True)
        return Response(status_code=204) if chunk is None else Response(pack_batch(*chunk), media_type=MEDIA_TYPE)

    @app.post("/v1/steps")
    async def step(request: Request) -> dict[str, bool]:
        await unit.step_trained(unpack(StepReport, await request.body()))
        return {"ok": True}

    @app.post("/v1/snapshots")
    async def snapshot(request: Request) -> dict[str, bool]:
        await unit.snapshot_published(unpack(SnapshotReport, await request.body()))
        return {"ok": True}

    @app.post("/v1/checkpoints")
    async def checkpoint(request: Request) -> dict[str, bool]:
        unit.checkpointed(unpack(CheckpointReport, await request.body()))
        return {"ok": True}

    @app.get("/v1/status")
    async def status() -> JSONResponse:
        return JSONResponse(unit.status())

    @app.get("/v1/metrics")
    async def metrics() -> Response:
        return Response(exposition(unit.status()), media_type=CONTENT_TYPE)

    return app


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: signals belong to the run's owner."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


@contextlib.asynccontextmanager
async def serve(app: FastAPI, held: socket.socket) -> AsyncIterator[None]:
    """Serve in this event loop on a socket that is bound already, so that nobody can take the port first."""
    # Errors end the run and are told by its owner; what uvicorn would log is the same, or a shutdown's cancellations.
    server = _Server(uvicorn.Config(app, log_level="critical", access_log=False, lifespan="off"))
    held.listen()
    task = asyncio.create_task(server.serve(sockets=[held]))
    try:
        await _started(server, task)
        yield
    finally:
        server.should_exit = server.force_exit = True
        await task


async def _started(server: uvicorn.Server, task: "asyncio.Task[None]") -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not server.started:
        if task.done():
            await task
        if time.monotonic() > deadline:
            raise DeadlineError(f"the Control Unit's server was not up within {START_TIMEOUT_S:.0f} s")
        await asyncio.sleep(0.01)
