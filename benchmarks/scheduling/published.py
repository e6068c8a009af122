"""The ratios that the ASP paper reports, and what a simulation without its hardware says about them.

    python -m benchmarks.scheduling.published [--seeds 3]

Of the paper only ratios can be compared. Here a GU node is two engines of the study, the trainer (TU) has as many nodes
as the four GU nodes of the full set-up and needs `train` times as long for a step as they do; colocated means that all
eight nodes first generate (16 engines), then train (twice the trainer's speed), with nothing lost in between.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.results import report
from benchmarks.scheduling.drawing import BLUE, GREY, INK, ORANGE, RED, panels, save
from benchmarks.scheduling.setting import BARRIER, ENGINE, PADDED, arguments, measure, scenario
from forebay.simulation.model import EngineModel, Scenario, TrainerModel

NODES = (1, 3, 4)
ENGINES_A_NODE = 2
PUBLISHED_ROLLOUT_S = {1: 776.0, 3: 288.0, 4: 216.0}
PUBLISHED_OVER_ASP = {"colocated sync": 927 / 216, "disaggregated (verl)": 536.7 / 216}
PUBLISHED_RATE_OVER_ASP = {"colocated sync": 58 / 18, "disaggregated (verl)": 58 / 44}
"""Tokens per second and device, ASP over the others: at equal work and devices this would be the same ratio."""
TRAIN = (0.25, 0.5, 1.0)
QUICK = 0.1
SYNC = ("mode=sync", "schedule.policy=fifo")


@dataclass(frozen=True)
class Kind:
    """One way to run."""

    changes: tuple[str, ...]
    engine: EngineModel = ENGINE
    colocated: bool = False


KINDS = {
    "streaming": Kind(()),
    "asp, barrier": Kind(("schedule.policy=asp", *BARRIER)),
    "asp, padded": Kind(("schedule.policy=asp", *BARRIER), PADDED),
    "one_step_off": Kind(("mode=one_step_off",)),
    "sync": Kind(SYNC),
    "colocated sync": Kind(SYNC, colocated=True),
}
SCALED = ("streaming", "asp, barrier", "asp, padded", "sync")


def at(kind: Kind, nodes: int, train: float, seed: int) -> Scenario:
    """So many GU nodes beside the one trainer."""
    full = scenario(train, kind.changes, seed, kind.engine).trainer
    engines = 16 if kind.colocated else nodes * ENGINES_A_NODE
    made = scenario(train, (*kind.changes, f"generation.engines={engines}"), seed, kind.engine)
    return replace(made, trainer=TrainerModel(full.fixed_s, full.per_token_s / (2 if kind.colocated else 1)))


def main() -> None:
    seeds = arguments(__doc__, seeds=3).seeds
    rows = [*scaling(seeds), *against(seeds)]
    draw(rows)
    report("scheduling_published", f"ASP's published ratios, {seeds} seeds", rows, outcome(rows))


def scaling(seeds: int) -> Iterable[dict[str, Any]]:
    """Step time with 1, 3 and 4 GU nodes, of runs whose trainer is quick."""
    for name in SCALED:
        own = [
            measure(
                {"what": name, "nodes": nodes, "train": QUICK}, [at(KINDS[name], nodes, QUICK, s) for s in range(seeds)]
            )
            for nodes in NODES
        ]
        yield from (row | {"speed_up": own[0]["step_time_s"] / row["step_time_s"]} for row in own)


def against(seeds: int) -> Iterable[dict[str, Any]]:
    """Every way to run with eight nodes, for trainers of different speed."""
    for train in TRAIN:
        own = [
            measure({"what": name, "nodes": 4, "train": train}, [at(kind, 4, train, s) for s in range(seeds)])
            for name, kind in KINDS.items()
        ]
        yield from (row | {"over_streaming": row["step_time_s"] / own[0]["step_time_s"]} for row in own)


def outcome(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Speed-up by GU nodes; step times over streaming and over both readings of ASP; beside the published ones."""
    first = PUBLISHED_ROLLOUT_S[1]
    result: dict[str, Any] = {"speed_up": {"published": {str(n): first / s for n, s in PUBLISHED_ROLLOUT_S.items()}}}
    for name in SCALED:
        own = [row for row in rows if row["what"] == name and "speed_up" in row]
        result["speed_up"][name] = {str(row["nodes"]): row["speed_up"] for row in own}
    result["published_step_over_asp"] = PUBLISHED_OVER_ASP
    result["published_rate_over_asp"] = PUBLISHED_RATE_OVER_ASP
    for train in TRAIN:
        own_times = {r["what"]: r["step_time_s"] for r in rows if r["train"] == train and "over_streaming" in r}
        result[f"colocated_sync_over_asp_train_{train:g}"] = {
            name: own_times["colocated sync"] / own_times[name] for name in ("streaming", "asp, barrier", "asp, padded")
        }
    return result


def draw(rows: list[dict[str, Any]]) -> None:
    figure, axes = panels(["Speed-up by GU nodes", "Step time over streaming, 8 nodes"])
    for name, colour in zip(SCALED, (BLUE, GREY, RED, ORANGE), strict=True):
        own = [row for row in rows if row["what"] == name and "speed_up" in row]
        axes[0].plot(NODES, [row["speed_up"] for row in own], color=colour, marker="o", ms=4, label=name)
    first = PUBLISHED_ROLLOUT_S[1]
    published = [first / PUBLISHED_ROLLOUT_S[nodes] for nodes in NODES]
    axes[0].plot(NODES, published, color=INK, marker="s", ms=5, ls="--", label="published")
    axes[0].plot(NODES, NODES, color=INK, ls=":", label="linear")
    axes[0].set_xlabel("GU nodes", fontsize=9)
    axes[0].legend(fontsize=8, frameon=False)
    width = 0.8 / len(KINDS)
    for number, (name, colour) in enumerate(zip(KINDS, (BLUE, GREY, RED, "#2f9e6e", ORANGE, "#c7a252"), strict=True)):
        own = [row for row in rows if row["what"] == name and "over_streaming" in row]
        places = [place + number * width for place in range(len(TRAIN))]
        axes[1].bar(places, [row["over_streaming"] for row in own], width, color=colour, label=name)
    line = PUBLISHED_OVER_ASP["colocated sync"]
    axes[1].axhline(line, color=INK, ls="--", lw=1)
    axes[1].text(2.9, line, "colocated sync over ASP, published", ha="right", va="bottom", fontsize=8)
    middles = [place + 0.4 - width / 2 for place in range(len(TRAIN))]
    axes[1].set_xticks(middles, [f"train {train:g}" for train in TRAIN])
    axes[1].legend(fontsize=7, frameon=False, ncols=2)
    axes[1].set_ylim(0, 6)
    save(figure, "published")


if __name__ == "__main__":
    main()
