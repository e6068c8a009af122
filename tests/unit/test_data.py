"""Reading, checking, splitting and writing of prompts; the start model's folder."""

import json
import random
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config import DataConfig, load_profile, parse_config
from forebay.data.arithmetic import draw_sum
from forebay.data.builtin import draw_splits
from forebay.data.maze import vocabulary
from forebay.data.prepare import PreparedData, prepare_data
from forebay.data.read import read_source
from forebay.data.schema import Draft, Row, prompt_id, read_rows, write_rows
from forebay.data.split import SPLITS, fill_empty, orders
from forebay.data.start_model import resolve_start_model
from forebay.errors import RunError, UserError
from forebay.rewards import load_verifier
from forebay.run import RunContext
from forebay.training.tiny_model import SPECIALS, TinyQwen3, make_tokenizer, save_model

LEFT_OUT = ("unused", "quarantined", "duplicates", "leaked")
Write = Callable[[Path, list[dict[str, Any]]], None]


def run_with(folder: Path, **values: Any) -> RunContext:
    return RunContext.create(parse_config({"storage": {"scratch": str(folder)}, **values}, "test"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model that knows the letters of the tests' prompts."""
    folder = tmp_path_factory.mktemp("model")
    words = [*"abcdefghijklmnopqrstuvwxyz0123456789 ?é+"]
    save_model(TinyQwen3(len(SPECIALS) + len(words), 0), make_tokenizer(words), folder)
    return folder


def prepare(tmp_path: Path, model: Path, source: Path, **data: Any) -> tuple[RunContext, PreparedData]:
    sizes = {"train_prompts": 8, "validation_prompts": 2, "test_prompts": 4}
    run = run_with(
        tmp_path / "scratch",
        model={"path": str(model), "max_model_len": 64},
        generation={"max_new_tokens": 32},
        reward={"name": "exact"},
        data={"source": str(source), **sizes, **data},
    )
    return run, prepare_data(run)


def parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path)


def json_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8")


def json_list(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(rows), encoding="utf-8")


def comma_separated(path: Path, rows: list[dict[str, Any]]) -> None:
    lines = [",".join(rows[0])] + [",".join(f'"{value}"' for value in row.values()) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8-sig")


@pytest.mark.parametrize(
    ("suffix", "write"),
    [(".parquet", parquet), (".jsonl", json_lines), (".json", json_list), (".csv", comma_separated)],
)
def test_every_format_gives_the_same_prompts(tmp_path: Path, model: Path, suffix: str, write: Write) -> None:
    source = tmp_path / f"own{suffix}"
    write(source, [{"question": f"how much is {n} + {n}? é", "gold": str(2 * n)} for n in range(40)])
    _, done = prepare(tmp_path, model, source, columns={"prompt": "question", "answer": "gold"})
    assert done.counts["read"] == 40
    assert done.counts["quarantined"] == 0
    assert sum(done.counts[name] for name in (*SPLITS, "unused")) == 40
    rows = [row for name in SPLITS for row in read_rows(getattr(done, name))]
    assert len({row.prompt_id for row in rows}) == len(rows) == 40 - done.counts["unused"]
    for row in rows:
        number = row.prompt.split()[3]
        assert row.prompt == f"how much is {number} + {number}? é"
        assert json.loads(row.answer) == str(2 * int(number))
        assert row.messages == ({"role": "user", "content": row.prompt},)
        assert row.prompt_id == prompt_id(row.messages)
        assert row.source == str(source)
    assert done.warm_start is None
    assert done.model.resolve() == model.resolve()


def test_prompt_ids_are_the_chat_template_of_transformers(tmp_path: Path, model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    source = tmp_path / "own.jsonl"
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    json_lines(source, [{"prompt": talk, "answer": 1}, {"prompt": "d e", "answer": {"x": 1}}])
    _, done = prepare(tmp_path, model, source)
    rows = [row for name in SPLITS for row in read_rows(getattr(done, name))]
    assert len(rows) == 2
    for row in rows:
        expected = tokenizer.apply_chat_template(
            [dict(message) for message in row.messages], add_generation_prompt=True, return_dict=False
        )
        assert list(row.prompt_ids) == expected
    assert {row.prompt for row in rows} == {"c", "d e"}


BAD_ROWS: list[tuple[Any, str]] = [
    ({"answer": "1"}, "no column 'prompt' (columns here: answer; set data.columns.prompt)"),
    ({"prompt": "x"}, "no column 'answer'"),
    ({"prompt": "  ", "answer": "1"}, "the prompt is empty"),
    ({"prompt": [], "answer": "1"}, "the prompt is empty"),
    ({"prompt": None, "answer": "1"}, "the prompt is empty, not text"),
    ({"prompt": 7, "answer": "1"}, "the prompt is of type int"),
    ({"prompt": ["x"], "answer": "1"}, "message 1 of the prompt is not {role:"),
    ({"prompt": [{"role": "tool", "content": "x"}], "answer": "1"}, "message 1 of the prompt is not {role:"),
    ({"prompt": [{"role": "assistant", "content": "x"}], "answer": "1"}, "ends with a message of role assistant"),
    ({"prompt": "\ud800", "answer": "1"}, "not valid Unicode"),
    ({"prompt": "good 0", "answer": "2"}, "repeats the prompt of row 1"),
    ({"prompt": "x", "answer": None}, "the answer is empty"),
    ({"prompt": "x", "answer": " "}, "the answer is empty"),
    ({"prompt": "x", "answer": float("nan")}, "the answer is nan"),
    ({"prompt": "x", "answer": [float("inf")]}, "not plain JSON"),
    ({"prompt": "x", "answer": "1", "verifier": 7}, "the verifier (data.columns.verifier) is of type int, not a name"),
    (
        {"prompt": "y", "answer": "1", "verifier": "os:abort"},
        "verifier 'os:abort' is neither built in nor named",
    ),
    ({"prompt": "x" * 33, "answer": "1"}, "the prompt has 35 tokens; model.max_model_len - generation.max_new_tokens"),
    (["x"], "is of type list, not an object"),
]


def test_each_bad_row_is_quarantined_with_its_reason(tmp_path: Path, model: Path) -> None:
    source = tmp_path / "own.jsonl"
    good = [{"prompt": f"good {n}", "answer": n} for n in range(len(BAD_ROWS) + 2)]
    lines = [json.dumps(row) for row in good] + [json.dumps(row) for row, _ in BAD_ROWS] + ["{broken"]
    source.write_text("\n".join(lines), encoding="utf-8")
    run, done = prepare(tmp_path, model, source)
    bad = sorted(pq.read_table(run.data / "quarantine.parquet").to_pylist(), key=lambda row: row["row"])
    assert [row["row"] for row in bad] == list(range(len(good) + 1, len(lines) + 1))
    for row, (_, reason) in zip(bad, [*BAD_ROWS, (None, "not valid JSON")], strict=True):
        assert reason in row["reason"]
        assert row["source"] == str(source)
        assert len(row["content"]) <= 300
    counts = done.counts
    assert counts["read"] == len(lines)
    assert counts["quarantined"] == len(bad)
    assert counts["read"] == sum(counts[name] for name in (*SPLITS, *LEFT_OUT))


def test_one_data_set_may_mix_verifiers(tmp_path: Path, model: Path) -> None:
    source = tmp_path / "own.jsonl"
    names = ["math", "choice", None, "", "a.b:c"]
    json_lines(source, [{"prompt": f"p{n}", "answer": n, "how": name} for n, name in enumerate(names)])
    _, done = prepare(tmp_path, model, source, columns={"verifier": "how"})
    got = {row.prompt: row.verifier for split in SPLITS for row in read_rows(getattr(done, split))}
    expected = {"p0": "math", "p1": "choice", "p2": "", "p3": ""}
    assert len(got) >= 2
    assert got == {prompt: expected[prompt] for prompt in got}
    assert done.counts["quarantined"] == 1


def test_parquet_answers_that_are_no_json_are_quarantined(tmp_path: Path, model: Path) -> None:
    source = tmp_path / "own.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b", "c"], "answer": [b"1", b"2", b"3"]}), source)
    with pytest.raises(UserError, match=r"3 of 3 rows are bad .*row 1: the answer is of type bytes"):
        prepare(tmp_path, model, source)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("own.jsonl", '{"q": 1}\n{"q": 2}\n', "own.jsonl: 2 of 2 rows are bad .*row 1: no column 'prompt'"),
        ("own.jsonl", "", "own.jsonl: there are no rows"),
        ("own.jsonl", '{"prompt": "a", "answer": 1}', "only 1 prompt; training and test need one each"),
        ("own.json", "{}", "own.json: must be a list"),
        ("own.json", "[1", "own.json: not valid JSON"),
        ("own.parquet", "not parquet", "own.parquet: cannot be read"),
        ("own.csv", "prompt,answer\na,1,2\nb,1\n", "row 1: has more fields than the header"),
        (
            "own.csv",
            b"prompt,answer\n\xff,1\n",
            "row 1: message 1 of the prompt is not valid Unicode .save the file as UTF-8",
        ),
        ("own.csv", b"\xff\xfep\0", "own.csv: cannot be read .it is UTF-16: save it as UTF-8"),
        ("own.arrow", "no arrow", "own.arrow: cannot be read"),
        ("own.txt", "x", "own.txt: give a file that ends in .parquet"),
        ("missing.jsonl", None, "missing.jsonl: no such file"),
    ],
)
def test_sources_of_no_use_are_told_in_one_line(
    tmp_path: Path, model: Path, name: str, content: str | bytes | None, words: str
) -> None:
    source = tmp_path / name
    if content is not None:
        source.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=words) as caught:
        prepare(tmp_path, model, source)
    assert "\n" not in str(caught.value)


def test_too_many_bad_rows_stop_the_run_unless_allowed(tmp_path: Path, model: Path) -> None:
    source = tmp_path / "own.jsonl"
    json_lines(source, [{"prompt": f"p {n}", "answer": n} if n < 4 else {"prompt": "p"} for n in range(10)])
    with pytest.raises(UserError, match=r"6 of 10 rows are bad .data.max_quarantined allows 50%.; row 5: no column"):
        prepare(tmp_path, model, source)
    _, done = prepare(tmp_path, model, source, max_quarantined=0.6)
    assert done.counts["quarantined"] == 6


def ids_of(numbers: set[int]) -> list[str]:
    return [prompt_id([{"role": "user", "content": str(n)}]) for n in sorted(numbers)]


def shares_of(numbers: set[int], data: DataConfig) -> dict[str, list[str]]:
    ids = ids_of(numbers)
    return {name: [ids[place] for place in places] for name, places in orders(ids, data).items()}


@given(
    st.sets(st.integers(0, 10_000), max_size=40), st.tuples(st.integers(1, 50), st.integers(0, 20), st.integers(1, 30))
)
def test_splits_are_disjoint_and_complete(numbers: set[int], sizes: tuple[int, int, int]) -> None:
    data = DataConfig(train_prompts=sizes[0], validation_prompts=sizes[1], test_prompts=sizes[2])
    shares = shares_of(numbers, data)
    assert sorted(name for share in shares.values() for name in share) == sorted(ids_of(numbers))
    ids = ids_of(numbers)[::-1]
    assert {name: [ids[place] for place in places] for name, places in orders(ids, data).items()} == shares


@given(st.sets(st.integers(0, 500)), st.sets(st.integers(0, 500)))
def test_growing_data_moves_no_prompt_between_splits(before: set[int], added: set[int]) -> None:
    data = DataConfig(train_prompts=100, validation_prompts=20, test_prompts=60)
    short, long = shares_of(before, data), shares_of(before | added, data)
    for name in SPLITS:
        assert set(short[name]) <= set(long[name])
        assert short[name] == [one for one in long[name] if one in set(short[name])]


def test_data_are_shared_out_by_proportion() -> None:
    shares = shares_of(set(range(1000)), DataConfig(train_prompts=6000, validation_prompts=1000, test_prompts=3000))
    assert abs(len(shares["train"]) - 600) < 60
    assert abs(len(shares["validation"]) - 100) < 40
    assert abs(len(shares["test"]) - 300) < 60


@pytest.mark.parametrize("empty", ["train", "test"])
def test_an_empty_split_takes_from_validation_first(empty: str) -> None:
    rows = [Row(name, (), "", (), "0", "") for name in ids_of(set(range(6)))]
    splits = {"train": rows[:2], "validation": rows[2:4], "test": rows[4:]} | {empty: []}
    fill_empty(splits)
    assert splits[empty] == [rows[3]]
    splits = {"train": rows[:3], "validation": [], "test": rows[:3]} | {empty: []}
    fill_empty(splits)
    assert [len(splits[name]) for name in ("train", "test")] == ([1, 2] if empty == "train" else [2, 1])


def test_builtin_splits_have_the_sizes_asked_for_and_share_no_prompt() -> None:
    for source in ("builtin:maze", "builtin:arithmetic", "builtin:cycle", "builtin:telecom"):
        data = DataConfig(source=source, train_prompts=150, validation_prompts=30, test_prompts=60)
        splits = draw_splits(data, 3)
        prompts = {name: {draft.prompt_id for draft in drafts} for name, drafts in splits.items()}
        assert {name: len(found) for name, found in prompts.items()} == {"train": 150, "validation": 30, "test": 60}
        assert len(set().union(*prompts.values())) == 240
        assert draw_splits(data, 3) == splits
        assert draw_splits(data, 4) != splits


def test_sums_are_right_and_of_the_number_promised() -> None:
    rng = random.Random(0)
    drawn = dict(draw_sum(rng) for _ in range(20_000))
    assert len(drawn) == 504
    for prompt, answer in drawn.items():
        left, sign, right = re.search(r"([1-9]) ([+-]) ([1-9])", prompt).groups()  # type: ignore[union-attr]
        assert answer == (int(left) + int(right) if sign == "+" else int(left) - int(right)) >= 0


def test_a_task_with_too_few_different_prompts_says_so() -> None:
    data = DataConfig(train_prompts=20, validation_prompts=2, test_prompts=8, maze={"sizes": {2: 1.0}})
    with pytest.raises(
        UserError, match=r"found only 16 different prompts of the 30 .*lower data.train_prompts or give"
    ):
        draw_splits(data, 0)
    many = DataConfig(source="builtin:arithmetic", train_prompts=1_000_000, validation_prompts=2, test_prompts=8)
    start = time.monotonic()
    with pytest.raises(UserError, match=r"found only 504 different prompts of the 1000010 .*data.train_prompts"):
        draw_splits(many, 0)
    assert time.monotonic() - start < 10
    with pytest.raises(UserError, match="the built-in tasks are builtin:maze, builtin:arithmetic"):
        draw_splits(DataConfig(source="builtin:chess"), 0)


def test_rows_survive_the_file_and_other_files_are_refused(tmp_path: Path) -> None:
    messages = ({"role": "system", "content": "é"}, {"role": "user", "content": "x"})
    row = Row(prompt_id(messages), messages, "x", (1, 2), '{"a": 1}', "s", "math")
    write_rows(tmp_path / "rows.parquet", [row])
    assert read_rows(tmp_path / "rows.parquet") == [row]
    older = pq.read_table(tmp_path / "rows.parquet").drop(["verifier"])
    pq.write_table(older, tmp_path / "rows.parquet")
    assert read_rows(tmp_path / "rows.parquet") == [replace(row, verifier="")]
    write_rows(tmp_path / "rows.parquet", [])
    assert read_rows(tmp_path / "rows.parquet") == []
    assert [path.name for path in tmp_path.iterdir()] == ["rows.parquet"]
    with pytest.raises(RunError, match=r"missing.parquet: cannot be read"):
        read_rows(tmp_path / "missing.parquet")


def without(model: Path, folder: Path, *names: str, **settings: Any) -> Path:
    """A copy of the model's folder with some files left out and some settings changed."""
    folder.mkdir()
    for file in model.iterdir():
        if file.name not in names:
            (folder / file.name).write_bytes(file.read_bytes())
    if settings:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **settings}))
    return folder


def test_folders_that_are_no_start_model_are_told_in_one_line(tmp_path: Path, model: Path) -> None:
    source = tmp_path / "own.jsonl"
    json_lines(source, [{"prompt": f"p {n}", "answer": n} for n in range(9)])
    bare = without(model, tmp_path / "bare")
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    settings.pop("chat_template")
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    cases = [
        (bare, "has no chat template; use an instruction-tuned model or put"),
        (without(model, tmp_path / "a", "config.json"), "has no readable config.json"),
        (without(model, tmp_path / "b", "tokenizer.json", "tokenizer_config.json"), "has no tokenizer"),
        (without(model, tmp_path / "c", "model.safetensors"), "has no weights"),
        (without(model, tmp_path / "d", max_position_embeddings=32), "has only 32 positions"),
        (tmp_path / "nowhere", "no such folder"),
        ("builtin:huge", "known are builtin:maze-tiny"),
        ("builtin:maze-tiny", "reads only data.source builtin:maze"),
    ]
    for path, words in cases:
        with pytest.raises(UserError, match=words) as caught:
            prepare(tmp_path, path, source)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)


def test_a_critic_of_its_own_is_looked_at_before_anything_runs(tmp_path: Path, model: Path) -> None:
    def resolve(critic: Path, advantage: str = "gae") -> RunContext:
        sections: dict[str, Any] = {"algorithm": {"advantage": advantage}, "critic": {"model": str(critic)}}
        sections |= {"model": {"path": str(model), "max_model_len": 64}, "generation": {"max_new_tokens": 32}}
        run = run_with(tmp_path / "scratch", **sections)
        resolve_start_model(run, ())
        return run

    critic = without(model, tmp_path / "critic", "tokenizer.json", "tokenizer_config.json")  # it needs none
    assert resolve(critic).critic_model.resolve() == critic.resolve()
    assert not resolve(tmp_path / "nowhere", "grpo").critic_model.is_symlink()
    for path, words in (
        (tmp_path / "nowhere", "critic.model .*nowhere: no such folder"),
        (without(model, tmp_path / "c", "model.safetensors"), "critic.model .* has no weights"),
        (without(model, tmp_path / "d", max_position_embeddings=32), "critic.model .* has only 32 positions"),
    ):
        with pytest.raises(UserError, match=words):
            resolve(path)


def test_names_that_no_hub_has_are_told_in_one_line(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets
    import huggingface_hub

    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route to the hub\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    monkeypatch.setattr(datasets, "load_dataset", offline)
    source = tmp_path / "own.jsonl"
    json_lines(source, [{"prompt": f"p {n}", "answer": n} for n in range(9)])
    with pytest.raises(UserError, match=r"cannot be fetched from the Hugging Face hub .ConnectionError: no route"):
        prepare(tmp_path, "someone/some-model", source)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"data.source: someone/data: neither a file .* no route to the hub\)"):
        prepare(tmp_path, model, "someone/data")  # type: ignore[arg-type]


def test_a_hub_data_set_is_read_like_a_file(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[tuple[str, str]] = []

    def load_dataset(name: str, split: str) -> datasets.Dataset:
        asked.append((name, split))
        return datasets.Dataset.from_list([{"prompt": f"p {n}", "answer": n} for n in range(20)])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    _, done = prepare(tmp_path, model, "someone/data", hub_split="main")  # type: ignore[arg-type]
    assert asked == [("someone/data", "main")]
    assert done.counts["read"] == 20
    assert {row.source for row in read_rows(done.train)} == {"someone/data"}


def test_the_example_of_own_data_has_good_rows_and_a_reward_that_loads() -> None:
    config = load_profile("examples/own_data/profile.yaml")
    rows = [item for _, item in read_source(config.data)]
    assert len(rows) == 32
    assert all(isinstance(row, Draft) for row in rows)
    reward = load_verifier(config.reward.name).function
    assert reward("It is paris.", "Paris", "") == 1.0
    assert reward("Paris" + "!" * 75, "Paris", "") == 0.5
    assert reward("Rome", "Paris", "") == 0.0


def test_the_profile_of_smollm2_asks_for_no_more_sums_than_there_are() -> None:
    config = load_profile("profiles/smollm2_cpu.yaml")
    assert {name: len(drafts) for name, drafts in draw_splits(config.data, config.seed).items()} == {
        "train": 64,
        "validation": 8,
        "test": 32,
    }


def test_the_builtin_vocabulary_fits_the_default_model() -> None:
    assert len(SPECIALS) + len(vocabulary(6)) == 102


def test_a_profile_with_assumed_lengths_is_no_run(tmp_path: Path) -> None:
    run = RunContext.create(load_profile("profiles/synthetic_1m.yaml", [f"storage.scratch={tmp_path}"]))
    with pytest.raises(UserError, match=r"lengths\.assumed is for .* remove it from the profile"):
        prepare_data(run)
