"""Where prompts come from, how they are checked and shared out. Imports no torch, no pyarrow."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from forebay.config.base import Config
from forebay.config.tasks import CycleConfig, TelecomConfig

Positive = Annotated[int, Field(gt=0)]
Natural = Annotated[int, Field(ge=0)]
_SECRET = re.compile(r"\w+://([^/@]*@|[^@]*:[^@]*@)")
"""A URI with credentials; secrets may have slashes in them. An object's name may have an `@`."""


def refuse_credentials(source: str) -> None:
    """Raises `ValueError`, which does not repeat them."""
    if _SECRET.match(source):
        raise ValueError("no credentials in a URI; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")


class MazeConfig(Config):
    """The built-in maze task."""

    sizes: dict[int, Annotated[float, Field(gt=0)]] = Field(default={3: 0.3, 4: 0.3, 5: 0.25, 6: 0.15})
    """Side length -> weight of the draw."""
    impatient: Annotated[float, Field(ge=0, le=1)] = 0.65
    """Share of demonstrations that cut through a wall at dead ends: the habit that RL removes."""

    @field_validator("sizes")
    @classmethod
    def _sides(cls, sizes: dict[int, float]) -> dict[int, float]:
        if not sizes or not all(2 <= side <= 8 for side in sizes):
            raise ValueError("give at least one side length, each from 2 to 8")
        return sizes


class ColumnsConfig(Config):
    """Where a data set keeps what Forebay needs, for layouts that are not recognised by themselves (docs/data.md). A
    dot goes into an object: `reward_model.ground_truth`."""

    prompt: str | None = None
    """A text, or a list of chat messages ({role, content}). null: recognised."""
    answer: str | None = None
    """What the verifier checks against: text, number, or a JSON-like object. null: recognised."""
    answer_form: Literal["auto", "whole", "hashes", "boxed"] = "auto"
    """The answer is the `whole` column, what follows its last `####`, or the content of its last `\\boxed{}`. `auto`:
    as the layout has it, `whole` for a column that is named here."""
    verifier: str = "verifier"
    """The row's own verifier, by name (see `reward.options`); there need not be such a column."""
    images: str = "images"
    """For models that read images: a list of them (or a single one), each bytes, {bytes, path}, a path, or a base64
    data URL. They stand where the prompt says `<image>`, or else before its last message. May be absent."""
    tags: list[str] = Field(default=[])
    """More columns whose values are kept as tags, by which evaluation groups its results."""


class ImagesConfig(Config):
    """Images in prompts. A row whose images are missing, broken or too many is quarantined."""

    folder: str | None = None
    """What paths in the images column are relative to, and must lie below; null: the source file's folder."""
    max_per_prompt: Positive = 8
    """Most images of one prompt."""
    max_mb: Annotated[float, Field(gt=0)] = 20.0
    """Largest file of an image, in MB."""
    max_pixels: Annotated[int, Field(ge=3136)] | None = None
    """Larger images are scaled down to so many pixels (Qwen2.5-VL: one token for 28 x 28 pixels); null: as many as
    the model's own processor allows, which may be more than fits in model.max_model_len."""


class LeaksConfig(Config):
    """Training prompts that are, or nearly are, held-out prompts."""

    check: Literal["ngrams", "equal", "off"] = "ngrams"
    """`equal`: the same but for letter case and white space. `ngrams`: also if a training prompt has at least `share`
    of a held-out prompt's runs of `words` words; runs that three or more held-out prompts have are boilerplate. `off`:
    only what is a held-out prompt to the letter, which no split ever shares."""
    action: Literal["drop", "refuse"] = "drop"
    """Leave such training prompts out (counted, in quarantine.parquet), or stop."""
    words: Annotated[int, Field(ge=4)] = 13
    """Words in a run."""
    share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Of the held-out prompt's runs."""


class DataConfig(Config):
    """Prompts: where from and how many. The three splits never share a prompt (checked by hash)."""

    source: str = "builtin:maze"
    """`builtin:maze`, `builtin:cycle`, `builtin:telecom`, `builtin:reasoning_gym/NAME` (docs/tasks.md),
    `builtin:shapes` (questions about pictures), a .parquet / .jsonl / .json / .csv / .arrow file, a directory of such
    files, either of them under s3://, or the name of a Hugging Face data set."""
    test_source: str | None = None
    """Held-out test prompts from here (like `source`) instead of from a part of `source`."""
    hub_split: str = "train"
    """Which split to read of a data set on the hub, or of a directory with files named by split."""
    test_hub_split: str = "test"
    """The same for `test_source`."""
    columns: ColumnsConfig = ColumnsConfig()
    """Column names in `source`."""
    instruction: str = ""
    """Added to the last message of each prompt, after an empty line: how to write the answer, for example."""
    verifiers: dict[str, str] = Field(default={})
    """Verifiers of the rows that name none, by their column `data_source` (verl's): {"aime*": dapo_math}."""
    duplicates: Literal["normalised", "exact"] = "normalised"
    """Which rows repeat an earlier prompt: `normalised` looks past letter case and white space. Repeats are counted and
    left out; with another answer they are bad rows."""
    leaks: LeaksConfig = LeaksConfig()
    """Training prompts that are held-out prompts too."""
    thinking: bool | None = None
    """The chat template's `enable_thinking`; null: as the template has it by itself."""
    max_prompt_tokens: Positive | None = None
    """Longer prompts are quarantined; null: those that leave no room for a response."""
    length_filter: Literal["all", "needed"] = "all"
    """Tokenize every prompt, so that all that are too long are known, or only as many as the splits need."""
    workers: Positive | None = None
    """Processes that read; null: one for each core, none for small sources."""
    images: ImagesConfig = ImagesConfig()
    """Bounds of images in prompts."""
    train_prompts: Positive = 1024
    """At most so many training prompts (a built-in task makes exactly so many)."""
    validation_prompts: Natural = 128
    """Prompts for looking at while developing."""
    test_prompts: Positive = 512
    """Held-out prompts, used once, at the end."""
    max_quarantined: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of bad rows above which the run stops."""
    maze: MazeConfig = MazeConfig()
    """Settings of `builtin:maze`."""
    cycle: CycleConfig = CycleConfig()
    """Settings of `builtin:cycle`."""
    telecom: TelecomConfig = TelecomConfig()
    """Settings of `builtin:telecom`."""

    @field_validator("source", "test_source")
    @classmethod
    def _without_secrets(cls, source: str | None) -> str | None:
        if source is not None:
            refuse_credentials(source)
        return source

    @model_validator(mode="after")
    def _test_source(self) -> Self:
        if self.test_source is not None and "builtin:" in (self.test_source[:8], self.source[:8]):
            raise ValueError("test_source goes with a source of your own: a built-in task draws its own test prompts")
        if self.test_source == self.source and self.test_hub_split == self.hub_split:
            raise ValueError("test_source is the source itself: remove it, test prompts then are a part of the source")
        return self
