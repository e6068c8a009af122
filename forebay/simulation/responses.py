"""Responses on a virtual engine, and the samples that come of them.

Invariants:
- Each token belongs to the version that served when it was decoded.
- Samples are made when a group leaves an engine, all at once: what is looked at together lies together in memory, and
  of the thousands of responses under way there is little.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from forebay.control.groups import Group
from forebay.control.types import Sample, VersionSpan


class Change(NamedTuple):
    """An engine's weights from a decode step on."""

    step: int
    version: int
    kept: bool
    """It went on with the KV cache of the version before."""


History = Sequence[Change]

# What `VersionSpan(...)` does, in half the time: every response has one or more.
_span: Callable[[tuple[int, int, int, bool]], VersionSpan] = partial(tuple.__new__, VersionSpan)


@dataclass(slots=True, eq=False)
class Job:
    """A group on an engine."""

    group: Group
    attempt: int
    prompt_tokens: int
    unfinished: int
    """Responses whose end its owner has not heard of."""
    prefilled: bool = False
    """Whether its prompt has been computed here."""
    ended: list["Response"] = field(default_factory=list)
    """Those that have, here."""

    def close(self, history: History, partials: Iterable["Response"] = ()) -> tuple[Sample, ...]:
        """It leaves the engine with a sample for each response, whole if it has ended. `partials`: those that are given
        up, as far as they are."""
        samples = list(self.group.prefixes)
        for response in partials:
            ids = response.ids[: response.done]
            samples[response.place] = Sample(ids, ids, response.spans, None)
        for response in self.ended:
            ids = response.ids
            samples[response.place] = Sample(ids, ids, response.versions(ids.stop, history), "stop")
        self.ended.clear()  # no cycle of references is left: nobody collects them while a simulation lasts
        return tuple(samples)


@dataclass(slots=True, eq=False)
class Response:
    """One response on its way."""

    job: Job
    place: int
    ids: range
    """Stands for its tokens, once it has ended."""
    done: int = 0
    """Tokens decoded before it was admitted last: computed again then, with the prompt."""
    spans: tuple[VersionSpan, ...] = ()
    """Of these."""
    start: int = field(init=False)
    """Step at which it was admitted last."""
    turn: int = field(init=False)
    """Responses that were admitted before it at that step."""
    era: int = field(init=False)
    """Entry of the history at that time."""

    def versions(self, tokens: int, history: History) -> tuple[VersionSpan, ...]:
        """Of the first tokens, which have been decoded."""
        era, begin, spans, kept = self.era, self.done, self.spans, False
        version = history[era].version
        if spans and spans[-1].version == version and not spans[-1].stale_cache:
            begin, spans = spans[-1].start, spans[:-1]  # it goes on where it was interrupted
        shift = self.done - self.start
        for first, newer, keeps in history[era + 1 :]:
            end = first + shift
            if end >= tokens:
                break
            if end > begin:
                spans += (_span((version, begin, end, kept)),)
                begin = end
            version, kept = newer, keeps
        return (*spans, _span((version, begin, tokens, kept))) if begin < tokens else spans


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
