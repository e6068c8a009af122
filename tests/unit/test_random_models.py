"""The start models with random weights: complete folders, the same for the same seed, that read every text."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from forebay.config import parse_config
from forebay.data.start_model import RANDOM, RANDOM_MODELS, resolve_start_model
from forebay.run import RunContext
from forebay.training.random_models import ARCHITECTURES


def resolve(folder: Path, name: str, seed: int = 0) -> Path:
    run = RunContext.create(
        parse_config({"model": {"path": name}, "seed": seed, "storage": {"scratch": str(folder)}}, "")
    )
    path, told = resolve_start_model(run, ())
    assert told is None
    return path.resolve()


def test_the_names_are_those_of_the_architectures() -> None:
    assert sorted(RANDOM_MODELS) == sorted(RANDOM + name for name in ARCHITECTURES)


@pytest.mark.parametrize("name", RANDOM_MODELS)
def test_a_random_model_is_a_whole_model(tmp_path: Path, name: str) -> None:
    folder = resolve(tmp_path, name)
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == name.removeprefix(RANDOM)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "Grüße, 17 + 4 = 21!\n"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
    assert len(chat) == len(ids) + 2
    auto = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    lm = auto.from_pretrained(folder, dtype=torch.float32)
    assert sum(p.numel() for p in lm.parameters()) < 400_000
    logprobs = [lm(torch.tensor([row])).logits[0, -1].log_softmax(-1) for row in (chat, chat[::-1])]
    assert float((logprobs[0] - logprobs[1]).detach().abs().max()) > 0.1
    assert (
        config.get("text_config", config)["eos_token_id"]
        == tokenizer.eos_token_id
        == tokenizer.convert_tokens_to_ids("<|end|>")
    )


def test_the_seed_determines_the_weights(tmp_path: Path) -> None:
    name = RANDOM_MODELS[0]
    folders = [resolve(tmp_path / "a", name), resolve(tmp_path / "b", name), resolve(tmp_path / "a", name, seed=1)]
    first, second, other = (load_file(folder / "model.safetensors") for folder in folders)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
