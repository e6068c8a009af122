"""What the client makes of every kind of answer; the server is a function."""

import asyncio
import json
from collections.abc import Callable

import httpx
import pytest

from forebay.config import parse_config
from forebay.control.types import EngineFailure, RequestRefused, Sample, Snapshot, VersionSpan
from forebay.generation.client import VllmEngine
from forebay.generation.server import engine_command, engine_environment, telling_line

Handler = Callable[[httpx.Request], httpx.Response]
CONFIG = parse_config({"generation": {"refresh_timeout_s": 0.3, "request_timeout_s": 0.3, "temperature": 0.7}}, "test")
SNAPSHOT = Snapshot(4, "/snapshots/v00000004", "ab" * 32)


def engine_with(handler: Callable) -> VllmEngine:
    engine = VllmEngine("engine-0", "http://127.0.0.1:1", "secret", CONFIG)
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


def answer(*choices: dict) -> Handler:
    return lambda request: httpx.Response(200, json={"choices": list(choices)})


def generate(handler: Callable, n: int = 1, seed: int = 0) -> list[Sample]:
    return asyncio.run(engine_with(handler).generate([2, 3], n, seed))


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
        choice(finish_reason="abort"),
        choice(finish_reason="error"),
        choice(token_ids=[5, 6]),
        choice(logprobs={"content": [{"logprob": -0.5}, {"logprob": float("-inf")}, {"logprob": -1.0}]}),
        choice(weight_versions=[{"version": "2", "start": 0, "end": 2}]),
        choice(weight_versions=[{"version": "2", "start": 0, "end": 2}, {"version": "3", "start": 1, "end": 3}]),
    ],
)
def test_incomplete_samples_are_engine_failures(bad: dict) -> None:
    content = json.dumps({"choices": [bad]}).encode()
    with pytest.raises(EngineFailure, match=r"engine engine-0 at http://127\.0\.0\.1:1: "):
        generate(lambda request: httpx.Response(200, content=content))


def test_a_missing_sample_is_an_engine_failure() -> None:
    with pytest.raises(EngineFailure, match="1 samples instead of 2"):
        generate(answer(choice()), n=2)


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
        generate(handler)


def test_a_closed_client_is_an_engine_failure() -> None:
    async def story() -> None:
        engine = engine_with(answer(choice()))
        await engine.close()
        with pytest.raises(EngineFailure, match="it was closed"):
            await engine.generate([1], 1, 0)

    asyncio.run(story())


class FakeServer:
    """Answers the refresh routes, remembers their order, fails where it is told."""

    def __init__(self, fails_at: str = "", states: tuple[str, ...] = ("staging", "staged")) -> None:
        self.calls: list[str] = []
        self.fails_at = fails_at
        self.states = list(states)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else {}
        name = request.url.path.strip("/") + ":" + body.get("update_info", {}).get("action", "")
        if body.get("weight_version"):
            name += body["weight_version"]
        self.calls.append(name)
        if name == self.fails_at:
            return httpx.Response(500, json={"error": {"message": "broken"}})
        if name == "collective_rpc:":
            return httpx.Response(200, json={"results": [self.states.pop(0) if self.states else "staging"]})
        return httpx.Response(200, json={})


STAGING = ["start_weight_update:", "update_weights:stage", "collective_rpc:", "collective_rpc:"]
SWAP = ["pause:", "update_weights:swap", "finish_weight_update:4", "resume:"]


def test_refresh_stages_before_it_pauses() -> None:
    server = FakeServer()
    record = asyncio.run(engine_with(server).refresh(SNAPSHOT))
    assert server.calls == STAGING + SWAP
    assert record.version == 4
    assert 0 <= record.pause_s < 0.3


def test_refused_snapshot_never_pauses() -> None:
    server = FakeServer(states=("staging", "snapshot refused: bad digest"))
    engine = engine_with(server)
    with pytest.raises(EngineFailure, match="bad digest"):
        asyncio.run(engine.refresh(SNAPSHOT))
    assert server.calls == [*STAGING, "finish_weight_update:"]


def test_staging_that_never_ends_names_the_engine_and_goes_on() -> None:
    server = FakeServer(states=())
    with pytest.raises(EngineFailure, match=r"engine-0.*version 4 was not done within 0\.3 s"):
        asyncio.run(engine_with(server).refresh(SNAPSHOT))
    assert "pause:" not in server.calls
    assert server.calls[-1] == "finish_weight_update:"


def test_failed_pause_resumes() -> None:
    server = FakeServer(fails_at="pause:")
    with pytest.raises(EngineFailure, match="/pause"):
        asyncio.run(engine_with(server).refresh(SNAPSHOT))
    assert server.calls == [*STAGING, "pause:", "finish_weight_update:", "resume:"]


@pytest.mark.parametrize("fails_at", ["update_weights:swap", "finish_weight_update:4"])
def test_half_a_swap_puts_the_engine_out_of_use_until_reset(fails_at: str) -> None:
    server = FakeServer(fails_at=fails_at)
    engine = engine_with(server)

    async def story() -> None:
        with pytest.raises(EngineFailure, match="broken"):
            await engine.refresh(SNAPSHOT)
        assert server.calls[-1] == fails_at  # it stays paused
        for work in (engine.generate([1], 1, 0), engine.health(), engine.refresh(SNAPSHOT)):
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
