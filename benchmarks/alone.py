"""Engine and trainer each without the other: the two bounds of `benchmarks.modes`.

Both are the real processes of a run (a vLLM server for each engine, the trainer's ranks), on the cores that a run would
give them.
"""

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import Iterator
from typing import Any
from unittest import mock

import msgpack
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from forebay import train
from forebay.control.server import control_app, serve
from forebay.control.types import NOTHING
from forebay.control.wire import MEDIA_TYPE
from forebay.data.schema import Row, read_rows
from forebay.errors import DeadlineError, RunError
from forebay.generation.fleet import Fleet
from forebay.launch.cores import plan_cores
from forebay.launch.ports import hold_port
from forebay.launch.processes import Process, spawn
from forebay.run import RunContext
from forebay.scheduling.schedule import FILE, read_schedule
from forebay.training.launch import trainer_command

Batches = dict[int, dict[str, Any]]
"""Step -> its whole batch, as `forebay.control.wire` has it."""


def generate_only(run: RunContext, groups_in_flight: int) -> float:
    """Response tokens per second of the start model, with so many groups in flight on all engines together."""
    return asyncio.run(_generate(run, groups_in_flight))


async def _generate(run: RunContext, groups_in_flight: int) -> float:
    """Counts from when as many groups as fit at a time are done until nothing new starts."""
    config = run.config
    count = max(config.training.steps * config.control.batch_groups, 3 * groups_in_flight)
    rows = _scheduled_rows(run)
    todo = deque((index, rows[index % len(rows)]) for index in range(count))
    done: list[tuple[float, int]] = []
    async with Fleet(run, run.start_model, plan_cores(config)) as fleet:

        async def work(engine: int) -> None:
            while todo:
                index, row = todo.popleft()
                prefixes = [NOTHING] * config.generation.group_size
                samples = await fleet.engines[engine].generate(
                    row.prompt_ids, prefixes, config.seed + index, images=row.images
                )
                done.append((time.perf_counter(), sum(len(sample.ids) for sample in samples)))

        async with asyncio.TaskGroup() as group:
            for place in range(groups_in_flight):
                group.create_task(work(place % len(fleet.engines)))
    window = done[groups_in_flight : len(done) - groups_in_flight + 1]
    return sum(tokens for _, tokens in window[1:]) / (window[-1][0] - window[0][0])


def _scheduled_rows(run: RunContext) -> list[Row]:
    rows = {row.prompt_id: row for row in read_rows(run.data / "train.parquet")}
    minibatches = [minibatch for group in read_schedule(run.schedule / FILE) for minibatch in group]
    return [rows[prompt_id] for minibatch in minibatches for prompt_id, _ in minibatch]


@contextlib.contextmanager
def recorded_batches(batches: Batches) -> Iterator[None]:
    """Within it, `forebay.train.train` puts here what it sends to its trainer."""

    def recording(*arguments: Any) -> FastAPI:
        app = control_app(*arguments)

        @app.middleware("http")
        async def record(request: Request, call_next: Any) -> Response:
            response: StreamingResponse = await call_next(request)
            if request.url.path != "/v1/batches/next" or response.status_code != 200:
                return response
            body = b"".join([bytes(part) async for part in response.body_iterator if not isinstance(part, str)])
            _add(batches, msgpack.unpackb(body))
            return Response(body, media_type=MEDIA_TYPE)

        return app

    with mock.patch.object(train, "control_app", recording):
        yield


def _add(batches: Batches, part: dict[str, Any]) -> None:
    """A batch that comes in parts is put together; a part that comes twice counts once."""
    known = batches.setdefault(part["step"], part | {"groups": [], "complete": True})["groups"]
    seen = {group["group_id"] for group in known}
    known.extend(group for group in part["groups"] if group["group_id"] not in seen)


def train_only(run: RunContext, batches: Batches) -> list[float]:
    """Seconds of each step (training and publishing) of a trainer that never waits for a batch."""
    return asyncio.run(_train(run, batches))


async def _train(run: RunContext, batches: Batches) -> list[float]:
    config, times = run.config, list[float]()
    held = hold_port(config.launch.host, 0)
    host, port = held.getsockname()[:2]
    argv, env, _ = trainer_command(run, f"http://{host}:{port}", plan_cores(config).trainer)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(contextlib.closing(held))
        await stack.enter_async_context(serve(_replay(batches, times), held))
        trainer = spawn("trainer", argv, env=env, log=run.logs / "trainer.log", cores=plan_cores(config).trainer)
        stack.callback(trainer.stop, 5.0)
        await _ended(trainer, config.training.startup_timeout_s + config.training.step_timeout_s)
    record = run.root / "trainer_done.json"
    if not record.exists() or json.loads(record.read_text())["steps"] != config.training.steps:
        raise RunError(f"train only: the trainer stopped early: {trainer.log_tail(1)}")
    return times


def _replay(batches: Batches, times: list[float]) -> FastAPI:
    """A Control Unit that has every batch ready."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.post("/v1/batches/next")
    async def next_batch(request: Request) -> Response:
        message = msgpack.unpackb(await request.body())
        batch = batches[message["step"]]
        rest = batch | {"groups": batch["groups"][message.get("received", 0) :]}
        return Response(msgpack.packb(rest), media_type=MEDIA_TYPE)

    @app.post("/v1/steps")
    async def step(request: Request) -> dict[str, bool]:
        message = msgpack.unpackb(await request.body())
        times.append(message["train_s"] + message["publish_s"])
        return {"ok": True}

    @app.post("/v1/{kind}")
    async def other(kind: str) -> dict[str, bool]:
        return {"ok": True}

    return app


async def _ended(trainer: Process, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while trainer.poll() is None:
        if time.monotonic() > deadline:
            raise DeadlineError(f"train only: the trainer was not done within {limit_s:.0f} s")
        await asyncio.sleep(0.05)
