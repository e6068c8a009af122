"""The engines as the controller knows them: who has room, how much each has to do, who takes new weights next.

Invariants:
- An engine holds exactly the groups that were started there and have not been released.
- `samples` are the responses in flight there; a group starts while fewer than `max_concurrent_samples` are, so slots
  are filled one by one as responses end, and at most `group_size - 1` of them wait inside the engine.
- Cost: an event costs O(1) and some logarithms, a dispatch O(engines).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from forebay.control.groups import Group
from forebay.control.rules import Rules
from forebay.lengths.online import LengthCorrection

ROLLING_SHARE = 0.25
"""Of the engines refresh at a time when they do so in turn. One by one, many engines would never get through: a whole
turn would take longer than a step."""


@dataclass(slots=True)
class Engine:
    """What the controller knows of one Generation Unit."""

    version: int
    refreshing: bool = False
    held: bool = False
    """Its weights are being examined: it takes no newer ones."""
    groups: set[int] = field(default_factory=set)
    samples: int = 0
    """Responses in flight."""
    taken: int = 0
    """Slots that have a response."""
    load: float = 0.0
    """Response tokens still expected of the groups in flight; up to date when engines are compared."""
    footprint: float = 0.0
    """Response tokens expected of them in all, those that are there included."""


class EnginePool:
    """All engines; predictions of length are corrected as responses end."""

    def __init__(self, rules: Rules, lengths: LengthCorrection | None) -> None:
        self.engines: dict[int, Engine] = {}
        self._rules = rules
        self._lengths = lengths
        self._published = 0
        self._refreshing = 0
        self._free: set[int] = set()
        self._taken = 0  # slots of all engines that have a response
        self._changed: dict[int, Group] = {}
        """Groups in flight whose part of `Engine.load` is out of date."""
        self._behind = False  # some engine may serve an older version than the published one

    # ---- which engine

    def any_free(self) -> bool:
        """Whether a group may start on some engine."""
        return bool(self._free) and not self._behind_barrier

    def free(self) -> list[int]:
        """Engines that a group may start on, the one with the least left to do first."""
        if self._behind_barrier:
            return []
        if len(self._free) == 1:
            return list(self._free)
        self._weigh_changed()
        return sorted(self._free, key=lambda key: (self.engines[key].load, key))

    @property
    def _behind_barrier(self) -> bool:
        """Where no staleness is allowed only new weights may generate: nothing starts until all engines have them, or
        the first one that has would get the whole batch."""
        return self._rules.max_staleness == 0 and any(
            engine.version < self._published for engine in self.engines.values()
        )

    def _note(self, key: int, engine: Engine) -> None:
        """Something about this engine has changed that decides whether it is free."""
        slots = self._rules.max_concurrent_samples
        taken = engine.samples if engine.samples < slots else slots
        self._taken += taken - engine.taken
        engine.taken = taken
        # A group all of whose responses are there, but not handed over yet, holds no slot and holds up a barrier.
        has_room = not engine.groups if self._rules.minibatch_barrier else taken < slots
        if has_room and not engine.refreshing:
            self._free.add(key)
        else:
            self._free.discard(key)

    def room(self, key: int) -> float:
        """Groups that may start there now. Behind a minibatch barrier: no limit but the minibatch."""
        if self._rules.minibatch_barrier:
            return math.inf
        left = self._rules.max_concurrent_samples - self.engines[key].samples
        return -(-left // self._rules.group_size)

    def fits(self, key: int, predicted_length: float) -> bool:
        """Whether a group's expected tokens are within the engine's budget; a group alone always is."""
        engine, limit = self.engines[key], self._rules.max_predicted_tokens
        if not engine.groups or limit == math.inf:
            return True
        self._weigh_changed()
        return engine.footprint + self.expected(predicted_length) * self._rules.group_size <= limit

    @property
    def filled(self) -> float:
        """Share of the slots of all engines that have a response, 0..1; 1 without engines."""
        slots = len(self.engines) * self._rules.max_concurrent_samples
        return self._taken / slots if slots else 1.0

    def expected(self, predicted_length: float) -> float:
        """The mean length of a response as corrected by now."""
        return self._lengths.expected(predicted_length) if self._lengths else predicted_length

    # ---- groups come and go

    def start(self, group: Group, key: int) -> None:
        engine = self.engines[key]
        group.engine = key
        group.engines += (key,)
        if group.samples:
            self._start_from(group, engine.version)
        else:
            group.born, group.finished, group.running = engine.version, [], group.size
            group.reached, group.fresh = 0, True
        if group.expected is None:
            group.expected = self.expected(group.prompt.predicted_length)
        engine.groups.add(group.group_id)
        engine.samples += group.running
        group.load = group.footprint = 0.0
        self._changed[group.group_id] = group
        self._note(key, engine)

    def _start_from(self, group: Group, version: int) -> None:
        """It goes on from what there is of its responses."""
        done = [len(s.ids) for s in group.samples if s.finish_reason is not None]
        begun = [len(s.ids) for s in group.samples if s.finish_reason is None]
        group.born = min(version, group.oldest_version)
        group.finished, group.running = done, len(begun)
        group.reached = sum(begun) // len(begun) if begun else 0
        group.fresh = not done and not any(begun)

    def sample_finished(self, group: Group, tokens: int) -> bool:
        """A response of a group in flight is done: its slot is free, and the others are better known. Whether any
        engine is free now: if none is, nothing can start."""
        key = group.engine
        if key is None or not group.running or key not in self.engines:
            return False
        group.running -= 1
        group.finished.append(tokens)
        if group.fresh and tokens > group.reached:
            group.reached = tokens  # they began together, and the others go on
        self._changed[group.group_id] = group
        engine = self.engines[key]
        engine.samples -= 1
        if engine.samples < self._rules.max_concurrent_samples:  # else another response takes the slot
            self._note(key, engine)
        return bool(self._free)

    def release(self, group: Group) -> None:
        """It is in flight no more."""
        key, engine = self._engine_of(group)
        if engine is not None and group.group_id in engine.groups:
            engine.groups.remove(group.group_id)
            engine.samples -= group.running
            engine.load -= group.load
            engine.footprint -= group.footprint
            self._changed.pop(group.group_id, None)
            if not engine.groups:
                engine.load = engine.footprint = 0.0  # no rounding errors pile up
            self._note(key, engine)
        group.engine = None
        group.running = 0

    def observed(self, group: Group) -> None:
        """All its responses are there."""
        if self._lengths:
            self._lengths.observed(group.prompt.predicted_length, [len(sample.ids) for sample in group.samples])

    def _engine_of(self, group: Group) -> tuple[int, Engine | None]:
        """None if it is in flight nowhere, or its engine is gone."""
        key = -1 if group.engine is None else group.engine
        return key, self.engines.get(key)

    def _weigh_changed(self) -> None:
        """Loads are looked at far less often than they change."""
        for group in self._changed.values():
            _, engine = self._engine_of(group)
            if engine is not None:
                load, footprint = self._weight(group)
                engine.load += load - group.load
                engine.footprint += footprint - group.footprint
                group.load, group.footprint = load, footprint
        self._changed.clear()

    def _weight(self, group: Group) -> tuple[float, float]:
        """(Response tokens still to come, tokens in all) that are expected of a group in flight."""
        predicted = group.prompt.predicted_length
        if self._lengths and (group.finished or group.reached):
            each = self._lengths.rest(predicted, group.finished, group.running, group.reached)
        else:
            each = max(self.expected(predicted), float(group.reached))
        return group.running * (each - group.reached), group.running * each + sum(group.finished)

    # ---- engines come, go and refresh

    def joined(self, key: int, version: int) -> None:
        self.engines[key] = engine = Engine(version)
        self._behind = True
        self._note(key, engine)

    def lost(self, key: int) -> None:
        engine = self.engines.pop(key)
        self._refreshing -= engine.refreshing
        self._taken -= engine.taken
        self._free.discard(key)

    def published(self, version: int) -> None:
        self._published = version
        self._behind = True

    def next_refresh(self) -> int | None:
        """The engine to refresh next; a part at a time, so that never all of them stop, unless the rules say all."""
        if not self._behind:
            return None
        most = len(self.engines) if self._rules.refresh_all else max(int(len(self.engines) * ROLLING_SHARE), 1)
        if self._refreshing >= most:
            return None
        behind = min(self._old(), default=None)
        if behind is None:
            self._behind = False
            return None
        return behind[1]

    def _old(self) -> Iterator[tuple[int, int]]:
        for key, engine in self.engines.items():
            if engine.version < self._published and not engine.refreshing and not engine.held:
                yield engine.version, key

    def hold(self, key: int, held: bool) -> None:
        self.engines[key].held = held
        self._behind = True

    def refresh_started(self, key: int) -> None:
        engine = self.engines[key]
        engine.refreshing = True
        self._refreshing += 1
        self._note(key, engine)

    def refresh_done(self, key: int, version: int) -> None:
        self.engines[key].version = version
        self.refresh_failed(key)

    def refresh_failed(self, key: int) -> None:
        engine = self.engines[key]
        engine.refreshing = False
        self._behind = self._behind or engine.version < self._published
        self._refreshing -= 1
        self._note(key, engine)
