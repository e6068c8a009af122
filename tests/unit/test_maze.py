import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.data.maze import (
    Maze,
    cell_name,
    cell_of,
    draw_demonstration,
    draw_maze,
    read_prompt,
    score_walk,
    shortest_path,
    vocabulary,
    write_prompt,
)

SIZES = {2: 0.2, 3: 0.3, 4: 0.3, 6: 0.15, 8: 0.05}
mazes = st.integers(0, 2**32).map(lambda seed: draw_maze(random.Random(seed), SIZES))


def reachable(maze: Maze) -> set[tuple[int, int]]:
    """Depth-first, on its own."""
    found, waiting = set(), [maze.start]
    while waiting:
        cell = waiting.pop()
        if cell not in found:
            found.add(cell)
            waiting.extend(maze.passages[cell])
    return found


def names(cells: list[tuple[int, int]]) -> str:
    return "".join(map(cell_name, cells))


@given(mazes)
def test_a_maze_is_a_spanning_tree(maze: Maze) -> None:
    assert reachable(maze) == set(maze.passages)
    assert sum(map(len, maze.passages.values())) == 2 * (len(maze.passages) - 1)
    for cell, near in ((cell, near) for cell, open_to in maze.passages.items() for near in open_to):
        assert abs(cell[0] - near[0]) + abs(cell[1] - near[1]) == 1
        assert cell in maze.passages[near]
    assert abs(maze.start[0] - maze.goal[0]) + abs(maze.start[1] - maze.goal[1]) >= 2


@given(mazes)
def test_a_prompt_tells_the_whole_maze(maze: Maze) -> None:
    assert read_prompt(write_prompt(maze)) == maze


@given(mazes, st.integers(0, 1000))
def test_patient_demonstrations_score_and_start_with_no_detour_missing(maze: Maze, seed: int) -> None:
    prompt, walk = write_prompt(maze), draw_demonstration(maze, random.Random(seed), impatient=0.0)
    assert score_walk(prompt, walk) == 1.0
    cells = [cell_of(walk[at : at + 2]) for at in range(0, len(walk), 2)]
    assert set(shortest_path(maze.passages, maze.start, maze.goal)) <= set(cells)


@given(mazes, st.integers(0, 1000))
def test_impatient_demonstrations_reach_the_goal_and_score_iff_no_wall_is_crossed(maze: Maze, seed: int) -> None:
    prompt, walk = write_prompt(maze), draw_demonstration(maze, random.Random(seed), impatient=1.0)
    cells = [cell_of(walk[at : at + 2]) for at in range(0, len(walk), 2)]
    assert cells[0] == maze.start
    assert cells[-1] == maze.goal
    legal = all(there in maze.passages[here] for here, there in pairwise(cells))
    assert score_walk(prompt, walk) == float(legal)
    assert len(cells) <= 5 * len(maze.passages)


def test_about_half_of_the_default_demonstrations_are_wrong() -> None:
    rng = random.Random(0)
    drawn = [draw_maze(rng, {3: 0.3, 4: 0.3, 5: 0.25, 6: 0.15}) for _ in range(1500)]
    scores = [score_walk(write_prompt(maze), draw_demonstration(maze, rng, 0.65)) for maze in drawn]
    assert 0.48 < sum(scores) / len(scores) < 0.62


@given(mazes)
def test_only_a_whole_legal_walk_scores(maze: Maze) -> None:
    prompt, path = write_prompt(maze), shortest_path(maze.passages, maze.start, maze.goal)
    assert score_walk(prompt, names(path)) == 1.0
    assert score_walk(prompt, names(path[1:])) == 0.0
    assert score_walk(prompt, names(path[:-1])) == 0.0
    assert score_walk(prompt, names([path[0], *path])) == 0.0, "a step on the spot is no step"
    assert score_walk(prompt, names(path) + "x") == 0.0
    assert score_walk(prompt, "") == 0.0
    assert score_walk(prompt, names([path[0], path[-1]])) == 0.0


def test_what_is_no_maze_is_refused() -> None:
    for text in ("", "SG", "a1>Sa1", "What is 2 + 2?", "a1>Sa1Gb1 "):
        with pytest.raises(ValueError, match="not a maze"):
            read_prompt(text)
    with pytest.raises(ValueError, match="no way"):
        shortest_path({(0, 0): set(), (0, 1): set()}, (0, 0), (0, 1))


def test_the_vocabulary_of_the_default_task_has_98_words() -> None:
    words = vocabulary(6)
    assert len(words) == len(set(words)) == 98
