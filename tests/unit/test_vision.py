"""Training on prompts with images: positions, packing and gradients against transformers' own forward."""

from pathlib import Path

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForImageTextToText

from forebay.config import ImagesConfig, parse_config
from forebay.control.controller import Batch, Group
from forebay.control.groups import Stage
from forebay.control.types import Prompt, Sample, VersionSpan
from forebay.control.wire import pack_batch
from forebay.data.images import Pictures
from forebay.errors import RunError
from forebay.training.batches import decode_chunk
from forebay.training.learner import Learner
from forebay.training.logprobs import PolicyModel
from forebay.training.packing import TrainSequence, pack
from forebay.training.random_models import save_random_model
from forebay.training.reference import Reference
from forebay.training.vision import rope_positions
from tests.support.reference_vl import ReferenceVl
from tests.unit.test_images import photo
from tests.unit.test_learner import Alone, PlainBackend

TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vl")
    save_random_model("qwen2_5_vl", 1, folder)
    return folder


@pytest.fixture(scope="module")
def pictures(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Pictures:
    found = Pictures.of(tmp_path_factory.mktemp("images"), model)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def names(pictures: Pictures) -> list[str]:
    """Of 3 x 3, 2 x 3, 4 x 2 and 1 x 5 tokens."""
    sizes = [(84, 84), (84, 56), (56, 112), (140, 28)]
    return [pictures.keep(photo(*size, seed=i), ImagesConfig()) for i, size in enumerate(sizes)]


@pytest.fixture
def reference(model: Path, pictures: Pictures) -> ReferenceVl:
    return ReferenceVl(model, pictures.folder)


def policy_of(model: Path) -> PolicyModel:
    lm = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    return PolicyModel(lm, TEMPERATURE).eval()


def sequence(pictures: Pictures, images: list[str], seed: int, length: int) -> TrainSequence:
    """Text, image, text, image, ..., text; a response of `length` tokens."""
    rng, token = np.random.default_rng(seed), pictures.vision.token
    prompt = rng.integers(4, 200, 3).tolist()
    for name in images:
        prompt += [token - 2, *[token] * pictures.tokens(name), token - 1, *rng.integers(4, 200, 2).tolist()]
    ids = rng.integers(4, 200, length).tolist()
    return TrainSequence(prompt, ids, [-1.0] * length, float(rng.normal()), True, images=tuple(images))


def mixed(pictures: Pictures, names: list[str]) -> list[TrainSequence]:
    """Several images, one, none, and one that was there before; of different lengths."""
    chosen = [[names[0], names[1]], [names[2]], [], [names[0]], [names[3], names[3], names[2]]]
    return [sequence(pictures, images, i, 5 + 3 * i) for i, images in enumerate(chosen)]


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4)), max_size=4), st.integers(0, 5))
@settings(max_examples=50, deadline=None)
def test_positions_are_those_of_transformers(model: Path, shapes: list[tuple[int, int, int]], rest: int) -> None:
    """Images of (rows, columns) tokens, each after some text; then `rest` more tokens and the response."""
    lm, vision = _lm(model), Pictures.of(model, model).vision  # type: ignore[union-attr]
    prompt: list[int] = []
    for rows, columns, text in shapes:
        prompt += [7] * text + [vision.token] * (rows * columns)
    prompt += [8] * (rest + 1)
    grids = [(1, 2 * rows, 2 * columns) for rows, columns, _ in shapes]
    ids = torch.tensor([[*prompt, 9, 9, 9]])
    expected, _ = lm.model.get_rope_index(
        ids, (ids == vision.token).int(), image_grid_thw=torch.tensor(grids) if grids else None
    )
    assert np.array_equal(rope_positions(np.array(prompt), ids.shape[1], grids, vision), expected[:, 0].numpy())


def _lm(model: Path, cache: dict = {}):  # noqa: B006 (hypothesis calls the test again and again)
    if model not in cache:
        cache[model] = AutoModelForImageTextToText.from_pretrained(model)
    return cache[model]


def test_packed_log_probabilities_are_those_of_single_sequences(
    model: Path, pictures: Pictures, names: list[str], reference: ReferenceVl
) -> None:
    sequences = mixed(pictures, names)
    micro = pack(sequences, pictures)
    assert micro.images is not None
    assert len(micro.images.grids) == 4  # the same image is looked at once
    assert micro.position_ids.shape == (3, 1, sum(map(len, sequences)))
    with torch.no_grad():
        packed, entropy = policy_of(model)(micro)
        single = [reference.logprobs(s.prompt_ids, s.images, s.ids, TEMPERATURE) for s in sequences]
    assert float((packed - torch.cat(single)).abs().max()) < 1e-5
    assert float(packed.std()) > 0.5  # weights that matter
    assert torch.isfinite(entropy).all()


def test_each_image_matters_to_its_own_sequence_only(model: Path, pictures: Pictures, names: list[str]) -> None:
    sequences, policy = mixed(pictures, names), policy_of(model)
    other = pictures.keep(photo(84, 84, seed=99), ImagesConfig())
    changed = [sequences[0], sequences[1], sequences[2], _with(sequences[3], (other,)), sequences[4]]
    with torch.no_grad():
        before, after = policy(pack(sequences, pictures))[0], policy(pack(changed, pictures))[0]
    owner = pack(sequences, pictures).sequence
    gap = (before - after).abs()
    assert float(gap[owner != 3].max()) < 1e-5
    assert float(gap[owner == 3].max()) > 0.01


def _with(sequence: TrainSequence, images: tuple[str, ...]) -> TrainSequence:
    return TrainSequence(sequence.prompt_ids, sequence.ids, sequence.behaviour, sequence.advantage, True, images=images)


def gradients(lm: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in lm.named_parameters() if p.grad is not None}


def test_gradients_are_those_of_single_sequences(
    model: Path, pictures: Pictures, names: list[str], reference: ReferenceVl
) -> None:
    """Of the vision tower too."""
    sequences, policy = mixed(pictures, names), policy_of(model)
    micro = pack(sequences, pictures)
    (policy(micro)[0] * micro.advantages).sum().backward()
    for s in sequences:
        (reference.logprobs(s.prompt_ids, s.images, s.ids, TEMPERATURE) * s.advantage).sum().backward()
    packed, single = gradients(policy.lm), gradients(reference.model)
    assert packed.keys() == single.keys()
    assert any(name.startswith("model.visual.") for name in packed)
    for name, expected in single.items():
        assert float((packed[name] - expected).abs().max()) < 1e-5 * max(1.0, float(expected.abs().max())), name


@pytest.mark.parametrize("texts", [0, 2])
def test_text_alone_still_goes_through_the_tower_and_weighs_nothing(
    model: Path, pictures: Pictures, reference: ReferenceVl, texts: int
) -> None:
    """Ranks that have images wait for the others in the tower."""
    sequences, policy = [sequence(pictures, [], i, 6) for i in range(texts)], policy_of(model)
    micro = pack(sequences, pictures)
    assert micro.weights.tolist() == [1.0] * 6 * texts + [0.0]
    logprobs, _ = policy(micro)
    if texts:
        expected = torch.cat([reference.logprobs(s.prompt_ids, (), s.ids, TEMPERATURE) for s in sequences])
        assert float((logprobs[:-1] - expected).detach().abs().max()) < 1e-5
    (logprobs * micro.weights).sum().backward()
    tower = [p.grad for p in policy.lm.model.visual.parameters()]
    assert all(grad is not None and not grad.any() for grad in tower)


def test_an_image_token_that_was_sampled_is_a_token(
    model: Path, pictures: Pictures, names: list[str], reference: ReferenceVl
) -> None:
    """transformers would look for a second image; it is asked about a word with the same embedding instead."""
    given, token, word = sequence(pictures, [names[1]], 5, 6), pictures.vision.token, 50
    ids = [*given.ids]
    ids[2] = token
    policy = policy_of(model)
    with torch.no_grad():
        reference.model.get_input_embeddings().weight[word] = policy.lm.get_input_embeddings().weight[token]
        reference.model.lm_head.weight[word] = policy.lm.lm_head.weight[token]
        policy.lm.lm_head.weight[word] = policy.lm.lm_head.weight[token]
        ours, _ = policy(
            pack([TrainSequence(given.prompt_ids, ids, given.behaviour, 1.0, True, images=given.images)], pictures)
        )
        stand_in = [word if one == token else one for one in ids]
        expected = reference.logprobs(given.prompt_ids, given.images, stand_in, TEMPERATURE)
    assert float((ours - expected).abs().max()) < 1e-5


def test_a_prompt_that_was_prepared_for_another_model_is_refused(pictures: Pictures, names: list[str]) -> None:
    wrong = _with(sequence(pictures, [names[0]], 0, 4), (names[1],))
    with pytest.raises(RunError, match="a prompt has 9 image tokens, but its images have 6: the data was prepared"):
        pack([wrong], pictures)


def test_the_images_names_travel_with_the_group(names: list[str]) -> None:
    prompt = Prompt("p", (5, 6, 7), "text", '"1"', 3.0, images=tuple(names[:2]))
    sample = Sample((8, 9), (-1.0, -2.0), (VersionSpan(0, 0, 2),), "stop")
    group = Group(4, prompt, 2, Stage.TRAINING, samples=(sample, sample), rewards=(0.0, 1.0))
    body = pack_batch(Batch(1, 0, (group,), ()))
    assert msgpack.unpackb(body)["groups"][0]["images"] == names[:2]
    chunk = decode_chunk(body, parse_config({}, "test").algorithm, 16)
    assert [s.images for s in chunk.sequences] == [tuple(names[:2])] * 2


def test_the_update_does_not_depend_on_which_micro_batches_have_images(
    model: Path, pictures: Pictures, names: list[str]
) -> None:
    """With a penalty per token, which is found in passes of their own."""
    groups = []
    for number, images in enumerate([[names[0]], [], [names[1], names[2]]]):
        prompt = [9] * 70 if not images else sequence(pictures, images, number, 1).prompt_ids
        samples = [
            {"ids": [20 + i] * (3 + 2 * i), "logprobs": [-3.0] * (3 + 2 * i), "reward": float(i), "oldest_version": 0}
            for i in range(3)
        ]
        groups.append({"group_id": number, "prompt_ids": list(prompt), "images": images, "samples": samples})
    body = msgpack.packb({"step": 1, "version": 0, "groups": groups})

    def found(tokens: int) -> tuple[dict[str, Tensor], float]:
        values = {
            "model": {"max_model_len": 96},
            "generation": {"max_new_tokens": 16, "temperature": TEMPERATURE},
            "training": {"micro_batch_tokens": tokens, "streaming": False},
            "algorithm": {"kl": "reward", "kl_coefficient": 0.1},
        }
        config, backend = parse_config(values, "test"), PlainBackend(policy_of(model))
        start = policy_of(model)
        with torch.no_grad():
            for parameter in start.parameters():
                parameter.mul_(0.9)
        reference = Reference(start, torch.device("cpu"), offload=False)
        learner = Learner(config, Alone(), backend.module.lm, backend, reference, pictures=pictures)  # type: ignore[arg-type]
        learner.accumulate(decode_chunk(body, config.algorithm, 16))
        loss = learner.update(1)["loss"]
        return backend.gradients, loss

    (small, loss), (large, same) = found(96), found(4096)
    assert loss == pytest.approx(same, abs=1e-6)
    largest = max(float(g.abs().max()) for g in large.values())
    assert max(float((small[name] - large[name]).abs().max()) for name in large) < 1e-5 * largest
