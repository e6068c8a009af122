"""Who runs on which core."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from forebay.config import parse_config
from forebay.generation import server
from forebay.launch.cores import CorePlan, plan_cores


def plan(monkeypatch: pytest.MonkeyPatch, cores: int, engines: int, **settings) -> CorePlan:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    values = {
        "generation": {"engines": engines},
        "training": {"ranks": settings.pop("ranks", 1)},
        "launch": settings,
    }
    return plan_cores(parse_config(values, "test"))


@pytest.mark.parametrize(
    ("cores", "engines", "settings", "expected"),
    [
        (1, 1, {}, CorePlan([[0]], [0])),
        (2, 1, {}, CorePlan([[0]], [1])),
        (2, 2, {}, CorePlan([[0], [0]], [1])),
        (4, 1, {}, CorePlan([[0, 1]], [2, 3])),
        (4, 3, {}, CorePlan([[0], [1], [2]], [3])),
        (4, 5, {}, CorePlan([[0], [1], [2], [0], [1]], [3])),
        (8, 2, {}, CorePlan([[0, 1, 2], [3, 4, 5]], [6, 7])),
        (8, 1, {"ranks": 3}, CorePlan([[0, 1]], [2, 3, 4, 5, 6, 7])),
        (4, 1, {"trainer_cores": 1}, CorePlan([[0, 1, 2]], [3])),
        (4, 1, {"trainer_cores": 9}, CorePlan([[0]], [1, 2, 3])),
        (4, 2, {"pin": False}, CorePlan([None, None], None)),
    ],
)
def test_plan(monkeypatch: pytest.MonkeyPatch, cores: int, engines: int, settings: dict, expected: CorePlan) -> None:
    assert plan(monkeypatch, cores, engines, **settings) == expected


@pytest.mark.parametrize("pinned", [True, False])
def test_an_engine_s_api_server_keeps_to_its_cores_if_asked_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pinned: bool
) -> None:
    given: list[Sequence[int] | None] = []
    monkeypatch.setattr(server, "spawn", lambda *_, cores, **options: given.append(cores))
    monkeypatch.setattr(server, "engine_command", lambda *_: ["true"])
    config = parse_config({"launch": {"pin_api_servers": pinned}}, "test")
    server.start_engine(config, tmp_path, 1, "token", tmp_path / "engine-0.log", [3])
    assert given == [[3] if pinned else None]
