"""The groups that have been admitted and have no fate yet, and the way they leave.

Invariants: a group is at exactly one stage, the stages' counts add up to the number of open groups; it leaves once, by
one fate, into the ledger. Too many in a row that nobody can train end the run.
"""

from collections.abc import Callable

from forebay.control.groups import Group, Stage
from forebay.control.ledger import Entry, Ledger
from forebay.control.rules import Rules
from forebay.control.types import Fate, Prompt
from forebay.errors import RunError

FRUITLESS = 64
"""Groups in a row that fail, after which a run ends; or four batches of them."""


class OpenGroups:
    """By id, with a count for each stage."""

    def __init__(self, rules: Rules, sink: Callable[[Entry], None]) -> None:
        self.ledger = Ledger(sink)
        self.by_id: dict[int, Group] = {}
        self._rules = rules
        self._stages = dict.fromkeys(Stage, 0)
        self._refills = self._fruitless = 0

    def count(self, stage: Stage) -> int:
        return self._stages[stage]

    def admit(self, prompt: Prompt) -> Group:
        rules = self._rules
        group = Group(self.ledger.admitted, prompt, rules.group_size, Stage.WAITING, rules.alike_teaches)
        self.ledger.admit(group.group_id)
        self.by_id[group.group_id] = group
        self._stages[Stage.WAITING] += 1
        return group

    def move(self, group: Group, stage: Stage) -> None:
        self._stages[group.stage] -= 1
        self._stages[stage] += 1
        group.stage = stage

    def leave(self, group: Group, fate: Fate, reason: str) -> None:
        del self.by_id[group.group_id]
        self._stages[group.stage] -= 1
        self.ledger.settle(
            Entry(
                group_id=group.group_id,
                prompt=group.prompt,
                fate=fate,
                reason=reason,
                samples=group.samples,
                rewards=group.rewards,
                trained_version=group.trained_version,
                attempts=group.attempts,
                engines=group.engines,
                expected=group.expected,
            )
        )

    def generating(self, group_id: int, attempt: int) -> Group | None:
        """The group if this attempt at generating it still counts."""
        group = self.by_id.get(group_id)
        if group is None or group.stage is not Stage.GENERATING or group.attempts != attempt:
            return None
        return group

    def at(self, group_id: int, stage: Stage) -> Group:
        group = self.by_id[group_id]
        if group.stage is not stage:
            raise RunError(f"control: group {group_id} is {group.stage.name.lower()}, expected {stage.name.lower()}")
        return group

    # ---- what ends a run

    def count_refill(self) -> None:
        """A group was filtered and is replaced. Raises `RunError` if too many were for one batch."""
        rules = self._rules
        self._refills += 1
        if self._refills > rules.max_refills * rules.batch_groups:
            raise RunError(
                f"control: {self._refills} groups without reward spread for one batch of {rules.batch_groups} "
                "(control.max_refills): the prompts are too easy or too hard for this model; change the data or set "
                "control.dynamic_sampling=false"
            )

    def count_fruitless(self, reason: str) -> None:
        """A group failed. Raises `RunError` when so many in a row have that the next ones will too."""
        self._fruitless += 1
        if self._fruitless >= max(4 * self._rules.batch_groups, FRUITLESS):
            raise RunError(
                f"control: {self._fruitless} groups in a row could not be trained, the last because: {reason}; look at "
                "the data, the reward and the model"
            )

    def count_fruit(self) -> None:
        """A group was scored and can be trained."""
        self._fruitless = 0

    def count_step(self) -> None:
        """A batch was trained: its refills are forgotten."""
        self._refills = 0
