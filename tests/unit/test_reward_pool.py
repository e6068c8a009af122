import asyncio
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.errors import DataError, RunError, UserError
from forebay.rewards import BUILT_IN, load_reward
from forebay.rewards import pool as pool_module
from forebay.rewards.pool import RewardPool
from forebay.training.tiny_model import END, SPECIALS, make_tokenizer

WORDS = ["a1", "b1", "a2", "b2", "a1>", "a1v", "S", "G"]
TOKENIZER = make_tokenizer(WORDS)
MODULE = "tests.unit.reward_functions"


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def moody(folder: Path) -> Iterator[RewardPool]:
    pool = RewardPool(f"{MODULE}:moody", folder, workers=1, timeout_s=1.0)
    yield pool
    pool.close()


def ask(pool: RewardPool, prompt: str, answer: str = "1") -> list[float]:
    return asyncio.run(pool.score([(ids("a1b1"), True)], answer, prompt))


def runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_maze_rewards_decode_without_special_tokens_and_zero_what_is_cut_off(folder: Path) -> None:
    pool = RewardPool("maze", folder, workers=1, timeout_s=10.0)
    try:
        group = [(ids(f"a1b1b2{END}"), True), (ids("a1b1b2"), False), (ids(f"a1a2b2{END}"), True)]
        assert asyncio.run(pool.score(group, '{"side": 2}', "a1>a1vb1vSa1Gb2")) == [1.0, 0.0, 0.0]
        assert asyncio.run(pool.score([], "1", "x")) == []
        with pytest.raises(DataError, match="raised ValueError: not a maze"):
            asyncio.run(pool.score(group, "1", "not in my town"))
    finally:
        pool.close()


def test_formulas_are_compared_in_the_worker(tmp_path: Path) -> None:
    letters = make_tokenizer([*r"\boxed{}sqrt28 "])
    letters.save(str(tmp_path / "tokenizer.json"))
    pool = RewardPool("math", tmp_path, workers=1, timeout_s=30.0)
    try:
        group = [(letters.encode(rf"\boxed{{{text}}}").ids, True) for text in (r"2\sqrt{2}", r"8\sqrt{2}", "2")]
        assert asyncio.run(pool.score(group, json.dumps(r"\sqrt{8}"), "x")) == [1.0, 0.0, 0.0]
    finally:
        pool.close()


def test_workers_end_with_a_parent_that_was_killed(folder: Path) -> None:
    script = f"""
import asyncio, multiprocessing, pathlib, threading, time
from forebay.rewards.pool import RewardPool
if __name__ == "__main__":
    pool = RewardPool("{MODULE}:moody", pathlib.Path("{folder}"), 1, 60.0)
    asyncio.run(pool.score([([5], True)], "1", "good"))
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    asyncio.run(pool.score([([5], True)], "1", "hang"))
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers = parent.stdout.readline().split()
    assert len(workers) == 1
    assert runs(workers[0])
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 30
    while runs(workers[0]):
        assert time.monotonic() < deadline, "the worker outlives its parent"
        time.sleep(0.1)


def test_own_function_gets_text_answer_and_prompt_and_truncated_responses_if_asked(folder: Path) -> None:
    pool = RewardPool(f"{MODULE}:length", folder, workers=2, timeout_s=10.0, truncated="score")

    async def many() -> list[list[float]]:
        return await asyncio.gather(*(pool.score([(ids("a1" * n), False)], '{"plus": 1}', "xyz") for n in range(20)))

    try:
        assert asyncio.run(many()) == [[2 * n + 4.0] for n in range(20)]
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("raise", "raised KeyError: 'no such thing"),
        ("exit", "raised SystemExit: 3"),
        ("nan", "returned nan"),
        ("inf", "returned inf"),
        ("text", "raised ValueError"),
    ],
)
def test_bad_behaviour_has_a_reason(moody: RewardPool, prompt: str, reason: str) -> None:
    with pytest.raises(DataError, match=reason) as caught:
        ask(moody, prompt)
    assert "\n" not in str(caught.value)
    assert ask(moody, "good") == [1.0]


@pytest.mark.parametrize("prompt", ["hang", "hang in C"])
def test_a_hang_is_killed_and_the_next_group_is_scored(moody: RewardPool, prompt: str) -> None:
    ask(moody, "good")
    before, began = moody.timeouts, time.monotonic()
    with pytest.raises(DataError, match=r"longer than reward.timeout_s"):
        ask(moody, prompt)
    assert time.monotonic() - began < 8
    assert moody.timeouts == before + 1
    assert ask(moody, "good") == [1.0]


def test_a_worker_that_dies_is_replaced(moody: RewardPool, tmp_path: Path) -> None:
    assert ask(moody, f"die once {tmp_path / 'mark'}") == [1.0]
    with pytest.raises(DataError, match="its process ended twice"):
        ask(moody, "die")
    assert ask(moody, "good") == [1.0]


def test_the_event_loop_runs_on_while_a_group_is_scored(moody: RewardPool) -> None:
    async def ticks() -> int:
        scoring = asyncio.create_task(moody.score([(ids("a1"), True)], "1", "hang"))
        count = 0
        while not scoring.done():
            await asyncio.sleep(0.02)
            count += 1
        with pytest.raises(DataError):
            await scoring
        return count

    assert asyncio.run(ticks()) > 20


def test_close_leaves_no_worker_and_a_closed_pool_says_so(folder: Path, moody: RewardPool) -> None:
    ask(moody, "good")  # so that its worker is among those before
    before = set(multiprocessing.active_children())
    pool = RewardPool(f"{MODULE}:moody", folder, workers=2, timeout_s=5.0)
    assert ask(pool, "good") == [1.0]
    started = set(multiprocessing.active_children()) - before
    assert len(started) == 2
    pool.close()
    pool.close()
    assert not started & set(multiprocessing.active_children())
    with pytest.raises(RunError, match="are stopped"):
        ask(pool, "good")


def test_a_tokenizer_without_tokenizer_json_decodes_through_transformers(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    decode = pool_module._load_decoder(str(tmp_path))
    assert decode([*(byte + 3 for byte in b"a1 b2"), 1]) == "a1 b2"


def test_a_reward_that_cannot_be_loaded_or_a_folder_without_tokenizer_is_told(folder: Path, tmp_path: Path) -> None:
    for name, where, words in (("no.such:thing", folder, "cannot import no.such"), ("exact", tmp_path, "no tokenizer")):
        pool = RewardPool(name, where, workers=1, timeout_s=60.0)
        try:
            with pytest.raises(UserError, match=words):
                ask(pool, "good")
        finally:
            pool.close()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mazes", "write maze, math, exact or package.module:function"),
        ("a.b:", "write maze"),
        ("no_such_module:f", "cannot import no_such_module .ModuleNotFoundError"),
        (f"{MODULE}:missing", "has no function missing"),
        (f"{MODULE}:not_a_function", "has no function not_a_function"),
        (f"{MODULE}:two", "must take .response, answer, prompt."),
    ],
)
def test_names_of_rewards_are_checked(name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_reward(name)


def test_built_in_rewards_load() -> None:
    assert all(callable(load_reward(name)) for name in BUILT_IN)
    assert len(SPECIALS) == 4
