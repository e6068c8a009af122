"""Data sets: repeated prompts, the account, versions that go on from others, leaks, choice of a run's rows."""

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

import forebay.data.dataset
from forebay.config import LeaksConfig, parse_config
from forebay.data.dataset import Dataset, make_dataset
from forebay.data.leaks import HeldOut, normalised
from forebay.data.prepare import PreparedData, prepare_data
from forebay.data.progress import reading_bar
from forebay.data.report import lines
from forebay.data.schema import Draft, Row, prompt_id, read_rows
from forebay.data.sources import Part
from forebay.data.split import SPLITS, place
from forebay.data.start_model import resolve_start_model
from forebay.errors import RunError, UserError
from forebay.run import RunContext
from forebay.telemetry.summary import failure_summary

LEFT_OUT = ("unused", "quarantined", "duplicates", "leaked")


def write(path: Path, rows: list[Any]) -> None:
    """Rows that are text are written as they are."""
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )


def numbered(*numbers: int) -> list[dict[str, str]]:
    return [{"prompt": f"p{n}", "answer": str(n)} for n in numbers]


def dataset(tmp_path: Path, source: Path, **data: Any) -> Dataset:
    config = parse_config({"data": {"source": str(source), **data}}, "test")
    return make_dataset(str(source), "train", config, tmp_path / "cache", None)


def prompts(made: Dataset) -> list[str]:
    return [messages[-1]["content"] for messages in made.column("messages").to_pylist()]


def quarantined(made: Dataset) -> list[dict[str, Any]]:
    return [row for file in made.files("quarantine.parquet") for row in pq.read_table(file).to_pylist()]


def test_repeats_are_counted_and_contradictions_are_bad(tmp_path: Path) -> None:
    rows = [
        {"prompt": "How much?", "answer": "1"},
        {"prompt": "How much?", "answer": "1"},
        {"prompt": " how  MUCH?\n", "answer": "1"},
        {"prompt": "How much?", "answer": "2"},
        {"prompt": "How much", "answer": "2"},
    ]
    write(tmp_path / "rows.jsonl", rows)
    made = dataset(tmp_path, tmp_path / "rows.jsonl")
    assert made.counts == {"read": 5, "accepted": 2, "quarantined": 1, "duplicates": 2}
    (bad,) = quarantined(made)
    assert (bad["row"], bad["reason"]) == (4, "repeats the prompt of row 1 with another answer")
    exact = dataset(tmp_path, tmp_path / "rows.jsonl", duplicates="exact")
    assert exact.counts == {"read": 5, "accepted": 3, "quarantined": 1, "duplicates": 1}


def test_contradictions_between_files_name_the_other_file(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    write(folder / "a.jsonl", numbered(1, 2))
    write(folder / "b.jsonl", [{"prompt": "p2", "answer": "x"}])
    (bad,) = quarantined(dataset(tmp_path, folder))
    assert bad["reason"] == f"repeats the prompt of row 2 of {folder / 'a.jsonl'} with another answer"
    assert bad["source"] == str(folder / "b.jsonl")


ITEMS = st.one_of(
    st.builds(lambda n, a: {"prompt": f"p{n}", "answer": a}, st.integers(0, 5), st.sampled_from("12")),
    st.builds(lambda n: {"prompt": f" P{n} ", "answer": "1"}, st.integers(0, 5)),
    st.sampled_from(["{broken", "", "[1]", '{"prompt": "x"}', '{"prompt": "", "answer": 1}', '"x"']),
)


@settings(max_examples=30, deadline=None)
@given(st.lists(ITEMS, max_size=30), st.lists(ITEMS, max_size=30))
def test_the_account_and_growth(tmp_path_factory: pytest.TempPathFactory, before: list[Any], added: list[Any]) -> None:
    """Whatever is in the file: every row has one fate, and two runs over a growing file keep what one run keeps."""
    tmp_path = tmp_path_factory.mktemp("account")
    source = tmp_path / "rows.jsonl"
    write(source, before)
    first = dataset(tmp_path, source)
    write(source, [*before, *added])
    grown = dataset(tmp_path, source)
    whole = dataset(tmp_path / "elsewhere", source)
    for made, rows in ((first, before), (grown, [*before, *added])):
        assert made.counts["read"] == sum(row != "" for row in rows)
        assert made.counts["read"] == sum(made.counts[name] for name in ("accepted", "quarantined", "duplicates"))
        assert len(quarantined(made)) == made.counts["quarantined"]
        assert len(prompts(made)) == made.counts["accepted"]
    assert grown.counts == whole.counts
    for name in ("prompt_id", "row", "answer"):
        assert grown.column(name).to_pylist() == whole.column(name).to_pylist()
    assert quarantined(grown) == quarantined(whole)


def blocks_read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(file, first byte) of each reading from now on."""
    seen: list[tuple[str, int]] = []
    blocks = Part.blocks

    def noted(self: Part, start: int = 0, first: int = 1) -> Any:
        seen.append((Path(self.name).name, start))
        return blocks(self, start, first)

    monkeypatch.setattr(Part, "blocks", noted)
    return seen


def test_a_grown_source_is_read_from_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = blocks_read(monkeypatch)
    folder = tmp_path / "rows"
    folder.mkdir()
    write(folder / "b.jsonl", ["", *numbered(1, 2, 3)])
    first = dataset(tmp_path, folder)
    size = (folder / "b.jsonl").stat().st_size
    again = dataset(tmp_path, folder)
    assert (again.cached, again.folder, again.parents) == (True, first.folder, [])
    write(folder / "b.jsonl", ["", *numbered(1, 2, 3), *numbered(3, 4), {"prompt": "p1", "answer": "x"}])
    (folder / "a.csv").write_text('question,answer\n"p1",1\np5,5\n')
    second = dataset(tmp_path, folder)
    (folder / "a.csv").write_text('question,answer\n"p1",1\np5,5\n"p\n6",6\n')
    third = dataset(tmp_path, folder)
    assert seen == [("b.jsonl", 0), ("a.csv", 0), ("b.jsonl", size), ("a.csv", 28)]
    assert second.parents == [first.folder.name]
    assert third.parents == [first.folder.name, second.folder.name]
    assert prompts(third) == ["p1", "p2", "p3", "p5", "p4", "p\n6"]
    assert third.column("row").to_pylist() == [2, 3, 4, 2, 6, 3]
    assert third.counts == {"read": 9, "accepted": 6, "quarantined": 1, "duplicates": 2}
    assert quarantined(third)[0]["row"] == 7
    assert dataset(tmp_path, folder).folder == third.folder


def parquet(path: Path, *groups: list[Any]) -> None:
    """One row group for each list."""
    told = {"rows": str(sum(map(len, groups)))}  # as pandas does
    schema = pa.schema([("prompt", pa.string()), ("answer", pa.string())], metadata=told)
    with pq.ParquetWriter(path, schema) as writer:
        for rows in groups:
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))


def rows_read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(file, first row) of each block that is checked from now on."""
    seen: list[tuple[str, int]] = []
    digest = forebay.data.dataset.digest

    def noted(block: Any, part: str, *args: Any) -> Any:
        seen.append((Path(part).name, block.first))
        return digest(block, part, *args)

    monkeypatch.setattr(forebay.data.dataset, "digest", noted)
    return seen


@pytest.mark.parametrize("half", [False, True], ids=["before it was moved", "in the middle of its manifest"])
def test_what_a_killed_run_left_is_not_taken_for_a_version(tmp_path: Path, half: bool) -> None:
    write(tmp_path / "rows.jsonl", numbered(1, 2))
    made = dataset(tmp_path, tmp_path / "rows.jsonl")
    (folder,) = {file.parent for file in made.files("rows.parquet")}
    left = folder.rename(folder.with_name(".making-x"))
    if half:
        manifest = left / "manifest.json"
        manifest.write_bytes(manifest.read_bytes()[:20])
    again = dataset(tmp_path, tmp_path / "rows.jsonl")
    assert (again.cached, prompts(again)) == (False, ["p1", "p2"])


def test_parquet_that_was_written_again_with_more_row_groups_is_read_from_the_new_ones_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, source = rows_read(monkeypatch), tmp_path / "rows.parquet"
    old = numbered(1, 2, 3), numbered(4, 5)
    parquet(source, *old)
    first = dataset(tmp_path, source)
    parquet(source, *old, [*numbered(2, 6), {"prompt": "p4", "answer": "x"}], numbered(7))
    grown = dataset(tmp_path, source)
    assert seen == [("rows.parquet", 1), ("rows.parquet", 6)]
    assert grown.parents == [first.folder.name]
    whole = dataset(tmp_path / "elsewhere", source)
    assert grown.counts == whole.counts == {"read": 9, "accepted": 7, "quarantined": 1, "duplicates": 1}
    for name in ("prompt_id", "row", "answer"):
        assert grown.column(name).to_pylist() == whole.column(name).to_pylist()
    assert quarantined(grown) == quarantined(whole)
    assert dataset(tmp_path, source).folder == grown.folder


@pytest.mark.parametrize(
    "groups",
    [
        (numbered(1, 2, 9), numbered(4, 5), numbered(6)),  # an old row is another
        (numbered(1, 2), numbered(3, 4, 5), numbered(6)),  # the same rows, cut otherwise
        (numbered(1, 2, 3, 4, 5, 6),),
        (numbered(6), numbered(1, 2, 3), numbered(4, 5)),  # not at the end
    ],
)
def test_parquet_whose_old_row_groups_are_others_is_read_anew(tmp_path: Path, groups: tuple[list[Any], ...]) -> None:
    source = tmp_path / "rows.parquet"
    parquet(source, numbered(1, 2, 3), numbered(4, 5))
    dataset(tmp_path, source)
    parquet(source, *groups)
    made = dataset(tmp_path, source)
    assert (made.parents, made.counts["read"]) == ([], 6)
    assert prompts(made) == [row["prompt"] for group in groups for row in group]


def test_of_a_folder_of_parquet_only_new_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, folder = rows_read(monkeypatch), tmp_path / "rows"
    folder.mkdir()
    parquet(folder / "b.parquet", numbered(1, 2))
    dataset(tmp_path, folder)
    parquet(folder / "a.parquet", numbered(3))
    assert prompts(dataset(tmp_path, folder)) == ["p1", "p2", "p3"]
    assert seen == [("b.parquet", 1), ("a.parquet", 1)]


def test_a_source_that_has_changed_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "rows.jsonl"
    write(source, numbered(1, 2, 3))
    dataset(tmp_path, source)
    seen = blocks_read(monkeypatch)
    spaced = '{"prompt": "p3", "answer": "3"} '
    changes = [numbered(1, 9, 3, 4), [*numbered(1, 2), spaced, *numbered(4)], numbered(1)]
    for rows in changes:
        write(source, rows)
        made = dataset(tmp_path, source)
        assert (made.parents, made.cached) == ([], False)
        assert len(prompts(made)) == len(rows)
    assert seen == [("rows.jsonl", 0)] * 3
    write(source, numbered(1, 2, 3))
    assert dataset(tmp_path, source).cached
    assert not dataset(tmp_path, source, instruction="Think.").cached


def test_a_file_without_a_last_line_end_is_read_anew(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"prompt": "a", "answer": 1')
    assert dataset(tmp_path, source).counts["quarantined"] == 1
    source.write_text('{"prompt": "a", "answer": 1}\n{"prompt": "b", "answer": 2}')
    grown = dataset(tmp_path, source)
    assert (grown.parents, prompts(grown)) == ([], ["a", "b"])


def test_images_in_files_of_their_own_are_looked_at_each_time(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", [{"prompt": "a", "answer": 1, "images": ["a.png"]}])
    first, second = (dataset(tmp_path, tmp_path / "rows.jsonl") for _ in range(2))
    assert not second.cached
    assert first.folder != second.folder


def test_processes_give_what_one_process_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "rows.jsonl"
    write(source, [*numbered(*range(300)), "{broken", *numbered(*range(200, 400)), {"prompt": "p7", "answer": "x"}])
    monkeypatch.setattr(forebay.data.sources, "BLOCK", 1000)
    told: list[tuple[int, int, int]] = []
    config = parse_config({"data": {"source": str(source), "workers": 2}}, "test")
    made = make_dataset(str(source), "train", config, tmp_path / "a", None, lambda *now: told.append(now))
    alone = dataset(tmp_path, source, workers=1)
    assert made.counts == alone.counts == {"read": 502, "accepted": 400, "quarantined": 2, "duplicates": 100}
    assert prompts(made) == prompts(alone) == [f"p{n}" for n in range(400)]
    assert quarantined(made) == quarantined(alone)
    assert [row["row"] for row in quarantined(made)] == [301, 502]
    size = source.stat().st_size
    assert told[-1] == (size, size, 502)
    assert len(told) > 10
    assert [now[0] for now in told] == sorted(now[0] for now in told)


def test_long_lines_cost_no_memory_and_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forebay.data.sources, "BLOCK", 64)
    monkeypatch.setattr(forebay.data.sources, "LONGEST_LINE", 256)
    long = {"prompt": "x" * 400, "answer": "1"}
    write(tmp_path / "rows.jsonl", [*numbered(1, 2), long, *numbered(3), {**long, "prompt": "y" * 3000}, *numbered(4)])
    made = dataset(tmp_path, tmp_path / "rows.jsonl")
    assert made.counts == {"read": 6, "accepted": 4, "quarantined": 2, "duplicates": 0}
    assert [(row["row"], row["reason"][:26]) for row in quarantined(made)] == [
        (3, "the line is longer than 0 "),
        (5, "the line is longer than 0 "),
    ]
    assert made.column("row").to_pylist() == [1, 2, 4, 6]


def test_bytes_that_are_not_utf8_cost_their_row(tmp_path: Path) -> None:
    good = b'{"prompt": "a", "answer": 1}\n'
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + good + b'{"prompt": "\xff", "answer": 1}\n' + good)
    made = dataset(tmp_path, tmp_path / "rows.jsonl")
    assert made.counts == {"read": 3, "accepted": 1, "quarantined": 1, "duplicates": 1}
    assert quarantined(made)[0]["reason"] == "not valid UTF-8 (byte 13 of the line)"


class Bucket:
    """Objects of a folder in place of S3, where they have no folder structure."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def list_keys(self) -> list[str]:
        return sorted(path.relative_to(self.root).as_posix() for path in self.root.rglob("*") if path.is_file())

    def download(self, key: str, target: Path) -> None:
        target.write_bytes((self.root / key).read_bytes())


def test_objects_of_s3_are_fetched_and_their_growth_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a real server: tests/integration/test_s3.py."""
    asked = []

    def open_objects(uri: str, endpoint_url: str | None) -> Bucket:
        asked.append((uri, endpoint_url))
        return Bucket(tmp_path / uri.removeprefix("s3://"))

    monkeypatch.setattr(forebay.data.sources, "open_objects", open_objects)
    folder = tmp_path / "bucket" / "maths"
    folder.mkdir(parents=True)
    write(folder / "train-0.jsonl", numbered(1, 2))
    write(folder / "test-0.jsonl", numbered(9))
    (folder / "README.md").write_text("x")
    values = {"data": {"source": "s3://bucket/maths/"}, "storage": {"endpoint_url": "http://127.0.0.1:9"}}
    config = parse_config(values, "test")
    first = make_dataset("s3://bucket/maths/", "train", config, tmp_path / "cache", None)
    assert prompts(first) == ["p1", "p2"]
    assert first.column("source").to_pylist() == ["s3://bucket/maths/train-0.jsonl"] * 2
    assert make_dataset("s3://bucket/maths/", "train", config, tmp_path / "cache", None).cached
    write(folder / "train-0.jsonl", numbered(1, 2, 3))
    seen = blocks_read(monkeypatch)
    grown = make_dataset("s3://bucket/maths/", "train", config, tmp_path / "cache", None)
    assert (prompts(grown), grown.parents) == (["p1", "p2", "p3"], [first.folder.name])
    assert seen[0][1] > 0
    single = make_dataset("s3://bucket/maths/test-0.jsonl", "train", config, tmp_path / "cache", None)
    assert prompts(single) == ["p9"]
    assert set(asked) == {("s3://bucket/maths", "http://127.0.0.1:9")}
    for missing, words in (
        ("s3://bucket/maths/x.csv", "no such object"),
        ("s3://bucket/none", "nothing under it ends"),
    ):
        with pytest.raises(UserError, match=f"data.source: {missing}: {words}"):
            make_dataset(missing, "train", config, tmp_path / "cache", None)


# --- leaks


def row(text: str, images: tuple[str, ...] = ()) -> Row:
    messages = ({"role": "user", "content": text},)
    return Row(prompt_id(messages, images), messages, text, (), "1", "s", images=images)


def draft(text: str, images: tuple[str, ...] = ()) -> Draft:
    return Draft(({"role": "user", "content": text},), "1", "s", images=images)


WORDS = [f"w{n}" for n in range(40)]
LONG = " ".join(WORDS)


def test_equal_prompts_leak_whatever_their_case() -> None:
    held = HeldOut([row("How  much?"), row("Find x.", ("a",))], LeaksConfig(check="equal"))
    assert held.leak(draft("how much? ")) == f"leak: equals the held-out prompt {row('How  much?').prompt_id}"
    assert held.leak(draft("How much")) is None
    assert held.leak(draft("find x.", ("a",))) is not None
    assert held.leak(draft("find x.", ("b",))) is None
    off = HeldOut([row("a")], LeaksConfig(check="off"))
    assert off.leak(draft("A")) is None
    assert off.leak(draft("a")) == f"leak: is the held-out prompt {row('a').prompt_id}"


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        (LONG + " and then more", 28),
        ("Before it: " + LONG.upper(), 28),
        (" ".join(WORDS[:26]) + " other end", 14),
        (" ".join(WORDS[:25]) + " other end", None),
        (" ".join(w if n % 12 else "z" for n, w in enumerate(WORDS)), None),
        (" ".join(WORDS[:12]), None),
    ],
)
def test_a_training_prompt_leaks_with_half_of_the_runs_of_words(text: str, runs: int | None) -> None:
    """By hand: 40 words have 28 runs of 13; the first 26 words 14 of them, the first 25 only 13."""
    reason = HeldOut([row(LONG), row("other")], LeaksConfig()).leak(draft(text))
    expected = f"leak: has {runs} of the 28 runs of 13 words of the held-out prompt {row(LONG).prompt_id}"
    assert reason == (expected if runs else None)
    assert HeldOut([row(LONG)], LeaksConfig(check="equal")).leak(draft(text)) is None


def test_what_many_held_out_prompts_share_is_boilerplate() -> None:
    held = HeldOut([row(f"{LONG} number {n} {'x ' * 20 if n == 1 else ''}") for n in range(5)], LeaksConfig())
    assert held.leak(draft(f"{LONG} number 77")) is None
    assert held.leak(draft(f"{LONG} number 1 {'x ' * 20}")) is not None


@given(st.text())
def test_normalising_twice_changes_nothing(text: str) -> None:
    assert normalised(f" {text}\n") == normalised(text)
    assert normalised(normalised(text)) == normalised(text)


# --- the stage


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, a tokenizer of bytes."""
    values = {"model": {"path": "builtin:random-qwen3"}, "storage": {"scratch": str(tmp_path_factory.mktemp("model"))}}
    return resolve_start_model(RunContext.create(parse_config(values, "test")), ())[0]


def prepare(
    tmp_path: Path, model: Path, evaluation: dict[str, Any] | None = None, **data: Any
) -> tuple[RunContext, PreparedData]:
    sizes = {"train_prompts": 8, "validation_prompts": 2, "test_prompts": 4}
    values = {
        "model": {"path": str(model), "max_model_len": 256},
        "generation": {"max_new_tokens": 32},
        "reward": {"name": "exact"},
        "data": {**sizes, **data},
        "evaluation": evaluation or {},
        "storage": {"scratch": str(tmp_path / "scratch")},
    }
    run = RunContext.create(parse_config(values, "test"))
    return run, prepare_data(run)


def check_account(done: PreparedData) -> dict[str, list[Row]]:
    rows = {name: read_rows(getattr(done, name)) for name in SPLITS}
    assert {name: len(rows[name]) for name in SPLITS} == {name: done.counts[name] for name in SPLITS}
    assert done.counts["read"] == sum(done.counts[name] for name in (*SPLITS, *LEFT_OUT))
    assert all(one.split == name for name in SPLITS for one in rows[name])
    return rows


@pytest.mark.parametrize("length_filter", ["all", "needed"])
def test_the_rows_chosen_are_the_first_that_fit(tmp_path: Path, model: Path, length_filter: str) -> None:
    write(
        tmp_path / "rows.jsonl",
        [*numbered(*range(400)), *({"prompt": f"{n:03} " * 40, "answer": "1"} for n in range(300))],
    )
    run, done = prepare(
        tmp_path, model, source=str(tmp_path / "rows.jsonl"), length_filter=length_filter, max_prompt_tokens=100
    )
    rows = check_account(done)
    ids = [prompt_id([{"role": "user", "content": f"p{n}"}]) for n in range(400)]
    points = sorted((place(one) * 14, one) for one in ids)
    expected = {
        "test": [one for point, one in points if point < 4][:4],
        "validation": [one for point, one in points if 4 <= point < 6][:2],
        "train": [one for point, one in points if point >= 6][:8],
    }
    assert {name: [one.prompt_id for one in rows[name]] for name in SPLITS} == expected
    assert done.counts["quarantined"] == 300 if length_filter == "all" else 0 < done.counts["quarantined"] < 300
    reasons = pq.read_table(run.data / "quarantine.parquet")["reason"].to_pylist()
    assert len(reasons) == done.counts["quarantined"]
    assert all(reason.endswith("tokens; data.max_prompt_tokens is 100") for reason in reasons)


def test_a_prompt_beyond_what_the_model_takes_is_a_bad_row_and_no_warning(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    long = "word " * tokenizer.model_max_length
    write(tmp_path / "rows.jsonl", [*numbered(*range(30)), {"prompt": long, "answer": "1"}])
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        _, done = prepare(tmp_path, model, source=str(tmp_path / "rows.jsonl"))
        assert done.counts["quarantined"] == 1
        assert caplog.messages == []
        tokenizer(long)
        assert "longer than the specified maximum" in caplog.text
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)


@pytest.mark.parametrize("length_filter", ["all", "needed"])
def test_held_out_prompts_from_a_source_of_their_own(tmp_path: Path, model: Path, length_filter: str) -> None:
    write(tmp_path / "train.jsonl", [*numbered(*range(30)), *numbered(3, 3)])
    write(tmp_path / "aime.jsonl", [*numbered(100, 101, 102), {"prompt": "P7", "answer": "7"}, "{"])
    sources = {"source": str(tmp_path / "train.jsonl"), "test_source": str(tmp_path / "aime.jsonl")}
    run, done = prepare(
        tmp_path, model, **sources, train_prompts=100, validation_prompts=20, length_filter=length_filter
    )
    rows = check_account(done)
    assert {one.prompt for one in rows["test"]} == {"p100", "p101", "p102", "P7"}
    assert "p7" not in {one.prompt for one in rows["train"]}
    assert (done.counts["duplicates"], done.counts["quarantined"]) == (2, 1)
    assert done.counts["leaked"] == (1 if "p7" not in {one.prompt for one in rows["validation"]} else 0)
    leaked = [r for r in pq.read_table(run.data / "quarantine.parquet").to_pylist() if r["reason"].startswith("leak")]
    assert [(one["row"], one["source"]) for one in leaked] == [(8, sources["source"])]
    with pytest.raises(
        UserError,
        match=r"1 prompt to train on or to validate with leaks; row 8: leak: equals .*set data.leaks.action to drop",
    ):
        prepare(tmp_path, model, **sources, train_prompts=100, leaks={"action": "refuse"})
    told = dict(lines(run, done))
    assert told["read"] == "37 rows"
    assert told["left out"] == "1 quarantined, 2 duplicates, 1 leaked"


@pytest.mark.parametrize("check", ["ngrams", "equal", "off"])
def test_a_test_source_of_the_same_prompts_shares_none_with_the_other_splits(
    tmp_path: Path, model: Path, check: str
) -> None:
    write(tmp_path / "train.jsonl", numbered(*range(200)))
    write(tmp_path / "test.jsonl", numbered(*range(120)))
    sources = {"source": str(tmp_path / "train.jsonl"), "test_source": str(tmp_path / "test.jsonl")}
    sizes = {"train_prompts": 70, "validation_prompts": 30, "test_prompts": 150}
    _, done = prepare(tmp_path, model, **sources, **sizes, leaks={"check": check})
    rows = check_account(done)
    ids = {name: {one.prompt_id for one in rows[name]} for name in SPLITS}
    assert len(ids["test"]) == 120
    assert done.counts["leaked"] == 120
    assert ids["validation"]
    assert sum(map(len, ids.values())) == len(set().union(*ids.values()))


def test_a_prompt_in_two_splits_ends_the_run(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "train.jsonl", numbered(*range(20)))
    write(tmp_path / "test.jsonl", numbered(*range(20)))
    monkeypatch.setattr(HeldOut, "leak", lambda self, draft: None)
    with pytest.raises(RunError, match=r"prompt [0-9a-f]{16} is in (train|validation) and in (validation|test): a bug"):
        prepare(tmp_path, model, source=str(tmp_path / "train.jsonl"), test_source=str(tmp_path / "test.jsonl"))


def test_near_copies_of_test_prompts_leave_the_training_split(tmp_path: Path, model: Path) -> None:
    """Of 60 long prompts, each with a near copy, none is in training while its copy is held out."""
    texts = [" ".join(f"{n}x{k}" for k in range(20)) for n in range(60)]
    rows = [{"prompt": text + end, "answer": "1"} for text in texts for end in ("", " again")]
    write(tmp_path / "rows.jsonl", rows)
    sizes = {"train_prompts": 200, "validation_prompts": 40, "test_prompts": 80}
    _, done = prepare(tmp_path, model, source=str(tmp_path / "rows.jsonl"), **sizes)
    kept = check_account(done)
    held = {one.prompt.removesuffix(" again") for name in ("test", "validation") for one in kept[name]}
    assert done.counts["leaked"] > 5
    assert not held & {one.prompt.removesuffix(" again") for one in kept["train"]}


def test_a_run_tells_its_version_and_a_second_finds_it(tmp_path: Path, model: Path) -> None:
    write(tmp_path / "rows.jsonl", numbered(*range(40)))
    run, done = prepare(tmp_path, model, source=str(tmp_path / "rows.jsonl"))
    again, found = prepare(tmp_path, model, source=str(tmp_path / "rows.jsonl"))
    write(tmp_path / "rows.jsonl", numbered(*range(90)))
    grown, more = prepare(tmp_path, model, source=str(tmp_path / "rows.jsonl"))
    told = [json.loads((one.data / "dataset.json").read_text()) for one in (run, again, grown)]
    assert [one["versions"][0]["cached"] for one in told] == [False, True, False]
    assert told[2]["versions"][0]["parents"] == [told[0]["versions"][0]["version"]]
    assert read_rows(done.train) == read_rows(found.train)
    held_out = {one.prompt_id for one in (*read_rows(done.test), *read_rows(done.validation))}
    assert not held_out & {one.prompt_id for one in read_rows(more.train)}
    assert "goes on from" in dict(lines(grown, more))["version"]
    ended = failure_summary(grown, status="failed", error=UserError("x"), stages={}, wall_s=1.0)
    assert ended["data"] == {"counts": more.counts, "versions": [told[2]["versions"][0]["version"]], "warnings": []}


def test_splits_with_too_few_prompts_are_told_and_what_cannot_be_done_is_refused(tmp_path: Path, model: Path) -> None:
    write(tmp_path / "rows.jsonl", numbered(*range(40)))
    sizes = {"train_prompts": 100, "validation_prompts": 2, "test_prompts": 4}
    asked = {"source": str(tmp_path / "rows.jsonl"), **sizes}
    run, done = prepare(tmp_path, model, **asked)
    got = check_account(done)
    short = [name for name in SPLITS if 2 * len(got[name]) < sizes[f"{name}_prompts"]]
    assert short
    assert short == [warning.split()[0] for warning in done.warnings]
    assert [text for name, text in lines(run, done) if "asked for" in text] == done.warnings
    ended = failure_summary(run, status="failed", error=UserError("x"), stages={}, wall_s=1.0)
    assert ended["data"]["warnings"] == done.warnings
    more = {**asked, "train_prompts": 3000, "test_prompts": 40}
    _, done = prepare(tmp_path, model, **more)
    assert done.counts["validation"] == 0
    assert "validation has 0 of the 2 prompts asked for: give more rows, or lower data.validation_prompts" in (
        done.warnings
    )
    with pytest.raises(UserError, match=r"no prompt is left for validation; evaluation.every_versions needs some"):
        prepare(tmp_path, model, {"every_versions": 1}, **more)


def test_no_test_prompt_left_is_refused(tmp_path: Path, model: Path) -> None:
    write(tmp_path / "rows.jsonl", numbered(*range(40)))
    write(tmp_path / "test.jsonl", [{"prompt": "long " * 200, "answer": "1"}])
    both = {"source": str(tmp_path / "rows.jsonl"), "test_source": str(tmp_path / "test.jsonl")}
    with pytest.raises(UserError, match=r"no prompt is left for test"):
        prepare(tmp_path, model, **both)


def test_terminals_get_a_progress_bar_and_files_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for forced, shown in (("1", True), ("", False)):
        monkeypatch.setenv("FORCE_COLOR", forced)
        with reading_bar("folder/rows.jsonl") as on_read:
            on_read(50, 100, 1234)
        err = capfd.readouterr().err
        assert ("reading rows.jsonl" in err and "1,234 rows" in err) == shown
        assert bool(err) == shown


def test_thinking_is_the_chat_templates_switch(tmp_path: Path, model: Path) -> None:
    write(tmp_path / "rows.jsonl", numbered(*range(20)))
    with pytest.raises(UserError, match=r"data.thinking: the chat template of model.path .* has no such switch"):
        prepare(tmp_path, model, source=str(tmp_path / "rows.jsonl"), thinking=False)
    other = tmp_path / "thinker"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    template += "{% if enable_thinking is defined and not enable_thinking %}0?{% endif %}"
    settings_ = json.loads((other / "tokenizer_config.json").read_text())
    settings_.pop("chat_template", None)
    (other / "tokenizer_config.json").write_text(json.dumps(settings_))
    (other / "chat_template.jinja").write_text(template)
    tokenizer = AutoTokenizer.from_pretrained(other)
    for thinking, words in ((None, {}), (True, {"enable_thinking": True}), (False, {"enable_thinking": False})):
        _, done = prepare(tmp_path, other, source=str(tmp_path / "rows.jsonl"), thinking=thinking)
        for one in read_rows(done.train):
            chat = [dict(message) for message in one.messages]
            expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False, **words)
            assert list(one.prompt_ids) == expected
            assert tokenizer.decode(expected).endswith("0?") == (thinking is False)
