"""Difficulty knobs of the built-in tasks."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from forebay.config.base import Config

Weight = Annotated[float, Field(gt=0)]
Difficulty = Annotated[int, Field(ge=1, le=3)]
Share = Annotated[float, Field(ge=0, le=1)]
TelecomFamily = Literal[
    "link_budget", "erlang_b", "erlang_c", "ipv4", "ipv6", "alarm", "handover", "timer", "throughput", "tool_call",
    "manual",
]  # fmt: skip


class CycleConfig(Config):
    """The built-in cycle task: terms added in turn until a target is reached."""

    min_terms: Annotated[int, Field(ge=1, le=8)] = 2
    """Fewest terms."""
    max_terms: Annotated[int, Field(ge=1, le=8)] = 7
    """Most terms; more of them are harder."""
    target: Annotated[int, Field(ge=6, le=200)] = 30
    """Highest target; a higher one means more rounds and larger numbers."""
    impatient: Share = 0.65
    """Share of demonstrations that stop after the first round: the habit that RL removes."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_terms > self.max_terms:
            raise ValueError(f"min_terms ({self.min_terms}) is above max_terms ({self.max_terms})")
        return self


class TelecomConfig(Config):
    """The built-in telecom task."""

    families: dict[TelecomFamily, Weight] = Field(
        default={
            "link_budget": 1.0, "erlang_b": 1.0, "erlang_c": 1.0, "ipv4": 1.0, "ipv6": 1.0, "alarm": 1.0,
            "handover": 1.0, "timer": 1.0, "throughput": 1.0, "tool_call": 1.0, "manual": 1.0,
        }
    )  # fmt: skip
    """Family -> weight of the draw; a family that is not named does not occur."""
    difficulty: dict[Difficulty, Weight] = Field(default={1: 1.0, 2: 1.0, 3: 1.0})
    """Difficulty -> weight; what it means is said with each family (docs/tasks.md)."""
    impatient: Share = 0.65
    """Share of the tiny start model's demonstrations that leave out a step: the habit that RL removes."""

    @field_validator("families", "difficulty")
    @classmethod
    def _some(cls, weights: dict[object, float]) -> dict[object, float]:
        if not weights:
            raise ValueError("give at least one")
        return weights
