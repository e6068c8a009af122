"""The base of all configuration models: unknown keys are refused, documents stand beside fields."""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Immutable; unknown keys, infinities and NaN are errors; the bare string under a field is its documentation."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )
