"""The base of all configuration models: unknown keys are refused, documents stand beside fields."""

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Config(BaseModel):
    """Immutable; unknown keys, infinities and NaN are errors, and so is true or false for a number; the bare string
    under a field is its documentation."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Which `bool` would pass as, being an `int` in Python."""
        kinds = _kinds(cls.model_fields[info.field_name or ""].annotation)
        if kinds & {int, float} and bool not in kinds:
            inside = value.values() if isinstance(value, dict) else value
            if any(isinstance(item, bool) for item in (inside if isinstance(value, dict | list | tuple) else [value])):
                raise ValueError("a number is needed, not true or false")
        return value


def _kinds(annotation: Any) -> set[Any]:
    """The plain types in an annotation."""
    return {annotation}.union(*map(_kinds, get_args(annotation)))
