"""How the studies' figures look: small PNG files in `figures/`."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

FIGURES = Path(__file__).parent / "figures"
INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
BLUE, LIGHT_BLUE, ORANGE, GREEN, RED, GREY = "#1f6fb2", "#a9cbe8", "#e08a1e", "#2f9e6e", "#b3261e", "#b8c0c8"
MODE_COLOURS = {
    "padded": RED,
    "barrier": GREY,
    "sync": ORANGE,
    "one_step_off": GREEN,
    "watermark": LIGHT_BLUE,
    "fully_async": BLUE,
    "retract": LIGHT_BLUE,
}


def panels(titles: Sequence[str], height: float = 3.4, share_y: bool = False) -> tuple[Figure, list[Axes]]:
    """A row of empty panels."""
    figure = Figure(figsize=(4.1 * len(titles), height), dpi=80, facecolor="white", layout="constrained")
    axes = figure.subplots(1, len(titles), sharey=share_y, squeeze=False)[0]
    for ax, title in zip(axes, titles, strict=True):
        ax.set_title(title, fontsize=11, color=INK, loc="left")
        ax.grid(color=GRID, linewidth=0.8)
        ax.set_axisbelow(True)
        ax.tick_params(labelsize=9, colors=INK)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
    return figure, list(axes)


def save(figure: Figure, name: str) -> Path:
    """Write `figures/<name>.png`."""
    FIGURES.mkdir(exist_ok=True)
    path = FIGURES / f"{name}.png"
    figure.savefig(path, metadata={"Software": None})
    return path
