"""A tiny random Qwen2.5-VL end to end: a real vLLM server, the real trainer, and transformers as the reference."""

import asyncio
import functools
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from forebay.config import ImagesConfig, parse_config
from forebay.control.types import NOTHING, RefreshMode, RequestRefused, Sample, Snapshot
from forebay.data.images import Pictures
from forebay.data.prepare import prepare_data
from forebay.data.schema import Row, read_rows
from forebay.data.shapes import draw_shapes
from forebay.generation.fleet import Fleet
from forebay.generation.images import Encoder
from forebay.launch.cores import plan_cores
from forebay.run import RunContext
from forebay.training.logprobs import PolicyModel
from forebay.training.packing import TrainSequence, pack
from forebay.training.random_models import save_random_model
from forebay.training.snapshots import verify_files
from tests.integration.test_trainer import children, finish, start, until
from tests.support.control_stub import ControlStub
from tests.support.reference_vl import ReferenceVl
from tests.support.snapshot_writer import write_snapshot

TEMPERATURE = 0.8
STEPS, GROUPS = 4, 3
LEARNING_RATE = 5e-4


def make_run(scratch: Path, **training: Any) -> RunContext:
    values = {
        "name": "vision",
        "model": {"path": "builtin:random-qwen2_5_vl", "max_model_len": 192},
        "data": {"source": "builtin:shapes", "train_prompts": 12, "validation_prompts": 2, "test_prompts": 2},
        "reward": {"name": "exact"},
        "generation": {"max_new_tokens": 96, "kv_cache": "64M", "temperature": TEMPERATURE, "group_size": 4},
        "control": {"batch_groups": GROUPS, "refresh": "retract"},
        "schedule": {"minibatch_prompts": 2, "minibatch_slack": 0},
        "training": {
            "steps": STEPS,
            "learning_rate": LEARNING_RATE,
            "warmup_steps": 0,
            "micro_batch_tokens": 256,
            "grad_clip": 100.0,
            "step_timeout_s": 60,
            **training,
        },
        "algorithm": {"mismatch_alarm": 10.0},
        "storage": {"scratch": str(scratch)},
    }
    run = RunContext.create(parse_config(values, "test"))
    prepare_data(run)
    return run


@dataclass
class Served:
    runner: asyncio.Runner
    fleet: Fleet
    run: RunContext
    pictures: Pictures
    rows: list[Row]
    """One image each, and one with three of different sizes."""
    other: Path
    """A model with other weights, the vision tower's too."""

    @property
    def engine(self):
        return self.fleet.engines[0]

    def reference(self, folder: Path) -> ReferenceVl:
        return ReferenceVl(folder, self.pictures.folder)

    def generate(self, row: Row, seed: int, prefixes: list[Sample] | None = None) -> list[Sample]:
        prefixes = prefixes or [NOTHING] * 4
        return self.runner.run(self.engine.generate(row.prompt_ids, prefixes, seed, images=row.images))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("vision")
    run = make_run(folder / "scratch")
    other = folder / "other"
    other.mkdir()
    save_random_model("qwen2_5_vl", 7, other)
    pictures = Pictures.of(run.images, run.start_model)
    assert pictures is not None
    rows = read_rows(run.data / "train.parquet")
    rows = [*rows[:5], several(rows[0], pictures)]
    with asyncio.Runner() as runner:
        fleet = Fleet(run, run.start_model, plan_cores(run.config))
        runner.run(fleet.__aenter__())
        try:
            yield Served(runner, fleet, run, pictures, rows, other)
        finally:
            runner.run(fleet.__aexit__(None, None, None))


def several(row: Row, pictures: Pictures) -> Row:
    """A prompt with three images: of 9, 4 and 9 tokens."""
    names = [
        pictures.keep(draw_shapes(random.Random(i))[2], ImagesConfig(max_pixels=size))
        for i, size in enumerate((7056, 3136, 7056))
    ]
    token, ids = pictures.vision.token, [5]
    for name in names:
        ids += [token - 2, *[token] * pictures.tokens(name), token - 1, 9, 10]
    return Row("several", row.messages, row.prompt, tuple(ids), row.answer, row.source, images=tuple(names))


def assert_exact(reference: ReferenceVl, row: Row, samples: list[Sample]) -> None:
    """The engine's log-probabilities are transformers'."""
    for sample in samples:
        ids = plain_part(sample.ids, reference)
        with torch.no_grad():
            expected = reference.logprobs(row.prompt_ids, row.images, ids, TEMPERATURE)
        assert torch.allclose(torch.tensor(sample.logprobs[: len(ids)]).double(), expected, rtol=0, atol=1e-3)


def plain_part(ids: Sequence[int], reference: ReferenceVl) -> Sequence[int]:
    """Up to the first image token that was sampled: transformers would look for an image there."""
    token = reference.model.config.image_token_id
    return ids[: list(ids).index(token)] if token in ids else ids


def refresh(served: Served, folder: Path, tmp_path: Path, version: int, mode: RefreshMode = "retract") -> Snapshot:
    snapshot = write_snapshot(folder, tmp_path / f"v{version}", version)
    served.runner.run(served.engine.refresh(snapshot, mode))
    return snapshot


def test_the_engine_reads_the_prompt_that_is_trained(served: Served) -> None:
    """The very token ids, the images where they stand, by vLLM's own word."""
    row = served.rows[-1]
    features = Encoder(served.pictures).features(row.prompt_ids, row.images)
    body = {"token_ids": row.prompt_ids, "features": features, "return_token_ids": True}
    answer = httpx.post(
        f"{served.engine.url}/inference/v1/generate",
        json={**body, "sampling_params": {"max_tokens": 1}},
        headers={"Authorization": f"Bearer {served.run.token}"},
        timeout=60,
    ).json()
    assert answer["prompt_token_ids"] == list(row.prompt_ids)
    assert answer["mm_placeholders"] == features["mm_placeholders"]
    assert [place["length"] for place in answer["mm_placeholders"]["image"]] == [9, 4, 9]


def test_engine_trainer_and_transformers_agree(served: Served) -> None:
    """Log-probabilities of sampled responses to one image, three images, and none."""
    reference, token = served.reference(served.run.start_model), served.pictures.vision.token
    text = Row("text", (), "", tuple(range(20, 40)), "", "")
    policy = PolicyModel(served.reference(served.run.start_model).model, TEMPERATURE)
    sequences: list[TrainSequence] = []
    given: list[float] = []
    for seed, row in enumerate([*served.rows, text]):
        samples = served.generate(row, seed)
        assert_exact(reference, row, samples)
        for sample in samples:
            sequences.append(TrainSequence(row.prompt_ids, sample.ids, sample.logprobs, 0.0, True, images=row.images))
            given += sample.logprobs
    with torch.no_grad():
        trained, _ = policy(pack(sequences, served.pictures))
    assert float((trained - torch.tensor(given)).abs().max()) < 1e-3
    assert float(trained.std()) > 0.5  # weights that matter
    assert any(token in s.ids for s in sequences)  # sampled image tokens are among them


def test_an_image_changes_what_the_engine_says(served: Served) -> None:
    """Equal token ids, different images: the prefix cache must not take one for the other."""
    rows = served.rows
    other = next(name for row in rows[1:5] for name in row.images if name not in rows[0].images)
    reference = served.reference(served.run.start_model)
    changed = Row("changed", (), "", rows[0].prompt_ids, "", "", images=(other,))
    plain, swapped = served.generate(rows[0], 3), served.generate(changed, 3)
    assert_exact(reference, rows[0], plain)
    assert_exact(reference, changed, swapped)
    assert [s.logprobs[0] for s in plain] != [s.logprobs[0] for s in swapped]


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_new_weights_of_the_vision_tower_are_used_at_once(served: Served, tmp_path: Path, mode: RefreshMode) -> None:
    """What the old tower had made of an image is forgotten, and the same prompt is answered by the new one."""
    old, new = served.reference(served.run.start_model), served.reference(served.other)
    refresh(served, served.run.start_model, tmp_path, 1)
    for row in served.rows[:2]:
        assert_exact(old, row, served.generate(row, 1))
    refresh(served, served.other, tmp_path, 2, mode)
    for row in served.rows[:2]:
        assert_exact(new, row, served.generate(row, 1))


def test_a_response_goes_on_across_a_refresh_and_from_a_prefix(served: Served, tmp_path: Path) -> None:
    """Retract reads the images again with the new tower; a response that was broken off goes on elsewhere."""
    refresh(served, served.run.start_model, tmp_path, 1)
    snapshot = write_snapshot(served.other, tmp_path / "v2", 2)
    rows = served.rows * 4  # enough to be busy until the new weights are ready
    models = {1: served.reference(served.run.start_model), 2: served.reference(served.other)}

    async def story() -> list[list[Sample]]:
        jobs = [
            asyncio.create_task(served.engine.generate(row.prompt_ids, [NOTHING] * 8, i, images=row.images))
            for i, row in enumerate(rows)
        ]
        while served.engine.load().tokens == before:  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.005)
        await served.engine.refresh(snapshot, "retract")
        return await asyncio.gather(*jobs)

    before = served.engine.load().tokens
    answers = served.runner.run(story())
    met = 0
    for row, samples in zip(rows, answers, strict=True):
        both = [sample for sample in samples if len(sample.versions) == 2]
        met += len(both)
        for sample in [*both[:2], samples[0]]:
            assert_spans(models, row, sample)
    assert met > 10
    cut = [_cut(sample, 5) for sample in answers[-1] if len(sample.ids) > 8]
    assert cut
    for sample in served.generate(rows[-1], 9, cut):
        assert_spans(models, rows[-1], sample)


def assert_spans(models: dict[int, ReferenceVl], row: Row, sample: Sample) -> None:
    """Each token is of the version that it claims."""
    ids = plain_part(sample.ids, models[1])
    for span in sample.versions:
        with torch.no_grad():
            expected = models[span.version].logprobs(row.prompt_ids, row.images, ids, TEMPERATURE)
        given = torch.tensor(sample.logprobs[span.start : min(span.end, len(ids))]).double()
        assert torch.allclose(given, expected[span.start : span.end], rtol=0, atol=1e-3)


def _cut(sample: Sample, length: int) -> Sample:
    spans = [s for s in sample.versions if s.start < length]
    last = spans[-1]
    spans[-1] = type(last)(last.version, last.start, min(last.end, length))
    return Sample(sample.ids[:length], sample.logprobs[:length], tuple(spans), None)


def test_a_prompt_that_does_not_fit_its_images_is_refused(served: Served) -> None:
    row = served.rows[0]
    ids = list(row.prompt_ids)
    ids.remove(served.pictures.vision.token)
    with pytest.raises(RequestRefused, match="the prompt has 8 image tokens, its images have 9"):
        served.runner.run(served.engine.generate(ids, [NOTHING], 0, images=row.images))


@pytest.fixture(scope="module")
def batches(served: Served, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Groups that the start model's engine has answered, with rewards by chance; the third of each has no image."""
    refresh(served, served.run.start_model, tmp_path_factory.mktemp("start"), 1)
    rng, batches = random.Random(5), {}
    reference = served.reference(served.run.start_model)
    text = Row("text", (), "", tuple(range(20, 40)), "", "")
    for step in range(1, STEPS + 1):
        groups = []
        for place, row in enumerate([served.rows[step % 5], served.rows[-1], text]):
            samples = []
            for sample in served.generate(row, 10 * step + place):
                ids = list(plain_part(sample.ids, reference))
                logprobs = list(sample.logprobs[: len(ids)])
                samples.append({"ids": ids, "logprobs": logprobs, "reward": rng.random(), "oldest_version": 0})
            number, ids = 10 * step + place, list(row.prompt_ids)
            groups.append({"group_id": number, "prompt_ids": ids, "images": list(row.images), "samples": samples})
        batches[step] = {"step": step, "version": step - 1, "groups": groups}
    return batches


@pytest.fixture(scope="module")
def golden(
    served: Served, batches: dict[int, dict[str, Any]]
) -> Callable[[bool], tuple[dict[str, torch.Tensor], list[float]]]:
    """With the tower frozen or not: (weights, losses) of a loop in plain torch over transformers' own forward of single
    sequences."""
    return functools.cache(lambda frozen: plain_loop(served, batches, frozen))


def plain_loop(
    served: Served, batches: dict[int, dict[str, Any]], frozen: bool
) -> tuple[dict[str, torch.Tensor], list[float]]:
    reference = served.reference(served.run.start_model)
    lm, losses = reference.model, []
    lm.model.visual.requires_grad_(not frozen)
    optimizer = torch.optim.AdamW(
        [p for p in lm.parameters() if p.requires_grad], LEARNING_RATE, (0.9, 0.95), weight_decay=0.0
    )
    for batch in batches.values():
        loss, tokens = torch.zeros((), dtype=torch.float64), 0
        for group in batch["groups"]:
            rewards = torch.tensor([s["reward"] for s in group["samples"]], dtype=torch.float64)
            advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).tolist()
            for sample, advantage in zip(group["samples"], advantages, strict=True):
                if not sample["ids"]:
                    continue
                logprobs = reference.logprobs(group["prompt_ids"], group["images"], sample["ids"], TEMPERATURE)
                ratio = (logprobs - torch.tensor(sample["logprobs"])).exp()
                plain, clipped = ratio * advantage, ratio.clamp(0.8, 1.28) * advantage
                loss = loss - torch.where(plain < clipped, plain, clipped).sum()
                tokens += len(sample["ids"])
        optimizer.zero_grad()
        (loss / tokens).backward()
        optimizer.step()
        losses.append(float(loss.detach()) / tokens)
    return {name: p.detach() for name, p in lm.named_parameters()}, losses


def trainer_run(served: Served, folder: Path, **training: Any) -> RunContext:
    run = make_run(folder, **training)
    shutil.copytree(served.run.images, run.images, dirs_exist_ok=True)
    return run


@pytest.fixture(scope="module")
def calm(
    served: Served, batches: dict[int, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunContext, ControlStub]:
    """One rank, nothing happens."""
    run = trainer_run(served, tmp_path_factory.mktemp("calm"), checkpoint_every=2)
    with ControlStub(run.token, batches.__getitem__) as control:
        assert finish(start(run, control.url)) == (0, "")
    return run, control


def test_the_engine_takes_the_trainers_weights(served: Served, calm: tuple[RunContext, ControlStub]) -> None:
    run, control = calm
    served.runner.run(served.engine.refresh(Snapshot(**control.snapshots[-1]), "retract"))
    trained = ReferenceVl(run.trained_model, run.images)
    for row in (served.rows[0], served.rows[-1]):
        samples = served.generate(row, 4)
        assert samples[0].oldest_version == STEPS
        assert_exact(trained, row, samples)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {}),
        (2, {"zero_stage": 2}),
        (2, {"zero_stage": 3, "freeze_vision": True}),
        (2, {"backend": "fsdp2"}),
    ],
)
def test_the_trainer_is_a_plain_torch_loop(
    served: Served,
    batches: dict[int, dict[str, Any]],
    calm: tuple[RunContext, ControlStub],
    golden: Callable[[bool], tuple[dict[str, torch.Tensor], list[float]]],
    tmp_path: Path,
    ranks: int,
    options: dict[str, Any],
) -> None:
    """With and without the tower. Ranks and micro-batches have images or none as it happens."""
    run, control = calm
    if options:
        run = trainer_run(served, tmp_path, ranks=ranks, **options)
        with ControlStub(run.token, batches.__getitem__) as control:
            assert finish(start(run, control.url)) == (0, "")
    frozen = options.get("freeze_vision", False)
    expected, losses = golden(frozen)
    verify_files(run.trained_model)
    trained, first = ReferenceVl(run.trained_model, run.images), served.reference(run.start_model).model
    error, size = torch.zeros(2), torch.zeros(2)
    for name, p in trained.model.named_parameters():
        part = int(name.startswith("model.visual."))
        error[part] += (p.detach() - expected[name]).square().sum()
        size[part] += (expected[name] - first.get_parameter(name).detach()).square().sum()
    # As a whole: of a gradient that is 0 by nature (a key's bias) AdamW makes steps of rounding noise.
    assert float(error[0]) < 1e-6 * float(size[0])
    assert float(error[1]) <= 1e-6 * float(size[1])
    assert (float(size[1]) == 0) == frozen
    assert [message["metrics"]["loss"] for message in control.steps] == pytest.approx(losses, abs=1e-5)


def test_a_killed_trainer_goes_on_with_the_images(
    served: Served, batches: dict[int, dict[str, Any]], calm: tuple[RunContext, ControlStub], tmp_path: Path
) -> None:
    """The weights are those of a run that nothing happened to, bit by bit."""
    killed = trainer_run(served, tmp_path, checkpoint_every=2)
    with ControlStub(killed.token, lambda step: batches[step] if step < STEPS else None) as control:
        process = start(killed, control.url)
        try:
            until(lambda: control.checkpoints == [2], process)
            for pid in children(process) or [process.pid]:
                os.kill(pid, signal.SIGKILL)
            assert process.wait(60) != 0
        finally:
            process.kill()
            process.communicate()
    with ControlStub(killed.token, batches.__getitem__) as control:
        assert finish(start(killed, control.url)) == (0, "")
    assert [message["step"] for message in control.steps] == [3, 4]
    expected, resumed = (load_file(run.trained_model / "model.safetensors") for run in (calm[0], killed))
    assert any(name.startswith("visual.") for name in expected)
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)
