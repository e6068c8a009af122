"""Leaks: training prompts that are held-out prompts, or nearly.

Invariants:
- Two texts are equal if they differ in letter case, white space and Unicode composition only.
- A prompt with images is compared as a whole, images included: short questions about pictures share their words.

Runs of words as in the decontamination of GPT-3 (Brown et al. 2020, appendix C: 13 words); the share is ours, and takes
the place of their removal of frequent runs together with the rule for boilerplate.
"""

import hashlib
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence

from forebay.config import LeaksConfig
from forebay.data.schema import Draft, Message, Row

_BOILERPLATE = 3
"""Held-out prompts that have a run of words in common which then tells nothing."""


def normalised(text: str) -> str:
    """Without letter case, and every white space a single blank."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    return " ".join(text.casefold().split())


def likeness(messages: Sequence[Message], images: Sequence[str]) -> int:
    """A signed 64-bit number that equal prompts share."""
    text = "\n".join([*(f"{message['role']} {normalised(message['content'])}" for message in messages), *images])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


class HeldOut:
    """Held-out prompts, to look training prompts up in."""

    def __init__(self, rows: Sequence[Row], config: LeaksConfig) -> None:
        self._config = config
        self._equal = {likeness(row.messages, row.images): row.prompt_id for row in rows}
        self._owners: dict[str, list[int]] = defaultdict(list)
        self._names = [row.prompt_id for row in rows]
        self._ids = set(self._names)
        if config.check == "ngrams":
            for place, row in enumerate(rows):
                for run in self._runs(row):
                    self._owners[run].append(place)
            for run in [run for run, owners in self._owners.items() if len(owners) >= _BOILERPLATE]:
                del self._owners[run]
        self._sizes = Counter(place for owners in self._owners.values() for place in owners)

    def leak(self, draft: Draft) -> str | None:
        """Why a prompt must not be used; None if it may. Without a check (`off`): only if it is the very prompt."""
        if self._config.check == "off":
            return f"leak: is the held-out prompt {draft.prompt_id}" if draft.prompt_id in self._ids else None
        same = self._equal.get(likeness(draft.messages, draft.images))
        if same is not None:
            return f"leak: equals the held-out prompt {same}"
        if not self._owners:
            return None
        hits = Counter(place for run in self._runs(draft) for place in self._owners.get(run, ()))
        for place, count in hits.most_common():
            if count >= self._config.share * self._sizes[place]:
                return (
                    f"leak: has {count} of the {self._sizes[place]} runs of {self._config.words} words of the held-out "
                    f"prompt {self._names[place]}"
                )
        return None

    def _runs(self, row: Row | Draft) -> set[str]:
        if row.images:
            return set()
        words, size = normalised(" ".join(message["content"] for message in row.messages)).split(), self._config.words
        return {" ".join(words[i : i + size]) for i in range(len(words) - size + 1)}
