"""Responses on a virtual engine, and the samples that come of them.

Invariants:
- Each token belongs to the version that served when it was decoded.
- A response is no object of its own: an engine holds hundreds, and at every event the processor would wait for some
  that are not in its cache. It is a place in its group's `Job`, a number for each fact.
- Samples are made when a group leaves an engine, all at once: so they lie together in memory as well.
"""

from array import array
from collections.abc import Container, Sequence
from dataclasses import dataclass

from forebay.control.groups import Group
from forebay.control.types import Sample, VersionSpan

TURNS = 20
"""Bits of a moment that number the admissions of one decode step; those above are the step."""

_new = tuple.__new__  # what `VersionSpan(...)` calls, in half the time: every response has one or more


@dataclass(frozen=True, slots=True)
class Change:
    """An engine's weights from a moment on, which is a decode step and the admissions before it in that step."""

    moment: int
    version: int
    kept: bool
    """It went on with the KV cache of the version before."""


@dataclass(slots=True, eq=False)
class Job:
    """A group on an engine."""

    group: Group
    attempt: int
    prompt_tokens: int
    wholes: Sequence[range]
    """What stands for the tokens of each response once it has ended."""
    prefixes: Sequence[Sample]
    """What there was of each when it was admitted last: computed again then, with the prompt."""
    moments: "array[int]"
    """At which each was admitted last: the step, and the admissions before it in that step."""
    unfinished: int
    """Responses whose end its owner has not heard of."""
    prefilled: bool = False
    """Whether its prompt has been computed here."""

    def done(self, place: int) -> int:
        """Tokens of the prefix."""
        return len(self.prefixes[place].ids)

    def start(self, place: int) -> int:
        """Step at which it was admitted last."""
        return self.moments[place] >> TURNS

    def interrupt(self, place: int, advance: int, history: Sequence[Change]) -> None:
        """It is admitted no longer, and has so many tokens more than before."""
        tokens = self.done(place) + advance
        ids = self.wholes[place][:tokens]
        sample = Sample(ids, ids, self._versions(place, tokens, history), None)
        self.prefixes = (*self.prefixes[:place], sample, *self.prefixes[place + 1 :])

    def samples(self, history: Sequence[Change], interrupted: Container[int] = ()) -> tuple[Sample, ...]:
        """Of all responses; they have ended but for those that were interrupted."""
        samples = []
        for place, prefix in enumerate(self.prefixes):
            if prefix.finish_reason is None and place not in interrupted:
                ids = self.wholes[place]
                prefix = Sample(ids, ids, self._versions(place, ids.stop, history), "stop")
            samples.append(prefix)
        return tuple(samples)

    def _versions(self, place: int, tokens: int, history: Sequence[Change]) -> tuple[VersionSpan, ...]:
        """Of the first tokens of a response, which have been decoded."""
        moment, prefix, era = self.moments[place], self.prefixes[place], len(history) - 1
        while history[era].moment > moment:
            era -= 1
        begin, spans, version, kept = len(prefix.ids), prefix.versions, history[era].version, False
        shift = begin - (moment >> TURNS)
        if spans and spans[-1].version == version and not spans[-1].stale_cache:
            begin, spans = spans[-1].start, spans[:-1]  # it goes on where it was interrupted
        for change in history[era + 1 :]:
            end = (change.moment >> TURNS) + shift
            if end >= tokens:
                break
            if end > begin:
                spans += (_new(VersionSpan, (version, begin, end, kept)),)
                begin = end
            version, kept = change.version, change.kept
        if begin < tokens:
            spans += (_new(VersionSpan, (version, begin, tokens, kept)),)
        return spans


Response = tuple[Job, int]
"""A group and the place of one of its responses."""


@dataclass(frozen=True, slots=True)
class Swap:
    """An engine has taken new weights."""

    version: int
    began: float
    answered: float
    """It serves the new version and says so; tokens to compute again are computed afterwards."""
    tokens_recomputed: int
    aborted: Sequence[tuple[Job, tuple[Sample, ...]]]
    """Groups ended unfinished, with what there is of them."""
    tokens_discarded: int
