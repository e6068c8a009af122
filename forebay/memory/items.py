"""What a fleet keeps in memory, part by part."""

from collections.abc import Sequence
from dataclasses import dataclass

GIB = 2**30
ITEMSIZE = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Item:
    """One part. Bytes at the moment when all parts together are largest."""

    name: str
    device: float = 0.0
    """On each device of the fleet."""
    host: float = 0.0
    """In the CPU memory of the fleet's busiest host."""
    how: str = ""
    """The formula, with its numbers."""


@dataclass(frozen=True)
class FleetMemory:
    """All parts of one fleet."""

    name: str
    devices: int
    items: tuple[Item, ...]

    @property
    def device(self) -> float:
        """Bytes on each device."""
        return sum(item.device for item in self.items)

    @property
    def host(self) -> float:
        """Bytes in the CPU memory of the busiest host."""
        return sum(item.host for item in self.items)

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(part, GiB on a device, GiB on a host, formula) of each part, and the sum."""
        rows = [(item.name, _cell(item.device), _cell(item.host), item.how) for item in self.items]
        return [*rows, ("together", _cell(self.device), _cell(self.host), "")]


def _cell(nbytes: float) -> str:
    return f"{nbytes / GIB:,.2f}" if nbytes else "-"


def gib(nbytes: float) -> str:
    """`12.3`."""
    return f"{nbytes / GIB:,.1f}"


def present(items: Sequence[Item]) -> tuple[Item, ...]:
    """Those that take any memory."""
    return tuple(item for item in items if item.device or item.host)
