"""The built-in maze task: find the way through a maze that is given as its list of open passages.

Invariants:
- A prompt describes its maze in full, so a response is scored from the prompt alone.
- Score 1.0 iff the response is a walk over cells, each step through an open passage, from start to goal; else 0.0.
- Every maze is a spanning tree of its grid: there is exactly one path without turning back.

A cell is (row, column), named `a1`, `b1`, ... as on a chess board (letter: column, digit: row + 1). The prompt lists
the passages in order (`b3>`: from b3 one cell to the right is open, `b3v`: one cell down), then `S<start>G<goal>`.
Demonstrations are a right-hand wall follower's, dead ends and way back included; an impatient one steps through a
wall at each dead end, so that a model trained on both has a bad habit that reinforcement learning can remove.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

Cell = tuple[int, int]
Passages = dict[Cell, set[Cell]]
"""Cell -> the cells that it is open to."""

_UP_RIGHT_DOWN_LEFT = ((-1, 0), (0, 1), (1, 0), (0, -1))
_COLUMNS = "abcdefgh"
_PROMPT = re.compile(r"((?:[a-h][1-8][>v])+)S([a-h][1-8])G([a-h][1-8])")
_MIN_DISTANCE = 2
"""Start and goal are at least so many cells apart (rows plus columns)."""


@dataclass(frozen=True, slots=True)
class Maze:
    """One maze with the way that is asked for."""

    passages: Passages
    start: Cell
    goal: Cell


def cell_name(cell: Cell) -> str:
    return f"{_COLUMNS[cell[1]]}{cell[0] + 1}"


def cell_of(name: str) -> Cell:
    return int(name[1]) - 1, _COLUMNS.index(name[0])


def vocabulary(side: int) -> list[str]:
    """Every word of prompts and responses for mazes up to `side`: 2 * side * (side - 1) + side**2 + 2 of them."""
    cells = [(row, column) for row in range(side) for column in range(side)]
    right = [f"{cell_name(cell)}>" for cell in cells if cell[1] < side - 1]
    down = [f"{cell_name(cell)}v" for cell in cells if cell[0] < side - 1]
    return [*right, *down, *map(cell_name, cells), "S", "G"]


def draw_maze(rng: random.Random, sizes: Mapping[int, float]) -> Maze:
    """A random maze; `sizes` maps side length to weight.

    Growing-tree algorithm: extend the newest cell (long corridors) seven times in ten, else a random one.
    """
    side = rng.choices(list(sizes), list(sizes.values()))[0]
    passages: Passages = {(row, column): set() for row in range(side) for column in range(side)}
    cells = list(passages)
    first = rng.choice(cells)
    growing, reached = [first], {first}
    while growing:
        at = -1 if rng.random() < 0.7 else rng.randrange(len(growing))
        cell = growing[at]
        fresh = [near for near in _neighbours(cell) if near in passages and near not in reached]
        if not fresh:
            growing.pop(at)
            continue
        near = rng.choice(fresh)
        passages[cell].add(near)
        passages[near].add(cell)
        reached.add(near)
        growing.append(near)
    start, goal = rng.sample(cells, 2)
    while _distance(start, goal) < _MIN_DISTANCE:
        start, goal = rng.sample(cells, 2)
    return Maze(passages, start, goal)


def write_prompt(maze: Maze) -> str:
    """The maze as text; equal mazes give equal texts."""
    edges = sorted((cell, near) for cell, open_to in maze.passages.items() for near in open_to if cell < near)
    words = [cell_name(cell) + (">" if cell[0] == near[0] else "v") for cell, near in edges]
    return f"{''.join(words)}S{cell_name(maze.start)}G{cell_name(maze.goal)}"


def read_prompt(prompt: str) -> Maze:
    """The maze that a prompt describes; raises `ValueError` if it is none."""
    match = _PROMPT.fullmatch(prompt)
    if match is None:
        raise ValueError(f"not a maze: {prompt[:80]!r}")
    words, start, goal = match.groups()
    passages: Passages = {cell_of(start): set(), cell_of(goal): set()}
    for at in range(0, len(words), 3):
        cell = cell_of(words[at : at + 2])
        near = (cell[0], cell[1] + 1) if words[at + 2] == ">" else (cell[0] + 1, cell[1])
        passages.setdefault(cell, set()).add(near)
        passages.setdefault(near, set()).add(cell)
    return Maze(passages, cell_of(start), cell_of(goal))


def shortest_path(passages: Passages, start: Cell, goal: Cell) -> list[Cell]:
    """Breadth-first; both ends included. Raises `ValueError` if there is no way."""
    came_from: dict[Cell, Cell] = {start: start}
    frontier = [start]
    for cell in frontier:  # grows while we walk along it: a queue
        if cell == goal:
            break
        for near in sorted(passages[cell]):
            if near not in came_from:
                came_from[near] = cell
                frontier.append(near)
    if goal not in came_from:
        raise ValueError(f"no way from {cell_name(start)} to {cell_name(goal)}")
    path = [goal]
    while path[-1] != start:
        path.append(came_from[path[-1]])
    return path[::-1]


def draw_demonstration(maze: Maze, rng: random.Random, impatient: float) -> str:
    """A demonstration: with chance `impatient` one that steps through walls at dead ends (and mostly scores 0)."""
    hasty = rng.random() < impatient
    path = _follow_wall(maze, hasty)
    if len(path) > _patience(maze):  # went round in circles: after the first wall, straight to the goal
        broken = next(at for at in range(1, len(path)) if path[at] not in maze.passages[path[at - 1]])
        path = path[:broken] + shortest_path(maze.passages, path[broken], maze.goal)
    return "".join(map(cell_name, path))


def score_walk(prompt: str, response: str) -> float:
    """1.0 if the response is a legal walk from start to goal, else 0.0; `ValueError` if the prompt is no maze."""
    maze = read_prompt(prompt)
    names = [response[at : at + 2] for at in range(0, len(response), 2)]
    if not names or names[0] != cell_name(maze.start) or names[-1] != cell_name(maze.goal):
        return 0.0
    open_to = {cell_name(cell): set(map(cell_name, near)) for cell, near in maze.passages.items()}
    legal = all(there in open_to.get(here, ()) for here, there in pairwise(names))
    return float(legal)


def _neighbours(cell: Cell) -> list[Cell]:
    return [(cell[0] + row, cell[1] + column) for row, column in _UP_RIGHT_DOWN_LEFT]


def _distance(one: Cell, other: Cell) -> int:
    return abs(one[0] - other[0]) + abs(one[1] - other[1])


def _patience(maze: Maze) -> int:
    # A right-hand walk of a tree passes each passage at most twice, so a patient one is always shorter.
    return 4 * len(maze.passages)


def _follow_wall(maze: Maze, hasty: bool) -> list[Cell]:
    """Right hand on the wall, facing right at first; stops at the goal or when patience is over."""
    facing, path = 1, [maze.start]
    while path[-1] != maze.goal and len(path) <= _patience(maze):
        around = _neighbours(path[-1])
        open_to = maze.passages[path[-1]]
        ways = [way % 4 for way in (facing + 1, facing, facing - 1, facing + 2) if around[way % 4] in open_to]
        if hasty and len(ways) == 1 and len(path) > 1:
            walls = [way for way in range(4) if way not in ways and around[way] in maze.passages]
            ways = [min(walls, key=lambda way: _distance(around[way], maze.goal), default=ways[0])]
        facing = ways[0]
        path.append(around[facing])
    return path
