"""Responses in the making: chunks of vLLM's streams put together with what was there before.

Invariants:
- A response never has more tokens than its budget, and its tokens, log-probs and versions stay equally long.
- `Response.sample` is exact at any time: tokens whose version is not known yet are left out.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import httpx

from forebay.control.types import OnFinished, Sample, VersionSpan


class BadChunk(ValueError):
    """What the engine sent is incomplete or contradicts itself."""


class Response:
    """One response to a prompt of `prompt_tokens`: a prefix, and what one choice of a stream adds to it. `on_finished`
    is told of its tokens when it ends."""

    def __init__(self, prefix: Sample, budget: int, prompt_tokens: int, on_finished: OnFinished | None = None) -> None:
        self.prefix = prefix
        self.prompt_tokens = prompt_tokens
        self._on_finished = on_finished
        self.aborted = False
        self.dismissed = False
        """The engine was told to end it unfinished."""
        self._finish = prefix.finish_reason
        if self._finish is None and len(prefix.ids) >= budget:
            self._finish = "length"
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: tuple[VersionSpan, ...] = ()

    @property
    def finished(self) -> bool:
        """No token will be added."""
        return self._finish is not None

    def add(self, chunk: Mapping[str, Any], kept_caches: Collection[int]) -> int:
        """Take the next tokens; returns how many. `kept_caches`: versions that the engine took over a cache of others.
        Raises `BadChunk`."""
        reason = chunk["finish_reason"]
        if reason not in (None, "stop", "length", "abort"):
            raise BadChunk(f"a sample ended with finish_reason {reason!r}")
        ids = chunk["token_ids"] or []
        logprobs = [entry["logprob"] for entry in (chunk["logprobs"] or {"content": []})["content"]]
        if len(logprobs) != len(ids) or not all(map(math.isfinite, logprobs)):
            raise BadChunk(f"{len(ids)} tokens with {len(logprobs)} log-probabilities, or some not finite")
        self._ids += ids
        self._logprobs += logprobs
        if chunk["weight_versions"] is not None:
            self._spans = self._read_spans(chunk["weight_versions"], kept_caches)
        elif reason is not None:
            raise BadChunk(f"a sample of {len(self._ids)} tokens ended without versions")
        self.aborted = reason == "abort"
        self._finish = None if self.aborted else reason
        if self._finish is not None and self._on_finished is not None:
            self._on_finished(len(self))
        return len(ids)

    def sample(self) -> Sample:
        """The response, or as much of it as is certain."""
        prefix = self.prefix
        known = self._spans[-1].end if self._spans else 0
        versions = _joined(prefix.versions, self._spans, len(prefix.ids))
        ids, logprobs = (*prefix.ids, *self._ids[:known]), (*prefix.logprobs, *self._logprobs[:known])
        return Sample(ids, logprobs, versions, self._finish)

    def __len__(self) -> int:
        """Tokens received so far, the prefix's included."""
        return len(self.prefix.ids) + len(self._ids)

    def _read_spans(self, given: Sequence[Mapping[str, Any]], kept_caches: Collection[int]) -> tuple[VersionSpan, ...]:
        """The first span of a request starts from an empty cache; a later one may go on over the cache of another."""
        spans = []
        for position, span in enumerate(given):
            version = int(span["version"])
            spans.append(VersionSpan(version, span["start"], span["end"], position > 0 and version in kept_caches))
        # Spans must tile [0, number of tokens); vLLM may open one before its first token.
        if [s.start for s in spans] + [len(self._ids)] != [0] + [s.end for s in spans]:
            raise BadChunk(f"version spans {spans} do not cover {len(self._ids)} tokens")
        return tuple(span for span in spans if span.end > span.start)


def _joined(before: tuple[VersionSpan, ...], after: tuple[VersionSpan, ...], offset: int) -> tuple[VersionSpan, ...]:
    """`after`, moved by `offset` tokens, behind `before`; equal neighbours become one span."""
    spans = list(before)
    for span in after:
        moved = VersionSpan(span.version, span.start + offset, span.end + offset, span.stale_cache)
        if spans and (spans[-1].version, spans[-1].stale_cache) == (span.version, span.stale_cache):
            moved = VersionSpan(span.version, spans.pop().start, moved.end, span.stale_cache)
        spans.append(moved)
    return tuple(spans)


def error_message(response: httpx.Response) -> str:
    """In one line, of an answer with another status than 200."""
    try:
        return error_text(response.json())
    except ValueError:
        return " ".join(response.text.split())[:500]


def error_text(answer: Any) -> str:
    """Of a decoded answer or chunk that says it is an error."""
    try:
        error = answer["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (KeyError, TypeError):
        text = str(answer)
    return " ".join(text.split())[:500]
