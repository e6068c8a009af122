"""A real vLLM server against transformers: log-probabilities, refreshes, refusals, failures."""

import asyncio
import dataclasses
import os
import re
import signal
import time
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from forebay.config import parse_config
from forebay.control.types import (
    NOTHING,
    EngineFailure,
    GenerationAborted,
    RefreshMode,
    RequestRefused,
    Sample,
    Snapshot,
    VersionSpan,
)
from forebay.errors import RunError, UserError
from forebay.generation.fleet import Fleet
from forebay.launch.cores import CorePlan, plan_cores
from forebay.launch.ports import hold_port
from forebay.run import RunContext
from tests.integration.conftest import Served, shared_memory_of
from tests.support.reference_model import ReferenceModel
from tests.support.snapshot_writer import seal, write_snapshot

END = 1
PROMPTS = [[2, 5, 6, 7, 8, 9, 20, 3], [4], list(range(2, 50)), [7] * 20]


@pytest.fixture(scope="module")
def references(served: Served) -> dict[str, ReferenceModel]:
    return {"first": ReferenceModel(served.first), "second": ReferenceModel(served.second)}


def snapshot_of(served: Served, name: str, tmp_path: Path, change=None) -> Snapshot:
    served.version += 1
    folder = tmp_path / f"v{served.version:08d}"
    return write_snapshot(getattr(served, name), folder, served.version, change)


def serve(served: Served, name: str, tmp_path: Path, mode: RefreshMode = "retract") -> int:
    """Refresh the engine with a model; returns its version."""
    record = served.runner.run(served.engine.refresh(snapshot_of(served, name, tmp_path), mode))
    assert record.version == served.version
    assert 0 < record.pause_s < 5
    assert (record.tokens_recomputed, record.tokens_discarded) == (0, 0)
    return served.version


def assert_matches(reference: ReferenceModel, prompt: list[int], sample: Sample, temperature: float) -> None:
    expected = reference.logprobs(prompt, sample.ids, temperature)
    assert max(abs(a - b) for a, b in zip(sample.logprobs, expected, strict=True)) < 1e-4


def assert_serves(served: Served, reference: ReferenceModel, version: int, seed: int) -> None:
    """Sampled log-probabilities and greedy tokens are the reference's; every token says this version."""
    for prompt in PROMPTS:
        samples = served.runner.run(served.engine.generate(prompt, [NOTHING] * 3, seed))
        greedy = served.runner.run(served.engine.greedy(prompt, 24))
        assert reference.is_greedy(prompt, greedy.ids)
        assert len(greedy.ids) == 24 or greedy.ids[-1] == END
        assert_matches(reference, prompt, greedy, 1.0)
        for sample in (*samples, greedy):
            assert [(s.version, s.start, s.end) for s in sample.versions] == [(version, 0, len(sample.ids))]
        for sample in samples:
            assert_matches(reference, prompt, sample, served.run.config.generation.temperature)


def test_log_probabilities_before_and_after_refreshes(
    served: Served, references: dict[str, ReferenceModel], tmp_path: Path
) -> None:
    """Tied embeddings: a stale packed head would be off by whole units (vLLM's own reload is)."""
    for seed, name in enumerate(["first", "second", "first"]):
        version = serve(served, name, tmp_path)
        assert_serves(served, references[name], version, seed)


def test_end_token_is_part_of_the_sample(served: Served, tmp_path: Path) -> None:
    serve(served, "first", tmp_path)
    samples = served.runner.run(served.engine.generate(PROMPTS[0], [NOTHING] * 32, 5))
    reasons = {sample.finish_reason for sample in samples}
    assert reasons == {"stop", "length"}
    for sample in samples:
        assert (sample.ids[-1] == END) == (sample.finish_reason == "stop")
        assert END not in sample.ids[:-1]
        assert sample.finish_reason == "stop" or len(sample.ids) == served.run.config.generation.max_new_tokens


def test_seeds_repeat_and_do_not_overlap(served: Served, tmp_path: Path) -> None:
    serve(served, "first", tmp_path)

    def draw(seed: int) -> list[tuple[int, ...]]:
        return [sample.ids for sample in served.runner.run(served.engine.generate([4, 5], [NOTHING] * 4, seed))]

    assert draw(11) == draw(11)
    # In vLLM child i takes seed + i: with raw seeds, 11's second child would be 12's first.
    assert len({*draw(11), *draw(12), *draw(13)}) == 12


MODES: tuple[RefreshMode, ...] = ("retract", "in_place", "abort", "drain")
LONG = [4 + i % 90 for i in range(200)]
"""More than one KV block of 128: the prefix cache has something to offer."""


def across(served: Served, name: str, tmp_path: Path, mode: RefreshMode, count: int = 24):
    """`count` calls for 8 samples each, with a refresh in their midst; what became of them, and the record."""
    snapshot = snapshot_of(served, name, tmp_path)

    async def together():
        prompts = [[2, 3 + i, 40 - i] for i in range(count)]
        running = [asyncio.create_task(served.engine.generate(p, [NOTHING] * 8, i)) for i, p in enumerate(prompts)]
        await _decoding(served, 100)
        record = await served.engine.refresh(snapshot, mode)
        results = await asyncio.gather(*running, return_exceptions=True)
        return record, list(zip(prompts, results, strict=True))

    return served.runner.run(together())


def assert_exact(served: Served, models: dict[int, ReferenceModel], prompt: list[int], sample: Sample) -> None:
    """Each token's log-probability is that of the version that it claims."""
    assert len(sample.ids) == len(sample.logprobs) == sum(span.end - span.start for span in sample.versions)
    assert len(sample.ids) <= served.run.config.generation.max_new_tokens
    temperature = served.run.config.generation.temperature
    for span in sample.versions:
        expected = models[span.version].logprobs(prompt, sample.ids, temperature)
        for i in range(span.start, span.end):
            assert abs(sample.logprobs[i] - expected[i]) < 1e-4


def test_refresh_in_mid_generation(served: Served, references: dict[str, ReferenceModel], tmp_path: Path) -> None:
    """Retract: tokens before the swap are the old model's, tokens after it the new one's."""
    old = serve(served, "first", tmp_path)
    record, results = across(served, "second", tmp_path, "retract")
    models = {old: references["first"], record.version: references["second"]}
    for prompt, samples in results:
        for sample in samples:
            assert_exact(served, models, prompt, sample)
            assert not any(span.stale_cache for span in sample.versions)
    assert sum(len(sample.versions) == 2 for _, samples in results for sample in samples) > 10
    assert record.tokens_recomputed > 100
    assert record.tokens_discarded == 0


def test_in_place_marks_what_it_computes_over_the_old_cache(
    served: Served, references: dict[str, ReferenceModel], tmp_path: Path
) -> None:
    old = serve(served, "first", tmp_path)
    record, results = across(served, "second", tmp_path, "in_place")
    assert (record.tokens_recomputed, record.tokens_discarded) == (0, 0)
    temperature = served.run.config.generation.temperature
    mixed, off = 0, 0.0
    for prompt, samples in results:
        for sample in samples:
            before, *after = sample.versions
            assert not before.stale_cache
            if before.version == old:
                expected = references["first"].logprobs(prompt, sample.ids, temperature)
                assert max(abs(sample.logprobs[i] - expected[i]) for i in range(before.end)) < 1e-4
            if after:
                assert [(s.version, s.stale_cache) for s in after] == [(record.version, True)]
                expected = references["second"].logprobs(prompt, sample.ids, temperature)
                off = max(off, *(abs(sample.logprobs[i] - expected[i]) for i in range(before.end, len(sample.ids))))
                mixed += 1
    assert mixed > 10
    assert off > 0.01  # the cache was kept indeed
    assert_serves(served, references["second"], record.version, 3)


def test_abort_hands_back_what_was_there_and_it_goes_on_elsewhere(
    served: Served, references: dict[str, ReferenceModel], tmp_path: Path
) -> None:
    """The partial responses, continued on an engine with other weights, are exact in both parts."""
    old = serve(served, "first", tmp_path)
    record, results = across(served, "second", tmp_path, "abort")
    aborted = [(p, r.partials) for p, r in results if isinstance(r, GenerationAborted)]
    assert len(aborted) > 10
    partials = [sample for _, samples in aborted for sample in samples]
    assert record.tokens_discarded == sum(len(s.ids) for s in partials if s.finish_reason is None) > 0
    models = {old: references["first"], record.version: references["second"]}
    long = 0
    for seed, (prompt, samples) in enumerate(aborted[:6]):
        continued = served.runner.run(served.engine.generate(prompt, samples, seed))
        for before, after in zip(samples, continued, strict=True):
            assert after.ids[: len(before.ids)] == before.ids
            assert after.logprobs[: len(before.ids)] == before.logprobs
            assert after.finish_reason in ("stop", "length")
            assert before.finish_reason is None or after == before
            assert_exact(served, models, prompt, after)
            long += len(after.ids) == served.run.config.generation.max_new_tokens
    assert long > 0  # some reached the budget, none went beyond it


def test_prefix_at_the_budget_is_finished_without_a_request(served: Served, tmp_path: Path) -> None:
    version = serve(served, "first", tmp_path)
    full = Sample((5,) * 200, (-1.0,) * 200, (VersionSpan(version, 0, 200),), None)
    short = Sample((5,), (-1.0,), (VersionSpan(version, 0, 1),), None)
    samples = served.runner.run(served.engine.generate([2, 3], [full, short, NOTHING], 1))
    assert samples[0] == dataclasses.replace(full, finish_reason="length")
    assert samples[1].ids[0] == 5
    assert all(len(sample.ids) <= 200 and sample.finish_reason for sample in samples)


def test_drain_lets_all_finish_first(served: Served, references: dict[str, ReferenceModel], tmp_path: Path) -> None:
    old = serve(served, "first", tmp_path)
    record, results = across(served, "second", tmp_path, "drain")
    for prompt, samples in results:
        for sample in samples:
            assert len(sample.versions) == 1
            assert_exact(served, {old: references["first"]}, prompt, sample)
    assert (record.tokens_recomputed, record.tokens_discarded) == (0, 0)
    assert_serves(served, references["second"], record.version, 2)


@pytest.mark.parametrize("mode", MODES)
def test_prefix_cache_never_serves_another_versions_prefix(
    served: Served, references: dict[str, ReferenceModel], tmp_path: Path, mode: RefreshMode
) -> None:
    """Asked before, across and after the swap, the last while a request over the old cache still adds blocks."""
    old = serve(served, "first", tmp_path)
    snapshot = snapshot_of(served, "second", tmp_path)
    models = {old: references["first"], snapshot.version: references["second"]}

    async def story() -> list[list[Sample]]:
        first = await served.engine.generate(LONG, [NOTHING], 1)
        running = asyncio.create_task(served.engine.generate(LONG, [NOTHING] * 4, 2))
        await _decoding(served, 20)
        await served.engine.refresh(snapshot, mode)
        after = [await served.engine.generate(LONG, [NOTHING] * 4, seed) for seed in (3, 4)]
        await asyncio.gather(running, return_exceptions=True)
        return [first, *after, await served.engine.generate(LONG, [NOTHING] * 4, 5)]

    before, *after = served.runner.run(story())
    assert_exact(served, models, LONG, before[0])
    for samples in after:
        for sample in samples:
            assert sample.oldest_version == snapshot.version
            assert_exact(served, models, LONG, sample)


def test_hung_server_is_noticed_and_restarted(
    served: Served, references: dict[str, ReferenceModel], tmp_path: Path
) -> None:
    """Stopped, the engine process keeps its port open and its health good; what it had given is kept."""
    version = serve(served, "second", tmp_path)
    process = served.fleet.process(0)
    limit_s, served.engine._watchdog._limit_s = served.engine._watchdog._limit_s, 2.0

    async def hang() -> list[EngineFailure]:
        running = [asyncio.create_task(served.engine.generate([2, 3, i + 4], [NOTHING] * 8, i)) for i in range(4)]
        await _decoding(served, 900)
        os.kill(process.tree()[0], signal.SIGSTOP)
        started = time.monotonic()
        results = await asyncio.gather(*running, return_exceptions=True)
        assert time.monotonic() - started < 6
        with pytest.raises(EngineFailure, match="hangs"):
            await served.engine.health()
        return results

    try:
        failures = served.runner.run(hang())
    finally:
        served.engine._watchdog._limit_s = limit_s
        served.runner.run(served.fleet.revive(0))
    assert_serves(served, references["first"], 0, 7)
    kept = 0
    for i, failure in enumerate(failures):
        assert isinstance(failure, EngineFailure)
        assert "gave no token for 60 s (generation.stall_timeout_s)" in str(failure)
        for partial in failure.partials:
            assert_exact(served, {version: references["second"]}, [2, 3, i + 4], partial)
            kept += len(partial.ids)
    assert kept > 100


async def _decoding(served: Served, tokens: int) -> None:
    """Wait until the engine has decoded so many more tokens."""
    wanted = await _counter(served, "vllm:generation_tokens_total") + tokens
    async with asyncio.timeout(30):
        while await _counter(served, "vllm:generation_tokens_total") < wanted:  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.01)


async def _counter(served: Served, name: str) -> float:
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {served.run.token}"}) as http:
        text = (await http.get(f"{served.engine.url}/metrics")).text
    return float(re.search(rf"^{name}\{{.*\}} (\S+)$", text, re.MULTILINE)[1])


def _flip_a_bit(snapshot: Snapshot) -> Snapshot:
    path = Path(snapshot.path) / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)
    return snapshot


def _remove_weights(snapshot: Snapshot) -> Snapshot:
    (Path(snapshot.path) / "model.safetensors").unlink()
    return snapshot


def _lie_about_the_manifest(snapshot: Snapshot) -> Snapshot:
    return dataclasses.replace(snapshot, manifest_sha256="0" * 64)


def _lie_about_the_version(snapshot: Snapshot) -> Snapshot:
    return dataclasses.replace(snapshot, version=snapshot.version + 1000)


def _files_without_a_listed_tensor(snapshot: Snapshot) -> Snapshot:
    folder = Path(snapshot.path)
    tensors = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if k != "model.norm.weight"}, folder / "model.safetensors")
    return seal(folder, snapshot.version, tensors)


def _garbage_with_a_good_digest(snapshot: Snapshot) -> Snapshot:
    folder = Path(snapshot.path)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").write_bytes(b"not a safetensors file")
    return seal(folder, snapshot.version, tensors)


def _spoil(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"][3] = float("nan")


def _drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def _add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.extra.weight"] = torch.zeros(3)


def _reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(64)


def _halve(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()


@pytest.mark.parametrize(
    ("change", "spoil", "message"),
    [
        (None, _flip_a_bit, "model.safetensors has SHA-256"),
        (None, _remove_weights, "model.safetensors"),
        (None, _lie_about_the_manifest, "announced was 0000"),
        (None, _lie_about_the_version, "it is version"),
        (None, _files_without_a_listed_tensor, "exactly the tensors"),
        (None, _garbage_with_a_good_digest, "refused"),
        (_spoil, None, "model.norm.weight has values that are not finite"),
        (_drop, None, "model.norm.weight is missing"),
        (_add, None, "model.extra.weight is not in the served model"),
        (_reshape, None, "model.norm.weight has shape [64]"),
        (_halve, None, "the engine serves torch.float32"),
    ],
)
def test_bad_snapshot_is_refused_and_the_old_weights_serve_on(
    served: Served, references: dict[str, ReferenceModel], tmp_path: Path, change, spoil, message: str
) -> None:
    version = serve(served, "first", tmp_path)
    snapshot = snapshot_of(served, "second", tmp_path, change)
    if spoil is not None:
        snapshot = spoil(snapshot)
    with pytest.raises(EngineFailure, match=re.escape(message)):
        served.runner.run(served.engine.refresh(snapshot, "retract"))
    sample = served.runner.run(served.engine.generate(PROMPTS[0], [NOTHING], 3))[0]
    assert [span.version for span in sample.versions] == [version]
    assert_matches(references["first"], PROMPTS[0], sample, served.run.config.generation.temperature)
    serve(served, "second", tmp_path)  # the next good one goes through


def test_every_route_asks_for_the_token(served: Served) -> None:
    async def statuses(headers: dict[str, str]) -> list[tuple[str, str, int]]:
        async with httpx.AsyncClient(base_url=served.engine.url) as http:
            secret = {"Authorization": f"Bearer {served.run.token}"}
            routes = (await http.get("/openapi.json", headers=secret)).json()["paths"]
            found = [(m.upper(), p) for p, methods in routes.items() for m in methods]
            found += [("GET", "/metrics"), ("GET", "/docs"), ("GET", "/no-such-route"), ("OPTIONS", "/pause")]
            return [(m, p, (await http.request(m, p, headers=headers)).status_code) for m, p in found]

    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": served.run.token}):
        answers = served.runner.run(statuses(headers))
        assert {status for _, _, status in answers} == {401}
        assert {"/pause", "/resume", "/update_weights", "/collective_rpc", "/metrics", "/inference/v1/generate"} <= {
            path for _, path, _ in answers
        }


def test_only_the_engine_keeps_to_its_cores(served: Served) -> None:
    """The API server beside it goes where there is time to spare."""
    where = {
        Path(f"/proc/{pid}/comm").read_text().strip(): os.sched_getaffinity(pid)
        for pid in served.fleet.process(0).tree()
    }
    (engine,) = (cores for name, cores in where.items() if name.startswith("VLLM::Engine"))
    (others,) = {frozenset(cores) for name, cores in where.items() if not name.startswith("VLLM::Engine")}
    assert engine == set(plan_cores(served.run.config).engines[0])
    assert others == os.sched_getaffinity(0)


def test_token_is_neither_in_the_arguments_nor_in_the_log(served: Served) -> None:
    process = served.fleet.process(0)
    for pid in [process.pid, *process.tree()]:
        assert served.run.token.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert served.run.token not in process.log.read_text()


@pytest.mark.parametrize("prompt", [[5] * 256, [5] * 1000, [100_000], []])
def test_bad_prompt_is_refused(served: Served, prompt: list[int]) -> None:
    with pytest.raises(RequestRefused, match="engine-0 refuses the request"):
        served.runner.run(served.engine.generate(prompt, [NOTHING] * 2, 0))


def test_long_prompts_in_a_crowd(served: Served, tmp_path: Path) -> None:
    """More prompt tokens than one step takes, seeded, with a refresh amid: a cut prefill would kill the engine."""
    serve(served, "first", tmp_path)
    snapshot = snapshot_of(served, "second", tmp_path)

    async def crowd() -> list[list[Sample]]:
        prompts = [[4 + (i + j) % 90 for j in range(180)] for i in range(48)]
        running = [asyncio.create_task(served.engine.generate(p, [NOTHING] * 8, i)) for i, p in enumerate(prompts)]
        await _decoding(served, 500)
        await served.engine.refresh(snapshot, "retract")
        return await asyncio.gather(*running)

    assert len(served.runner.run(crowd())) == 48


def test_killed_server_fails_in_flight_and_restarts(
    served: Served, references: dict[str, ReferenceModel], tmp_path: Path
) -> None:
    version = serve(served, "second", tmp_path)
    process = served.fleet.process(0)
    pids = [process.pid, *process.tree()]
    memory = shared_memory_of(pids)

    async def kill() -> None:
        running = [asyncio.create_task(served.engine.generate([2, 3, i + 4], [NOTHING] * 8, i)) for i in range(8)]
        await _decoding(served, 50)
        os.kill(process.tree()[0], signal.SIGKILL)
        started = time.monotonic()
        for i, result in enumerate(await asyncio.gather(*running, return_exceptions=True)):
            assert isinstance(result, EngineFailure), result
            assert len(result.partials) == 8
            for partial in result.partials:
                assert_exact(served, {version: references["second"]}, [2, 3, i + 4], partial)
        assert time.monotonic() - started < 10
        with pytest.raises(EngineFailure, match="engine-0"):
            await served.engine.generate([2, 3], [NOTHING], 0)

    served.runner.run(kill())
    assert process.wait(10) == 137
    assert not served.fleet.alive(0)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not any(path.exists() for path in memory)
    served.runner.run(served.fleet.restart(0))
    assert served.fleet.alive(0)
    assert_serves(served, references["first"], 0, 7)
    serve(served, "second", tmp_path)


def _other_run(served: Served, tmp_path: Path, **generation) -> RunContext:
    values = {"model": {"max_model_len": 256}, "storage": {"scratch": str(tmp_path)}, "generation": generation}
    return RunContext.create(parse_config(values, "test"))


def _start(run: RunContext, served: Served) -> None:
    async def start() -> None:
        async with Fleet(run, served.first, CorePlan([None], None)):
            raise AssertionError("it started")

    asyncio.run(start())


def test_server_that_dies_at_start_says_why(served: Served, tmp_path: Path) -> None:
    run = _other_run(served, tmp_path, extra_args=["--no-such-option"])
    with pytest.raises(RunError, match=r"engine-0 ended with exit code 2 while starting: .*--no-such-option"):
        _start(run, served)


def test_port_in_use(served: Served, tmp_path: Path) -> None:
    with hold_port("127.0.0.1", 0) as server:
        server.listen()
        run = _other_run(served, tmp_path, base_port=server.getsockname()[1])
        with pytest.raises(UserError, match=f"in use by .*pid {os.getpid()}.*generation.base_port"):
            _start(run, served)
