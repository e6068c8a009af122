"""The account of groups: every admitted group has exactly one fate, and the sums are checked.

Invariant, at every moment: admitted == trained + filtered + stale + failed + in flight.
A run that breaks it stops with `LedgerError`: it would have lost or invented a sample.
"""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from forebay.control.types import Fate, Prompt, Sample
from forebay.errors import RunError


class LedgerError(RunError):
    """The account does not add up: a bug of ours, never the user's mistake."""


class Entry(NamedTuple):
    """How one group ended."""

    group_id: int
    prompt: Prompt
    fate: Fate
    reason: str
    """Why, in words; empty for a trained group."""
    samples: tuple[Sample, ...]
    rewards: tuple[float, ...]
    trained_version: int | None
    """Version that trained it; None unless trained."""
    attempts: int
    """Times it was generated; more than one after an engine failure or a retry for staleness."""
    engines: tuple[int, ...]
    """Engines that worked on it, in turn."""
    expected: float | None = None
    """Mean response length in tokens as predicted when it was first started, by what the run had shown until then."""

    @property
    def oldest_version(self) -> int | None:
        """Oldest version that generated any of its tokens; None if nothing was generated."""
        return min([span.version for sample in self.samples for span in sample.versions], default=None)

    @property
    def staleness(self) -> int | None:
        """Versions between its oldest token and the version that trained it; None unless trained."""
        trained, oldest = self.trained_version, self.oldest_version
        return None if trained is None or oldest is None else trained - oldest


class Ledger:
    """Admissions and fates of a run. It keeps counts; the entries go to `sink`, so that it never grows."""

    def __init__(self, sink: Callable[[Entry], None]) -> None:
        self._sink = sink
        self._open: set[int] = set()
        self._fates: Counter[Fate] = Counter()
        self.admitted = 0

    def admit(self, group_id: int) -> None:
        """A group comes in; raises `LedgerError` if its id was seen before."""
        if group_id != self.admitted:
            raise LedgerError(f"ledger: group {group_id} admitted out of turn, expected {self.admitted}")
        self.admitted += 1
        self._open.add(group_id)

    def settle(self, entry: Entry) -> None:
        """A group leaves; raises `LedgerError` if it is not in flight."""
        if entry.group_id not in self._open:
            raise LedgerError(f"ledger: group {entry.group_id} has a second fate ({entry.fate}) or was never admitted")
        self._open.remove(entry.group_id)
        self._fates[entry.fate] += 1
        self._sink(entry)

    def check(self, in_flight: int) -> None:
        """Compare the account with the number of groups the caller really holds."""
        if len(self._open) != in_flight or self.admitted != self._fates.total() + in_flight:
            raise LedgerError(
                f"ledger: {self.admitted} groups admitted, fates {self.fates()}, but {in_flight} are held in flight"
            )

    def fates(self) -> dict[str, int]:
        """Counts: admitted, each fate, in_flight. The first equals the sum of the others."""
        counts = {"admitted": self.admitted} | {fate.value: self._fates[fate] for fate in Fate}
        return counts | {"in_flight": len(self._open)}
