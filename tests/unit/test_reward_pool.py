import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.config import RewardConfig
from forebay.errors import DataError, RunError, UserError
from forebay.rewards import Judgement
from forebay.rewards.pool import RewardPool
from forebay.rewards.worker import Worker, load_decoder
from forebay.training.tiny_model import END, make_tokenizer
from tests.support.golden_rewards import HOSTILE, HUGE

WORDS = ["a1", "b1", "a2", "b2", "a1>", "a1v", "S", "G"]
TOKENIZER = make_tokenizer(WORDS)
MODULE = "tests.unit.reward_functions"


BUDGET = 16


def pool_of(name: str, folder: Path, **settings: Any) -> RewardPool:
    return RewardPool(RewardConfig(name=name, **settings), folder, BUDGET)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def moody(folder: Path) -> Iterator[RewardPool]:
    pool = pool_of(f"{MODULE}:moody", folder, timeout_s=1.0)
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
    pool = pool_of("maze", folder)
    try:
        group = [(ids(f"a1b1b2{END}"), True), (ids("a1b1b2"), False), (ids(f"a1a2b2{END}"), True)]
        assert asyncio.run(pool.score(group, '{"side": 2}', "a1>a1vb1vSa1Gb2")) == [1.0, 0.0, 0.0]
        assert asyncio.run(pool.score([], "1", "x")) == []
        with pytest.raises(DataError, match="response 1 of 3: failed, raised ValueError: not a maze"):
            asyncio.run(pool.score(group, "1", "not in my town"))
        assert pool.tally.verdicts == {"right": 1, "cut_off": 2, "wrong": 1, "failed": 2}
    finally:
        pool.close()


def test_formulas_are_compared_in_the_worker(tmp_path: Path) -> None:
    letters = make_tokenizer([*r"\boxed{}sqrt28 "])
    letters.save(str(tmp_path / "tokenizer.json"))
    pool = pool_of("math", tmp_path, timeout_s=30.0)
    try:
        group = [(letters.encode(rf"\boxed{{{text}}}").ids, True) for text in (r"2\sqrt{2}", r"8\sqrt{2}", "2")]
        assert asyncio.run(pool.score(group, json.dumps(r"\sqrt{8}"), "x")) == [1.0, 0.0, 0.0]
    finally:
        pool.close()


@pytest.mark.parametrize("hang", ["hang", "hang in C"])
def test_workers_end_with_a_parent_that_was_killed(folder: Path, hang: str) -> None:
    script = f"""
import asyncio, multiprocessing, pathlib
from forebay.config import RewardConfig
from forebay.rewards.pool import RewardPool
if __name__ == "__main__":
    pool = RewardPool(RewardConfig(name="{MODULE}:moody", timeout_s=60.0), pathlib.Path("{folder}"), 16)
    asyncio.run(pool.score([([5], True)], "1", "good"))
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    asyncio.run(pool.score([([5], True)], "1", "{hang}"))
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers = parent.stdout.readline().split()
    assert len(workers) == 1
    assert runs(workers[0])
    time.sleep(3.0)  # so that it hangs by then
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 30
    while runs(workers[0]):
        assert time.monotonic() < deadline, "the worker outlives its parent"
        time.sleep(0.1)


def test_own_function_gets_text_answer_and_prompt_and_truncated_responses_if_asked(folder: Path) -> None:
    pool = pool_of(f"{MODULE}:length", folder, workers=2, truncated="score")

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
        ("nan", "returned nan, not a finite number"),
        ("inf", "returned inf, not a finite number"),
        ("text", "returned 'much', not a number"),
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
    before, began = moody.tally.verdicts["timed_out"], time.monotonic()
    with pytest.raises(DataError, match=r"longer than reward.timeout_s"):
        ask(moody, prompt)
    assert time.monotonic() - began < 8
    assert moody.tally.verdicts["timed_out"] == before + 1
    assert ask(moody, "good") == [1.0]


def test_a_worker_that_dies_is_replaced(moody: RewardPool, tmp_path: Path) -> None:
    assert ask(moody, f"die once {tmp_path / 'mark'}") == [1.0]
    with pytest.raises(DataError, match="its process ended twice"):
        ask(moody, "die")
    assert ask(moody, "good") == [1.0]


def stop(pool: RewardPool) -> None:
    """As after `kill -STOP`: it lives, and does nothing."""
    os.kill(pool._workers[0]._process.pid or 0, signal.SIGSTOP)


def test_a_worker_that_takes_no_task_is_replaced(moody: RewardPool, monkeypatch: pytest.MonkeyPatch) -> None:
    long = ids("a1b1") * 100_000  # more than a pipe holds
    assert ask(moody, "good") == [1.0]
    stop(moody)
    assert asyncio.run(moody.score([(long, True)], "1", "good")) == [1.0]
    stop(moody)
    receive, calls = Worker._receive, []

    def impatient(worker: Worker, deadline: float) -> Any:
        calls.append(deadline)
        return receive(worker, 0.0 if len(calls) == 1 else deadline)

    monkeypatch.setattr(Worker, "_receive", impatient)
    assert ask(moody, "good") == [1.0]
    assert len(calls) > 2


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


def test_a_task_that_no_worker_begins_times_out_as_a_whole(moody: RewardPool, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def silent(worker: Worker, task: Any, left: list[int]) -> Any:
        tried.append(left)
        raise TimeoutError

    monkeypatch.setattr(Worker, "_messages", silent)
    with pytest.raises(DataError, match="not begun within 120 s, twice"):
        asyncio.run(moody.score([(ids("a1"), True)] * 3, "1", "good"))
    assert tried == [[0, 1, 2]] * 2


def test_close_leaves_no_worker_and_a_closed_pool_says_so(folder: Path, moody: RewardPool) -> None:
    ask(moody, "good")  # so that its worker is among those before
    before = set(multiprocessing.active_children())
    pool = pool_of(f"{MODULE}:moody", folder, workers=2, timeout_s=5.0)
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
    decode = load_decoder(str(tmp_path))
    assert decode([*(byte + 3 for byte in b"a1 b2"), 1]) == "a1 b2"


def test_a_reward_that_cannot_be_loaded_or_a_folder_without_tokenizer_is_told(folder: Path, tmp_path: Path) -> None:
    for name, where, words in (("no.such:thing", folder, "cannot import no.such"), ("exact", tmp_path, "no tokenizer")):
        pool = pool_of(name, where)
        try:
            with pytest.raises(UserError, match=words):
                ask(pool, "good")
        finally:
            pool.close()


def test_only_the_response_that_hangs_times_out_and_the_others_are_judged(folder: Path) -> None:
    pool = pool_of(f"{MODULE}:as_it_says", folder, timeout_s=1.0)
    group = [(ids(text), True) for text in ("a1", "a1a1", "a1", "b1", "b1b1", "a1")]
    try:
        judged = asyncio.run(pool.judge(group, "1", "x"))
        assert [judgement.verdict for judgement in judged] == [
            "right",
            "timed_out",
            "right",
            "failed",
            "wrong",
            "right",
        ]
        assert [judgement.score for judgement in judged] == [1.0, None, 1.0, None, 0.0, 1.0]
        assert "its process ended twice" in judged[3].reason
        with pytest.raises(DataError, match=r"response 2 of 6: timed_out, longer than reward\.timeout_s"):
            asyncio.run(pool.score(group, "1", "x"))
    finally:
        pool.close()


def test_children_of_a_verifier_end_with_it(folder: Path, tmp_path: Path) -> None:
    pool = pool_of(f"{MODULE}:moody", folder, timeout_s=1.0)
    try:
        ask(pool, "good")
        with pytest.raises(DataError, match="timed_out"):
            ask(pool, f"child {tmp_path / 'pid'}")
        deadline = time.monotonic() + 10
        while runs((tmp_path / "pid").read_text()):
            assert time.monotonic() < deadline, "the verifier's own child outlives it"
            time.sleep(0.05)
    finally:
        pool.close()


@pytest.mark.parametrize("name", ["batch", "async_single", "async_batch"])
def test_functions_that_are_asynchronous_or_take_all_responses(folder: Path, name: str) -> None:
    pool = pool_of(f"{MODULE}:{name}", folder, timeout_s=5.0)
    group = [(ids("a1" * n), n != 2) for n in range(1, 5)]
    try:
        began = time.monotonic()
        judged = asyncio.run(pool.judge(group, '{"plus": 0.5}', "x"))
        assert [judgement.score for judgement in judged] == [2.5, 0.0, 6.5, 8.5]
        assert judged[1].verdict == "cut_off"
        assert time.monotonic() - began < 30
        with pytest.raises(DataError, match=r"raised KeyError|returned"):
            asyncio.run(pool.score(group, "{}", "x"))
    finally:
        pool.close()


def test_all_responses_time_out_where_they_are_judged_together(folder: Path) -> None:
    pool = pool_of(f"{MODULE}:async_single", folder, timeout_s=1.0)
    try:
        judged = asyncio.run(pool.judge([(ids("a1"), True), (ids("b1"), True)], '{"plus": 1, "sleep": "b1"}', "x"))
        assert [judgement.verdict for judgement in judged] == ["right", "timed_out"]
    finally:
        pool.close()


def test_rows_bring_their_own_verifier_but_no_code_of_their_own(folder: Path) -> None:
    pool = pool_of("maze", folder, options={f"{MODULE}:length": {}})
    group = [(ids("a1b1b2"), True)]
    try:
        assert asyncio.run(pool.score(group, '"a1b1b2"', "x", "exact")) == [1.0]
        assert asyncio.run(pool.score(group, '{"plus": 1}', "xy", f"{MODULE}:length")) == [9.0]
        with pytest.raises(DataError, match="failed, verifier os:abort of this row is neither built in nor named"):
            asyncio.run(pool.score(group, "1", "x", "os:abort"))
        assert asyncio.run(pool.score(group, "1", "a1>a1vb1vSa1Gb2")) == [1.0]
    finally:
        pool.close()


def test_weights_compose_and_length_is_counted_in_tokens(folder: Path) -> None:
    weights = {"answer": 0.5, "overlong": 2.0}
    pool = pool_of("exact", folder, weights=weights, options={"overlong": {"buffer": 4}})
    try:
        long = "a1" * 14  # the buffer begins after 12 of 16 tokens
        group = [(ids("a1"), True), (ids(long), True), (ids("a1" * 16), False)]
        judged = asyncio.run(pool.judge(group, '"a1"', "x"))
        assert [(j.score, j.verdict) for j in judged] == [(0.5, "right"), (-1.0, "wrong"), (-2.0, "cut_off")]
        assert judged[1].reason == "exact 0 (another text); overlong -0.5 (14 of 16 tokens, penalty from 12 on)"
        assert isinstance(judged[0], Judgement)
    finally:
        pool.close()


def test_hostile_answers_neither_stall_nor_stay_unjudged(tmp_path: Path) -> None:
    hostile = [row for row in (*HOSTILE, *HUGE) if all(ord(letter) < 128 for letter in row.response)]
    letters = make_tokenizer([chr(code) for code in range(32, 127)])
    letters.save(str(tmp_path / "tokenizer.json"))
    pool = pool_of("math", tmp_path, timeout_s=5.0)
    try:
        began = time.monotonic()
        for row in hostile:
            response = row.response[:2000].replace("\n", " ")
            (judged,) = asyncio.run(pool.judge([(letters.encode(response).ids, True)], json.dumps(row.truth), "x"))
            assert judged.verdict in ("right", "wrong"), (row.response[:80], judged)
        assert time.monotonic() - began < 60
    finally:
        pool.close()
