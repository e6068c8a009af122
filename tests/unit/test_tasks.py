"""The cycle task, tasks of reasoning-gym (a stand-in for the package), the tiny start models' words, the profiles."""

import json
import random
import re
import sys
from importlib.machinery import ModuleSpec
from itertools import cycle, pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config import CycleConfig, DataConfig, TelecomConfig, load_profile
from forebay.data import reasoning_gym as gym
from forebay.data.builtin import draw_splits
from forebay.data.cycle import LETTERS, MOST_STEPS, draw_cycle, running_totals
from forebay.data.prepare import prepare_data
from forebay.data.schema import read_rows
from forebay.data.tiny_tasks import TINY_TASKS
from forebay.errors import UserError
from forebay.rewards.verifier import load_verifier
from forebay.run import RunContext
from forebay.training.tiny_model import make_tokenizer

PROFILES = Path(__file__).parents[2] / "profiles"
FEW = {"train_prompts": 40, "validation_prompts": 5, "test_prompts": 15}
TELECOM = {"families": {"alarm": 1, "link_budget": 1, "handover": 1}, "difficulty": {1: 1}}


def verdict(name: str, response: str, answer: Any) -> str:
    return load_verifier(name).function(response, answer, "").verdict


# ---- cycle


@given(st.integers(0, 2**32), st.integers(1, 8), st.integers(6, 60))
def test_cycle_answers_by_adding_up_again(seed: int, terms: int, target: int) -> None:
    question = draw_cycle(random.Random(seed), (1, terms), target)
    numbers = [int(number) for number in re.findall(r"[a-h]([+-]\d+)", question.prompt)]
    goal = int(re.search(r"at least (\d+)", question.prompt)[1])  # type: ignore[index]
    total, letters = 0, []
    for letter, number in cycle(zip(LETTERS, numbers, strict=False)):
        total, letters = total + number, [*letters, letter]
        if total >= goal:
            break
        assert len(letters) <= MOST_STEPS
    letter = letters[-1]
    assert 6 <= goal <= target
    assert len(numbers) <= terms
    assert question.answer == f"{letter}{total}"
    assert verdict(question.verifier, question.solution, question.answer) == "right"
    for wrong in (f"{letter}{total + 1}", f"{LETTERS[-1]}x", str(total), letter, ""):
        assert verdict(question.verifier, f"Answer: {wrong}", question.answer) == "wrong"


def test_totals_that_fall_below_zero_or_never_arrive_are_no_question() -> None:
    assert running_totals([2, -1], 4) == [2, 1, 3, 2, 4]
    assert running_totals([2, -3], 4) == []
    assert running_totals([1, -1], 6) == []


def test_harder_cycles_are_longer() -> None:
    def mean_steps(terms: tuple[int, int], target: int) -> float:
        return sum(len(draw_cycle(random.Random(seed), terms, target).solution.split()) for seed in range(200)) / 200

    sizes = [mean_steps((2, 3), 15), mean_steps((2, 7), 30), mean_steps((5, 8), 120)]
    assert all(easier + 2 < harder for easier, harder in pairwise(sizes))


def test_unordered_or_empty_knobs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"min_terms \(5\) is above max_terms \(4\)"):
        CycleConfig(min_terms=5, max_terms=4)
    with pytest.raises(ValueError, match="at least one"):
        TelecomConfig(families={})
    with pytest.raises(ValueError, match="less than or equal to 3"):
        TelecomConfig(difficulty={4: 1})


# ---- addresses


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("Answer: 10.0.0.0/24", "10.0.0.0/24", "right"),
        (r"\boxed{10.0.0.0/24}", "10.0.0.0/24", "right"),
        ("It is 10.0.0.7.", "10.0.0.7", "right"),
        ("Answer: 2001:DB8:0:0::/48", "2001:db8::/48", "right"),
        ("Answer: 2001:0db8:0000::1", "2001:db8::1", "right"),
        ("Answer: 10.0.0.1/24", "10.0.0.0/24", "wrong"),
        ("Answer: 10.0.0.0", "10.0.0.0/24", "wrong"),
        ("Answer: 10.0.0.0/25", "10.0.0.0/24", "wrong"),
        ("Answer: 010.0.0.7", "10.0.0.7", "wrong"),
        ("Answer: 10.0.0.7 or 10.0.0.8", "10.0.0.7", "wrong"),
        (r"\boxed{10.0.0.7", "10.0.0.7", "wrong"),
        ("<think>10.0.0.7</think> I do not know", "10.0.0.7", "wrong"),
        ("", "10.0.0.7", "wrong"),
    ],
)
def test_addresses(response: str, answer: str, expected: str) -> None:
    assert verdict("address", response, answer) == expected


def test_an_address_reference_must_be_one() -> None:
    with pytest.raises(TypeError, match="needs text"):
        verdict("address", "Answer: 10.0.0.7", 7)
    with pytest.raises(ValueError, match=r"10\.0\.0\.1/24 has host bits set"):
        verdict("address", "Answer: 10.0.0.7", "10.0.0.1/24")


# ---- reasoning-gym


class _Task:
    """As the package's base class: part of the score for an answer that contains the right one."""

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.seed = name, seed

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert index == 0
        answer = None if self.name == "no_answer" else str(self.seed % 1000)
        return {"question": f"What is {self.seed} modulo 1000?", "answer": answer, "metadata": {}}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        if answer == "garbage":
            raise ValueError("cannot read it")
        return 1.0 if answer == entry["answer"] else 0.5 * (entry["answer"] in answer)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("reasoning_gym")
    module.__spec__ = ModuleSpec("reasoning_gym", None)

    def create_dataset(name: str, size: int, seed: int) -> _Task:
        if name not in ("modulo", "no_answer"):
            raise ValueError(f"Dataset '{name}' not registered")
        return _Task(name, seed)

    module.create_dataset = create_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)
    gym._package.cache_clear()
    monkeypatch.setattr(gym, "_package", gym._package.__wrapped__)


@pytest.mark.usefixtures("package")
def test_reasoning_gym_scores_in_full_or_not_at_all() -> None:
    data = DataConfig(source="builtin:reasoning_gym/modulo", **FEW)
    splits = draw_splits(data, 0)
    assert splits == draw_splits(data, 0)
    assert len({draft.prompt for drafts in splits.values() for draft in drafts}) == 60
    draft = splits["train"][0]
    assert (draft.verifier, draft.tags) == ("reasoning_gym", ("task:modulo",))
    right = str(int(re.search(r"(\d+) modulo", draft.prompt)[1]) % 1000)  # type: ignore[index]
    answer = json.loads(draft.answer)
    assert verdict("reasoning_gym", f"I think.\nAnswer: {right}", answer) == "right"
    assert verdict("reasoning_gym", f"Answer: {right} or 5", answer) == "wrong"
    assert verdict("reasoning_gym", "Answer: garbage", answer) == "wrong"
    assert verdict("reasoning_gym", right, answer) == "wrong"
    with pytest.raises(TypeError, match="task"):
        verdict("reasoning_gym", "Answer: 1", 1)


@pytest.mark.usefixtures("package")
def test_unknown_and_unfit_tasks_of_reasoning_gym_are_refused() -> None:
    with pytest.raises(UserError, match="reasoning_gym/chess: Dataset 'chess' not registered"):
        draw_splits(DataConfig(source="builtin:reasoning_gym/chess", **FEW), 0)
    with pytest.raises(UserError, match="does not accept its own answer"):
        draw_splits(DataConfig(source="builtin:reasoning_gym/no_answer", **FEW), 0)


def test_reasoning_gym_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "reasoning_gym" else find(name))
    with pytest.raises(UserError, match=r"reasoning-gym is missing; install it with: pip install 'forebay\[reason"):
        draw_splits(DataConfig(source="builtin:reasoning_gym/modulo", **FEW), 0)


# ---- tiny start models and profiles


@pytest.mark.parametrize(
    ("name", "settings"), [("maze", {}), ("cycle", {}), ("cycle", {"max_terms": 8, "target": 90}), ("telecom", TELECOM)]
)
def test_a_tiny_model_knows_every_word_of_its_task(name: str, settings: dict[str, Any]) -> None:
    task = TINY_TASKS[f"builtin:{name}-tiny"]
    data = DataConfig.model_validate({"source": task.source, name: settings})
    task.check(data)
    words = task.words(data)
    assert len(words) == len(set(words))
    tokenizer, rng = make_tokenizer(words), random.Random(0)
    for _ in range(300):
        for text in task.demonstrate(rng, data):
            ids = tokenizer.encode(text).ids
            assert 0 not in ids, text
            assert tokenizer.decode(ids) == text


def test_a_tiny_model_refuses_what_it_cannot_read() -> None:
    task = TINY_TASKS["builtin:telecom-tiny"]
    for settings in ({}, {"families": {"ipv4": 1}, "difficulty": {1: 1}}, {"families": {"alarm": 1}}):
        with pytest.raises(UserError, match=r"reads only the families alarm, .* at difficulty 1"):
            task.check(DataConfig.model_validate({"source": "builtin:telecom", "telecom": settings}))
    with pytest.raises(UserError, match=r"builtin:cycle-tiny reads only data\.source builtin:cycle"):
        TINY_TASKS["builtin:cycle-tiny"].check(DataConfig())


@pytest.mark.parametrize(("profile", "most_tokens"), [("telecom_cpu", 64), ("maze_cpu", 96)])
def test_the_profiles_prepare_their_data(profile: str, most_tokens: int, tmp_path: Path) -> None:
    overrides = [f"storage.scratch={tmp_path}", "model.warm_start.steps=2"]
    overrides += [f"data.{name}={count}" for name, count in FEW.items()]
    config = load_profile(str(PROFILES / f"{profile}.yaml"), overrides)
    prepared = prepare_data(RunContext.create(config))
    assert prepared.counts["train"] == 40
    rows = read_rows(prepared.train)
    assert all(row.tags for row in rows)
    assert all(0 not in row.prompt_ids and len(row.prompt_ids) <= most_tokens for row in rows)
    if profile == "telecom_cpu":
        assert {row.verifier for row in rows} == {"math", "numeric"}
        assert {row.tags[0] for row in rows} == {"family:alarm", "family:link_budget", "family:handover"}
