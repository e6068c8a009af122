"""Data sets of the Hugging Face hub.

Invariant: a hub that does not answer costs seconds, and what is in the library's cache is found all the same.
"""

import http.client
import ssl
import urllib.error
import urllib.request
from typing import Any

from forebay.errors import UserError

_PATIENCE = 5.0
"""Seconds that the hub has for a first answer."""


def load_from_hub(source: str, split: str) -> Any:
    """A `datasets.Dataset`; raises `UserError`."""
    import datasets

    offline = datasets.config.HF_HUB_OFFLINE
    try:
        # The library tries for half a minute; without the hub it finds what is in its cache.
        datasets.config.HF_HUB_OFFLINE = offline or not _answers(datasets.config.HF_ENDPOINT)
        return datasets.load_dataset(source, split=split)
    except (OSError, ValueError, RuntimeError) as error:  # missing, offline, no such split, not a data set
        raise UserError(
            f"data.source: {source}: neither a file of a known ending, nor a directory, nor a data set "
            f"that can be fetched from the Hugging Face hub ({type(error).__name__}: {str(error).splitlines()[0]}): "
            "check the name or the connection"
        ) from None
    finally:
        datasets.config.HF_HUB_OFFLINE = offline


def _answers(url: str) -> bool:
    """Whether there is a server at all, whatever it answers."""
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_PATIENCE).close()
    except (urllib.error.HTTPError, http.client.HTTPException):
        return True
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # the library has certificates of its own
    except OSError:
        return False
    return True
