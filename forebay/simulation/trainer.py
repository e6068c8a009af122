"""The virtual trainer: waits for groups, trains them, publishes; a whole batch at a time, or streaming.

Invariants:
- It asks the controller, as the real one does over HTTP, and takes what it is given; it chooses nothing.
- Each second belongs to one of waiting, training and publishing.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.control.controller import Controller, Group
from forebay.control.wire import StepReport
from forebay.simulation.model import TrainerModel


class Phase(enum.Enum):
    WAITING = enum.auto()
    """For groups of `step`."""
    TRAINING = enum.auto()
    """Some groups of it."""
    CLOSING = enum.auto()
    """All are there: what is left of them, the update, the publication."""


@dataclass
class Trainer:
    """Idle until the first `ask`."""

    model: TrainerModel
    controller: Controller
    streaming: bool
    step: int = 1
    phase: Phase = Phase.WAITING
    _since: float = 0.0
    _waited: float = 0.0
    _trained: float = 0.0
    _publishing: float = 0.0
    _received: int = 0
    _postponed: float = 0.0  # work on groups that are here, to be done at the end
    _complete: bool = False

    def ask(self, now: float) -> float | None:
        """Ask for groups while waiting: when it will be done with what it got, or None if it got nothing."""
        if self.streaming:
            answer = self.controller.next_groups(self.step, self._received)
            if answer is None:
                return None
            batch, self._complete = answer
            self._received += len(batch.groups)
            whole = self.model.per_token_s * _tokens(batch.groups)
            seconds = whole * self.model.share_streamed
            self._postponed += whole - seconds
        else:
            whole_batch = self.controller.next_batch(self.step)
            if whole_batch is None:
                return None
            self._complete = True
            seconds = self.model.per_token_s * _tokens(whole_batch.groups)
        self._waited += now - self._since
        self._trained += seconds
        self.phase = Phase.TRAINING
        return now + seconds

    def close(self, now: float) -> float | None:
        """Done with the groups at hand. When the step will be published, or None if groups of it are to come."""
        if not self._complete:
            self.phase, self._since = Phase.WAITING, now
            return None
        seconds = self.model.fixed_s + self._postponed
        self._trained += seconds
        self._publishing = self.model.publish_s if self.is_published else 0.0
        self.phase = Phase.CLOSING
        return now + seconds + self._publishing

    @property
    def is_published(self) -> bool:
        """Whether new weights follow this step."""
        return self.step % self.controller.rules.sync_every == 0

    def report(self, now: float) -> StepReport:
        """The step is over, the next one begins."""
        report = StepReport(
            step=self.step,
            train_wait_s=self._waited,
            train_s=self._trained,
            publish_s=self._publishing,
            metrics={},
        )
        self.step += 1
        self.phase, self._since = Phase.WAITING, now
        self._waited = self._trained = self._publishing = self._postponed = 0.0
        self._received, self._complete = 0, False
        return report


def _tokens(groups: Sequence[Group]) -> int:
    """Prompt and response tokens."""
    return sum(group.tokens + group.size * len(group.prompt.ids) for group in groups)
