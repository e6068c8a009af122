"""A reward that tells any two responses apart, for models that know nothing."""

import hashlib


def spread(response: str, answer: object, prompt: str) -> float:
    """Between 0 and 1, from the response's bytes."""
    return hashlib.sha256(response.encode("utf-8", "replace")).digest()[0] / 255
