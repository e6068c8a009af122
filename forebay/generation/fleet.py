"""The Generation Units of one run on this machine: start, watch, restart, stop.

Invariants:
- Inside `async with` every engine has been healthy once and serves version 0 of `model_dir`.
- After it nothing of any engine is left: no process, no port.
"""

import asyncio
import socket
import time
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from forebay.control.types import EngineFailure
from forebay.data.images import Pictures
from forebay.errors import DeadlineError, RunError
from forebay.generation.client import VllmEngine
from forebay.generation.images import Encoder
from forebay.generation.server import is_cpu_build, start_engine, telling_line
from forebay.launch.cores import CorePlan
from forebay.launch.ports import hold_port, require_free
from forebay.launch.processes import Process
from forebay.run import RunContext

STOP_GRACE_S = 3.0
"""Idle servers end within about a second; with requests in flight vLLM would wait for its clients."""


class Fleet:
    """`async with Fleet(run, model_dir, cores) as fleet: await fleet.engines[0].generate(...)`."""

    def __init__(self, run: RunContext, model_dir: Path, cores: CorePlan) -> None:
        self.engines: list[VllmEngine] = []
        self._run = run
        self._model_dir = model_dir
        self._cores = cores.engines
        self._processes: list[Process | None] = [None] * run.config.generation.engines
        self._ports: list[socket.socket] = []
        pictures = Pictures.of(run.images, model_dir)
        self._encoder = None if pictures is None else Encoder(pictures)
        self._repairs = [asyncio.Lock() for _ in self._processes]
        self._revivals_left = run.config.generation.max_restarts
        self._closed = False

    async def __aenter__(self) -> Self:
        is_cpu_build()  # no vLLM: say so before anything starts
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self._stop_all)
            self._take_ports()
            await self._start_all()
            undo.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop_all()

    def alive(self, i: int) -> bool:
        """Whether engine i's server process runs (it may be starting, or stuck: see `VllmEngine.health`)."""
        process = self._processes[i]
        return process is not None and process.poll() is None

    def process(self, i: int) -> Process:
        """Engine i's process; raises `RunError` before it was started."""
        process = self._processes[i]
        if process is None:
            raise RunError(f"engine {i} was never started")
        return process

    async def restart(self, i: int) -> None:
        """End what is left of engine i and start it anew. It serves version 0: refresh it. Raises `RunError`."""
        await asyncio.to_thread(self.process(i).stop, 0.0)
        await self._start(i)

    async def in_order(self, i: int) -> bool:
        """Whether engine i runs, answers, and its client trusts it."""
        return self.alive(i) and await _healthy(self.engines[i])

    async def revive(self, i: int) -> None:
        """Restart engine i unless it is in order after all; of several callers one does it. Raises `RunError` if it
        does not start, or if no restart is left (`generation.max_restarts`, of all engines together)."""
        async with self._repairs[i]:
            if await self.in_order(i):
                return
            if not self._revivals_left:
                name = self.engines[i].name
                raise RunError(
                    f"{name} failed and no restart is left (generation.max_restarts: "
                    f"{self._run.config.generation.max_restarts}); see {self._run.logs / name}.log"
                )
            self._revivals_left -= 1
            await self.restart(i)

    def _take_ports(self) -> None:
        host, base = self._run.config.launch.host, self._run.config.generation.base_port
        for i in range(len(self._processes)):
            if base:
                require_free(host, base + i, "generation.base_port")
            self._ports.append(hold_port(host, base + i if base else 0))
            port = self._ports[i].getsockname()[1]
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            engine = VllmEngine(f"engine-{i}", url, self._run.token, self._run.config, self._encoder)
            self.engines.append(engine)

    async def _start_all(self) -> None:
        starts = [asyncio.create_task(self._start(i)) for i in range(len(self.engines))]
        try:
            await asyncio.gather(*starts)
        finally:
            for task in starts:
                task.cancel()
            await asyncio.gather(*starts, return_exceptions=True)

    async def _start(self, i: int) -> None:
        """Start engine i and wait until it is healthy; raises `RunError` as soon as it is known to have failed."""
        self._refuse_closed(i)
        config, engine = self._run.config, self.engines[i]
        log = self._run.logs / f"{engine.name}.log"
        port = self._ports[i].getsockname()[1]
        process = start_engine(config, self._model_dir, port, self._run.token, log, self._cores[i])
        self._processes[i] = process
        deadline = time.monotonic() + config.generation.startup_timeout_s
        while True:
            self._refuse_closed(i)
            engine.reset()  # each time: a call to the server that was here before may fail only now, and blame it
            if await _healthy(engine):
                break
            if process.poll() is not None:
                why = telling_line(process.log_tail(400))
                raise RunError(f"{engine.name} {process.describe_exit()} while starting: {why} (log: {log})")
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"{engine.name} was not healthy {config.generation.startup_timeout_s:g} s after its start "
                    f"(generation.startup_timeout_s); last line of {log}: {process.log_tail(1)}"
                )
            await asyncio.sleep(0.1)
        await engine.set_version(0)

    def _refuse_closed(self, i: int) -> None:
        if self._closed:
            raise RunError(f"engine {i} is not started: its fleet is closed")

    async def _stop_all(self) -> None:
        self._closed = True
        await asyncio.gather(*(engine.close() for engine in self.engines))
        stops = [asyncio.to_thread(p.stop, STOP_GRACE_S) for p in self._processes if p is not None]
        results = await asyncio.gather(*stops, return_exceptions=True)
        for held in self._ports:
            held.close()
        for result in results:
            if isinstance(result, BaseException):
                raise result


async def _healthy(engine: VllmEngine) -> bool:
    try:
        await engine.health()
    except EngineFailure:
        return False
    return True
