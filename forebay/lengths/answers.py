"""Answers of the start model that outlast an interruption and serve later runs: `<cache>/lengths/<fingerprint>/`.

Invariants:
- The fingerprint covers what determines an answer besides the prompt: the weights, the engine's settings, the sampling.
  An answer is found by the hash of its prompt's token ids, so whatever else changes in the data, it stays valid.
- A file is complete under its name: it is written beside its place and moved there. Files are only added; of two
  answers to one prompt (two runs at the same time) either is good.
"""

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from forebay.config import RunConfig
from forebay.errors import RunError

PART = 32
"""Answers in one file: what a killed run may lose."""
RECIPE = 1
"""Raise it when a change of the code changes what is asked of the engine."""
SCHEMA = pa.schema(
    [
        ("prompt", pa.string()),
        ("lengths", pa.list_(pa.int32())),
        ("truncated", pa.list_(pa.bool_())),
        ("logprobs", pa.list_(pa.float64())),
    ]
)


@dataclass(frozen=True, slots=True)
class Answer:
    """The responses to one prompt; none if every engine refuses it."""

    lengths: tuple[int, ...]
    truncated: tuple[bool, ...]
    logprobs: tuple[float, ...]
    """Of each response, summed over its tokens."""


class Answers:
    """What is known and what is added. Use it as a context manager: leaving it writes what is not yet on disk."""

    def __init__(self, folder: Path, what: Mapping[str, Any]) -> None:
        self._folder, self._what = folder, what
        self._new: list[tuple[str, Answer]] = []
        self._known: dict[str, Answer] = {}
        for path in sorted(folder.glob("*.parquet")):
            self._known.update(_read(path))

    def __enter__(self) -> "Answers":
        return self

    def __exit__(self, *exception: object) -> None:
        self._flush()

    def get(self, key: str) -> Answer | None:
        """The answer to the prompt of this key (`prompt_key`), if it is known."""
        return self._known.get(key)

    def add(self, key: str, answer: Answer) -> None:
        """Keep an answer; every `PART` of them are written at once."""
        self._known[key] = answer
        self._new.append((key, answer))
        if len(self._new) >= PART:
            self._flush()

    def _flush(self) -> None:
        if not self._new:
            return
        columns = {
            "prompt": [key for key, _ in self._new],
            "lengths": [answer.lengths for _, answer in self._new],
            "truncated": [answer.truncated for _, answer in self._new],
            "logprobs": [answer.logprobs for _, answer in self._new],
        }
        place = self._folder / f"{uuid.uuid4().hex}.parquet"
        unfinished = place.with_suffix(".unfinished")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            settings = self._folder / "settings.json"
            if not settings.exists():
                settings.write_text(json.dumps(self._what, indent=1) + "\n", encoding="utf-8")
            pq.write_table(pa.table(columns, schema=SCHEMA), unfinished)
            unfinished.replace(place)
        except OSError as error:
            raise RunError(f"cannot write {place} ({error})") from None
        self._new = []


def sampled_answers(cache: Path, config: RunConfig, model: str) -> Answers:
    """`lengths.samples` responses, as training samples them. `model`: digest of the weights."""
    how = {"samples": config.lengths.samples, "temperature": config.generation.temperature, "seed": config.seed}
    return _open(cache, config, model, {"kind": "sampled", **how})


def greedy_answers(cache: Path, config: RunConfig, model: str) -> Answers:
    """One response, the most likely token at every step."""
    return _open(cache, config, model, {"kind": "greedy"})


def prompt_key(tokens: Sequence[int], images: Sequence[str] = ()) -> str:
    """SHA-256 of the token ids and the names of the images."""
    return hashlib.sha256(" ".join([*map(str, tokens), *images]).encode()).hexdigest()


def model_digest(folder: Path) -> str:
    """SHA-256 over the weights and the configuration of a Hugging Face folder."""
    files = [folder / "config.json", folder / "generation_config.json", *sorted(folder.glob("*.safetensors"))]
    digest = hashlib.sha256()
    try:
        for path in files:
            if path.exists():
                with path.open("rb") as file:
                    digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    except OSError as error:
        raise RunError(f"{error.filename or folder}: {error.strerror}") from None
    return digest.hexdigest()


def _open(cache: Path, config: RunConfig, model: str, how: Mapping[str, Any]) -> Answers:
    generation = config.generation
    what = {
        "recipe": RECIPE,
        "model": model,
        "dtype": config.model.dtype,
        "max_model_len": config.model.max_model_len,
        "max_new_tokens": generation.max_new_tokens,
        "extra_args": generation.extra_args,
        **how,
    }
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
    return Answers(cache / "lengths" / key, what)


def _read(path: Path) -> dict[str, Answer]:
    try:
        rows = pq.read_table(path, schema=SCHEMA).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise RunError(f"{path}: cannot be read ({str(error).splitlines()[0]}); delete it and run again") from None
    return {
        row["prompt"]: Answer(tuple(row["lengths"]), tuple(row["truncated"]), tuple(row["logprobs"])) for row in rows
    }
