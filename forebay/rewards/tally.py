"""What the verifiers said, counted; and a warning when they say nothing that teaches.

Invariants:
- Every judgement is counted once, by verdict.
- A kind of warning is raised once, as a Python warning with its own class and as an event; later batches of the kind
  are counted in `warnings`.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence

from forebay.rewards.judgement import Judgement


class RewardWarning(UserWarning):
    """Base of the warnings about whole batches."""


class AllScoresEqual(RewardWarning):
    """Every score of a batch is the same: it teaches nothing."""


class AllTimedOut(RewardWarning):
    """Every verifier of a batch timed out."""


class AllFailed(RewardWarning):
    """Every verifier of a batch failed."""


class Tally:
    """`batch`: responses that are looked at together; below 2, no warning is raised. `verdicts` is counted into,
    `on_event(name, **values)` told of each kind's first warning."""

    def __init__(
        self, batch: int = 0, verdicts: Counter[str] | None = None, on_event: Callable[..., None] | None = None
    ) -> None:
        self.verdicts: Counter[str] = Counter() if verdicts is None else verdicts
        self.warnings: Counter[str] = Counter()
        """Batches by kind: the name of the warning's class."""
        self._size, self._on_event = batch, on_event
        self._batch: list[Judgement] = []

    def add(self, judgements: Sequence[Judgement]) -> None:
        self.verdicts.update(judgement.verdict for judgement in judgements)
        if self._size < 2:
            return
        self._batch.extend(judgements)
        while len(self._batch) >= self._size:
            self._look(self._batch[: self._size])
            del self._batch[: self._size]

    def _look(self, batch: Sequence[Judgement]) -> None:
        verdicts = {judgement.verdict for judgement in batch}
        scores = {judgement.score for judgement in batch if judgement.score is not None}
        last = f"; the last reason: {batch[-1].reason}" if batch[-1].reason else ""
        if verdicts == {"timed_out"}:
            self._warn(AllTimedOut, f"the verifier timed out for all {len(batch)} responses of a batch{last}")
        elif verdicts <= {"timed_out", "failed"}:
            self._warn(AllFailed, f"the verifier failed for all {len(batch)} responses of a batch{last}")
        elif len(scores) == 1:
            score = next(iter(scores))
            self._warn(AllScoresEqual, f"all {len(batch)} responses of a batch have score {score:g}{last}")

    def _warn(self, kind: type[RewardWarning], text: str) -> None:
        self.warnings[kind.__name__] += 1
        if self.warnings[kind.__name__] > 1:
            return
        warnings.warn(f"rewards: {text}", kind, stacklevel=4)
        if self._on_event is not None:
            self._on_event("reward_warning", warning=kind.__name__, reason=text)
