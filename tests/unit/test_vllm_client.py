"""What the client makes of every kind of answer; the server is a function."""

import asyncio
import itertools
import json
import time
from collections.abc import Callable

import httpx
import pytest

from forebay.config import RunConfig, parse_config
from forebay.control.types import (
    NOTHING,
    EngineFailure,
    GenerationAborted,
    RefreshMode,
    RefreshRecord,
    RequestRefused,
    Sample,
    Snapshot,
    VersionSpan,
)
from forebay.generation import client
from forebay.generation.client import LONGEST_WAIT_S, SHORTEST_WAIT_S, VllmEngine, _longer_and_longer
from forebay.generation.server import engine_command, engine_environment, telling_line

Handler = Callable[[httpx.Request], httpx.Response]
CONFIG = parse_config({"generation": {"temperature": 0.7}}, "test")
IMPATIENT = parse_config({"generation": {"refresh_timeout_s": 0.3, "request_timeout_s": 0.3}}, "test")
SNAPSHOT = Snapshot(4, "/snapshots/v00000004", "ab" * 32)


def engine_with(handler: Callable, config: RunConfig = CONFIG) -> VllmEngine:
    engine = VllmEngine("engine-0", "http://127.0.0.1:1", "secret", config)
    transport = httpx.MockTransport(handler)
    engine._http = httpx.AsyncClient(transport=transport, base_url=engine.url, headers=engine._http.headers)
    return engine


def choice(index: int = 0, **changes) -> dict:
    base = {
        "index": index,
        "token_ids": [5, 6, 1],
        "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.5}, {"logprob": -2.0}]},
        "weight_versions": [{"version": "2", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 3}],
        "finish_reason": "stop",
    }
    return base | changes


def stream(*choices: dict) -> bytes:
    chunks = [json.dumps({"choices": [one]}) for one in choices]
    return "".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"]).encode()


def answer(*choices: dict) -> Handler:
    return lambda request: httpx.Response(200, content=stream(*choices))


def generate(handler: Callable, n: int = 1, seed: int = 0) -> list[Sample]:
    return asyncio.run(engine_with(handler).generate([2, 3], [NOTHING] * n, seed))


def part(ids: list[int], versions: list | None, reason: str | None = None, index: int = 0) -> dict:
    """A chunk; `versions` are (version, start, end) of the whole response so far."""
    spans = versions and [{"version": str(v), "start": start, "end": end} for v, start, end in versions]
    content = [{"logprob": -float(i)} for i in ids]
    return choice(index, token_ids=ids, logprobs={"content": content}, weight_versions=spans, finish_reason=reason)


def test_samples_in_order_with_versions() -> None:
    samples = generate(answer(choice(1, token_ids=[9, 9, 9], finish_reason="length"), choice(0)), n=2)
    assert [s.ids for s in samples] == [(5, 6, 1), (9, 9, 9)]
    assert samples[0].logprobs == (-0.5, -1.5, -2.0)
    assert samples[0].versions == (VersionSpan(2, 0, 1), VersionSpan(3, 1, 3))
    assert samples[0].oldest_version == 2
    assert [s.finish_reason for s in samples] == ["stop", "length"]


def test_request_carries_the_settings_and_the_token() -> None:
    seen = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return answer(choice(0), choice(1))(request)

    generate(handler, n=2, seed=3)
    body = json.loads(seen[0].content)
    assert body["token_ids"] == [2, 3]
    sampling = body["sampling_params"]
    assert (sampling["n"], sampling["temperature"], sampling["max_tokens"]) == (2, 0.7, 128)
    assert sampling["seed"] == 3 * 4096
    assert seen[0].headers["authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    "bad",
    [
        choice(finish_reason="error"),
        choice(token_ids=[5, 6]),
        choice(logprobs={"content": [{"logprob": -0.5}, {"logprob": float("-inf")}, {"logprob": -1.0}]}),
        choice(weight_versions=[{"version": "2", "start": 0, "end": 2}]),
        choice(weight_versions=[{"version": "2", "start": 0, "end": 2}, {"version": "3", "start": 1, "end": 3}]),
        choice(weight_versions=None),
        choice(1),
        {"index": 0},
    ],
)
def test_incomplete_samples_are_engine_failures(bad: dict) -> None:
    with pytest.raises(EngineFailure, match=r"engine engine-0 at http://127\.0\.0\.1:1: "):
        generate(answer(bad))


@pytest.mark.parametrize(("code", "expected"), [(400, RequestRefused), (500, EngineFailure)])
def test_an_error_amid_the_stream(code: int, expected: type[Exception]) -> None:
    """vLLM finds a prompt too long after it has said 200."""
    content = f'data: {{"error": {{"message": "no\\ngood", "code": {code}}}}}\n\ndata: [DONE]\n\n'.encode()
    with pytest.raises(expected, match="no good"):
        generate(lambda request: httpx.Response(200, content=content))


def test_a_missing_sample_is_an_engine_failure() -> None:
    with pytest.raises(EngineFailure, match="1 of 2 samples never ended"):
        generate(answer(choice()), n=2)


def test_a_failure_carries_what_is_certain() -> None:
    """Tokens without a version, and those of a stream that did not begin, are not among it."""
    chunks = stream(part([5], [(2, 0, 1)]), part([6, 7], [(2, 0, 2), (3, 2, 3)]), part([8], None))

    async def body():
        yield chunks.replace(b"data: [DONE]\n\n", b"")
        raise httpx.ReadError("reset by peer")

    with pytest.raises(EngineFailure, match="the connection broke") as caught:
        generate(lambda request: httpx.Response(200, content=body()), n=2)
    known = Sample((5, 6, 7), (-5.0, -6.0, -7.0), (VersionSpan(2, 0, 2), VersionSpan(3, 2, 3)), None)
    assert caught.value.partials == (known, NOTHING)


@pytest.mark.parametrize("told", [True, False])
def test_an_abort_hands_back_the_tokens_so_far(told: bool) -> None:
    """One that nobody asked for is a failure: vLLM ends its responses so when it gets SIGTERM."""
    chunks = [part([5], [(2, 0, 1)]), part([6], [(2, 0, 1)], "stop", 1), part([9], [(2, 0, 2)], "abort")]

    async def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/inference/v1/generate":
            await asyncio.sleep(0.05)
            return answer(*chunks)(request)
        record = {"pause_s": 0.1, "tokens_recomputed": 0, "tokens_discarded": 0}
        staging = b"staging_state" in request.content
        return httpx.Response(200, json={"results": ["staged" if staging else record]})

    async def go() -> None:
        engine = engine_with(handler)
        generating = asyncio.create_task(engine.generate([2, 3], [NOTHING] * 2, 0))
        await asyncio.sleep(0)
        await engine.refresh(SNAPSHOT, "abort" if told else "retract")
        await generating

    with pytest.raises(
        GenerationAborted if told else EngineFailure, match="unfinished" if told else "shut down"
    ) as caught:
        asyncio.run(go())
    first, second = caught.value.partials
    assert (first.ids, first.finish_reason) == ((5, 9), None)
    assert (second.ids, second.finish_reason) == ((6,), "stop")


def test_prefixes_are_continued_one_by_one() -> None:
    """Prompt and prefix go in, the rest of the budget comes out; finished ones make no request."""
    bodies = []

    def handler(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return answer(part([7], [(3, 0, 1)], "stop"))(request)

    begun = Sample((5, 6), (-1.0, -2.0), (VersionSpan(2, 0, 1), VersionSpan(3, 1, 2)), None)
    ended = Sample((5,), (-1.0,), (VersionSpan(2, 0, 1),), "stop")
    full = Sample((5,) * 128, (-1.0,) * 128, (VersionSpan(2, 0, 128),), None)
    samples = asyncio.run(engine_with(handler).generate([2, 3], [begun, ended, full, NOTHING], 3))
    assert samples[0] == Sample((5, 6, 7), (-1.0, -2.0, -7.0), (VersionSpan(2, 0, 1), VersionSpan(3, 1, 3)), "stop")
    assert samples[1] == ended
    assert (samples[2].ids, samples[2].finish_reason) == (full.ids, "length")
    assert samples[3].ids == (7,)
    bodies.sort(key=lambda body: len(body["token_ids"]))
    assert [body["token_ids"] for body in bodies] == [[2, 3], [2, 3, 5, 6]]
    assert [body["sampling_params"]["max_tokens"] for body in bodies] == [128, 126]
    assert [body["sampling_params"]["n"] for body in bodies] == [1, 1]
    fresh, continued = (body["sampling_params"]["seed"] for body in bodies)
    assert fresh == 3 * 4096 + 3
    assert continued != 3 * 4096  # else it would draw the random numbers of its first part again


@pytest.mark.parametrize(
    ("status", "expected"),
    [(400, RequestRefused), (422, RequestRefused), (401, EngineFailure), (404, EngineFailure), (500, EngineFailure)],
)
def test_statuses(status: int, expected: type[Exception]) -> None:
    body = {"error": {"message": "the prompt\nis too long"}}
    with pytest.raises(expected, match="the prompt is too long"):
        generate(lambda request: httpx.Response(status, json=body))


def test_a_broken_connection_is_tried_once_more() -> None:
    calls = []

    def handler(request: httpx.Request) -> httpx.Response:
        calls.append(request)
        if len(calls) == 1:
            raise httpx.RemoteProtocolError("Server disconnected without sending a response.")
        return answer(choice())(request)

    assert len(generate(handler)) == 1
    assert len(calls) == 2


def test_a_connection_that_stays_broken_is_an_engine_failure() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("")

    with pytest.raises(EngineFailure, match="the connection broke"):
        generate(handler)


def test_no_answer_in_time_is_an_engine_failure() -> None:
    async def handler(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(30)
        raise AssertionError

    with pytest.raises(EngineFailure, match=r"within 0\.3 s"):
        asyncio.run(engine_with(handler, IMPATIENT).generate([2, 3], [NOTHING], 0))


def test_a_silent_engine_is_a_hang_of_all_its_calls() -> None:
    """One call's chunks keep the other waiting; when both are silent, both fail with what they have."""

    async def body(talkative: bool):
        ids, count = [], 0
        for count in range(8 if talkative else 1):
            ids.append(count)
            yield stream(part([count], [(2, 0, count + 1)])).replace(b"data: [DONE]\n\n", b"")
            await asyncio.sleep(0.1)
        await asyncio.sleep(60)

    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=body(json.loads(request.content)["token_ids"] == [1]))

    async def story() -> None:
        engine = engine_with(handler)
        engine._watchdog._limit_s = 0.3
        started = time.monotonic()
        calls = [engine.generate([i], [NOTHING], 0) for i in (1, 2)]
        first, second = await asyncio.gather(*calls, return_exceptions=True)
        assert 0.9 < time.monotonic() - started < 5
        assert [len(error.partials[0].ids) for error in (first, second)] == [8, 1]
        for work in (engine.health(), engine.generate([1], [NOTHING], 0)):
            with pytest.raises(EngineFailure, match="it hangs"):
                await work

    asyncio.run(story())


def test_a_closed_client_is_an_engine_failure() -> None:
    async def story() -> None:
        engine = engine_with(answer(choice()))
        await engine.close()
        with pytest.raises(EngineFailure, match="it was closed"):
            await engine.generate([1], [NOTHING], 0)

    asyncio.run(story())


class FakeServer:
    """Answers the refresh routes, remembers their order, fails where it is told."""

    def __init__(self, fails_at: str = "", states: tuple[str, ...] = ("staging", "staged")) -> None:
        self.calls: list[str] = []
        self.times: list[float] = []
        self.fails_at = fails_at
        self.states = list(states)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else {}
        name = body.get("method", "") or request.url.path.strip("/")
        if name == "forebay_refresh":
            name = "swap:{mode}:{version}".format(**body["kwargs"])
        self.calls.append(name)
        self.times.append(time.monotonic())
        if name == self.fails_at:
            return httpx.Response(500, json={"error": {"message": "broken"}})
        if name.startswith("swap"):
            record = {"pause_s": 0.004, "tokens_recomputed": 17, "tokens_discarded": 5}
            return httpx.Response(200, json={"results": [record]})
        if name == "forebay_staging_state":
            return httpx.Response(200, json={"results": [self.states.pop(0) if self.states else "staging"]})
        return httpx.Response(200, json={})


STAGING = ["forebay_stage", "forebay_staging_state", "forebay_staging_state"]


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort", "drain"])
def test_refresh_stages_then_swaps_in_one_call(mode: RefreshMode) -> None:
    server = FakeServer()
    record = asyncio.run(engine_with(server).refresh(SNAPSHOT, mode))
    assert server.calls == [*STAGING, f"swap:{mode}:4"]
    assert record == RefreshRecord(4, 0.004, 17, 5)


def test_the_next_staging_is_asked_about_when_the_last_one_was_done() -> None:
    """It took 5 + 5 + 10 + 20 + 40 ms or more; a single question comes that late the next time."""
    server = FakeServer(states=(*["staging"] * 4, "staged", "staged"))

    async def story() -> None:
        engine = engine_with(server)
        await engine.refresh(SNAPSHOT, "retract")
        await engine.refresh(SNAPSHOT, "retract")

    asyncio.run(story())
    assert server.calls[-3:] == ["forebay_stage", "forebay_staging_state", "swap:retract:4"]
    assert server.times[-2] - server.times[-3] > 0.9 * 0.08


def test_staging_may_take_long_and_delays_the_next_one_little() -> None:
    waits = list(itertools.islice(_longer_and_longer(), 5000))
    assert waits[0] == SHORTEST_WAIT_S
    assert waits[-1] == LONGEST_WAIT_S
    server = FakeServer(states=(*["staging"] * 8, "staged"))
    engine = engine_with(server)
    asyncio.run(engine.refresh(SNAPSHOT, "retract"))
    assert engine._staging_s == LONGEST_WAIT_S
    engine.reset()
    assert engine._staging_s == SHORTEST_WAIT_S


@pytest.mark.parametrize(("mode", "stale"), [("retract", False), ("in_place", True)])
def test_tokens_over_a_kept_cache_say_so(mode: RefreshMode, stale: bool) -> None:
    """In this response those of version 4; a response that begins with version 4 has a cache of its own."""
    server = FakeServer()

    def handler(request: httpx.Request) -> httpx.Response:
        if "generate" not in request.url.path:
            return server(request)
        first = part([5, 6, 7], [(3, 0, 0), (3, 0, 1), (4, 1, 3)], "stop")
        return answer(first, part([5], [(4, 0, 1)], "stop", 1))(request)

    async def story() -> list[Sample]:
        engine = engine_with(handler)
        await engine.refresh(SNAPSHOT, mode)
        return await engine.generate([1], [NOTHING] * 2, 0)

    first, second = asyncio.run(story())
    assert first.versions == (VersionSpan(3, 0, 1), VersionSpan(4, 1, 3, stale))
    assert second.versions == (VersionSpan(4, 0, 1),)


def test_refused_snapshot_never_pauses() -> None:
    server = FakeServer(states=("staging", "snapshot refused: bad digest"))
    engine = engine_with(server)
    with pytest.raises(EngineFailure, match="bad digest"):
        asyncio.run(engine.refresh(SNAPSHOT, "retract"))
    assert server.calls == [*STAGING, "finish_weight_update"]


def test_staging_that_never_ends_names_the_engine_and_goes_on() -> None:
    server = FakeServer(states=())
    with pytest.raises(EngineFailure, match=r"engine-0.*version 4 was not done within 0\.3 s"):
        asyncio.run(engine_with(server, IMPATIENT).refresh(SNAPSHOT, "retract"))
    assert "swap:retract:4" not in server.calls
    assert server.calls[-1] == "finish_weight_update"


def test_a_server_that_is_stopped_while_a_refresh_backs_out_is_an_engine_failure(monkeypatch) -> None:
    """Both limits are over: that of the refresh, and then that of the question whether the engine lives."""

    async def handler(request: httpx.Request) -> httpx.Response:
        if b"forebay_stage" not in request.content:
            await asyncio.sleep(60)
        return httpx.Response(200, json={"results": ["None"]})

    async def story() -> None:
        engine = engine_with(handler)
        engine._generation = engine._generation.model_copy(update={"refresh_timeout_s": 1.1, "stall_timeout_s": 0.2})
        with pytest.raises(EngineFailure, match="engine-0"):
            await engine.refresh(SNAPSHOT, "retract")

    monkeypatch.setattr(client, "BACK_OUT_S", 0.5)
    asyncio.run(asyncio.wait_for(story(), 5))


def test_a_server_that_is_stopped_in_a_refresh_is_noticed_as_a_hanging_one_is() -> None:
    async def handler(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(60)
        return httpx.Response(200)

    async def story() -> None:
        engine = engine_with(handler)
        engine._generation = engine._generation.model_copy(update={"refresh_timeout_s": 30.0, "stall_timeout_s": 0.2})
        with pytest.raises(EngineFailure, match=r"health: no answer within 0\.2 s, while it took version 4"):
            await engine.refresh(SNAPSHOT, "retract")

    asyncio.run(asyncio.wait_for(story(), 5))


def test_half_a_swap_puts_the_engine_out_of_use_until_reset() -> None:
    server = FakeServer(fails_at="swap:retract:4")
    engine = engine_with(server)

    async def story() -> None:
        with pytest.raises(EngineFailure, match="broken"):
            await engine.refresh(SNAPSHOT, "retract")
        assert server.calls[-1] == server.fails_at  # nothing tries to mend it
        for work in (engine.generate([1], [NOTHING], 0), engine.health(), engine.refresh(SNAPSHOT, "retract")):
            with pytest.raises(EngineFailure, match="did not complete; restart this engine"):
                await work
        engine.reset()
        await engine.health()

    asyncio.run(story())


def test_command_has_no_token_and_takes_extra_arguments(tmp_path) -> None:
    config = parse_config({"generation": {"extra_args": ["--stream-interval", "4"], "max_num_seqs": 64}}, "test")
    command = engine_command(config, tmp_path, "127.0.0.1", 8123)
    assert command[-2:] == ["--stream-interval", "4"]
    for name, value in {"--port": "8123", "--max-num-seqs": "64", "--model": str(tmp_path)}.items():
        assert command[command.index(name) + 1] == value
    environment = engine_environment("very-secret", [0])
    assert environment["FOREBAY_TOKEN"] == "very-secret"
    assert "very-secret" not in " ".join(command)


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("INFO ok\nentry.py: error: unrecognized arguments: --x\n", "entry.py: error: unrecognized arguments: --x"),
        (
            "(EngineCore pid=7) ERROR 11-29 17:00:21 [core.py:15] ValueError: no memory\n"
            "(APIServer pid=3) RuntimeError: Engine core initialization failed. See root cause above.\n",
            "ValueError: no memory",
        ),
        ("guard: cannot start x: No such file\n", "guard: cannot start x: No such file"),
        ("first\n\nlast words\n\n", "last words"),
        ("", "its log is empty"),
    ],
)
def test_telling_line(log: str, expected: str) -> None:
    assert telling_line(log) == expected


def test_each_ending_response_is_told_with_its_prefix_and_the_load_is_counted() -> None:
    told: list[int] = []
    engine = engine_with(
        answer(
            choice(
                index=1,
                token_ids=[5],
                logprobs={"content": [{"logprob": -0.5}]},
                weight_versions=[{"version": "2", "start": 0, "end": 1}],
            ),
            choice(),
        )
    )
    prefix = Sample((7, 8), (-0.1, -0.2), (VersionSpan(1, 0, 2),), None)
    asyncio.run(engine.generate([2, 3], [NOTHING, NOTHING], 0, told.append))
    assert told == [1, 3]
    assert engine.load() == (0, 0, 4, 2)  # nothing in flight; 4 response tokens came, 2 prompt tokens went
    engine = engine_with(answer(choice()))
    asyncio.run(engine.generate([2, 3], [prefix], 0, told.append))
    assert told == [1, 3, 5]


def test_a_refresh_ends_as_soon_as_the_engine_is_found_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server goes on answering without its engine process: staging would be asked for until the time-out."""
    monkeypatch.setattr(client, "HEALTH_EVERY_S", 0.02)
    config = parse_config({"generation": {"refresh_timeout_s": 30}}, "test")

    def handler(request: httpx.Request) -> httpx.Response:
        dead = request.url.path == "/health"
        return httpx.Response(503 if dead else 200, json={"results": ["staging"]})

    began = time.monotonic()
    with pytest.raises(EngineFailure, match=r"GET /health: status 503.*, while it took version 4"):
        asyncio.run(engine_with(handler, config).refresh(SNAPSHOT, "retract"))
    assert time.monotonic() - began < 5
