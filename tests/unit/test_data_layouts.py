"""Data sets in other projects' layouts, from a file in that layout to Forebay's rows."""

import io
import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from forebay.config import DataConfig, parse_config
from forebay.data.dataset import Dataset, make_dataset
from forebay.data.images import Pictures, Vision
from forebay.data.read import read_source
from forebay.data.schema import BadRow, Draft
from forebay.data.sources import Part

DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\nRemember to put your answer on its "
    'own line after "Answer:".'
)
Row = dict[str, Any]


def parquet(path: Path, rows: list[Row]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path)


def json_lines(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def arrow_file(path: Path, rows: list[Row]) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def arrow_stream(path: Path, rows: list[Row]) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def chat(text: str) -> list[Row]:
    return [{"role": "user", "content": text}]


def verl(prompt: str, truth: str, origin: str, index: int) -> Row:
    return {
        "data_source": origin,
        "prompt": chat(prompt),
        "ability": "MATH",
        "reward_model": {"ground_truth": truth, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": str(index)},
    }


def drafts(path: Path, pictures: Any = None, **data: Any) -> list[Draft]:
    """All rows, which must be good."""
    items = [item for _, item in read_source(DataConfig(source=str(path), **data), pictures)]
    assert not [item for item in items if isinstance(item, BadRow)]
    return items  # type: ignore[return-value]


LAYOUTS: list[tuple[str, Row, str, Any, tuple[str, ...]]] = [
    (
        "verl",
        verl("What is 6*7?", "42", "math_dapo", 0),
        "What is 6*7?",
        "42",
        ("data_source:math_dapo", "ability:MATH"),
    ),
    ("slime", {"prompt": "Q?", "label": "42", "metadata": {"level": 3, "x": None}}, "Q?", "42", ("level:3",)),
    ("vime", {"prompt": chat("Q?"), "label": "42"}, "Q?", "42", ()),
    ("trl answer", {"prompt": chat("Q?"), "answer": "42"}, "Q?", "42", ()),
    ("trl solution", {"prompt": "Q?", "solution": "$\\frac12$"}, "Q?", "$\\frac12$", ()),
    ("trl boxed", {"prompt": "Q?", "solution": "So \\boxed{1} or \\boxed{\\frac{1}{2}}."}, "Q?", "\\frac{1}{2}", ()),
    ("gsm8k", {"question": "Q?", "answer": "6*7=<<6*7=42>>42\n#### 1,042"}, "Q?", "1042", ()),
    ("question", {"question": "Q?", "answer": "forty two"}, "Q?", "forty two", ()),
    (
        "math",
        {"problem": "Q?", "level": "Level 5", "type": "Algebra", "solution": "Thus \\boxed{\\text{(A) }x^{2}}"},
        "Q?",
        "\\text{(A) }x^{2}",
        ("level:Level 5", "type:Algebra"),
    ),
    (
        "aime",
        {"problem": "Q?", "solution": "... \\boxed{7}", "answer": "042", "year": 2024},
        "Q?",
        "042",
        ("year:2024",),
    ),
    ("capitals", {"ID": "2024-I-1", "Problem": "Q?", "Solution": "s", "Answer": 42}, "Q?", 42, ()),
    ("plain", {"prompt": "Q?", "answer": {"a": [1]}, "tags": ["easy"]}, "Q?", {"a": [1]}, ("easy",)),
]


@pytest.mark.parametrize("write", [json_lines, parquet])
@pytest.mark.parametrize(("name", "row", "prompt", "answer", "tags"), LAYOUTS, ids=[case[0] for case in LAYOUTS])
def test_layouts_are_recognised(
    tmp_path: Path, write: Callable[[Path, list[Row]], None], name: str, row: Row, prompt: str, answer: Any, tags: Any
) -> None:
    source = tmp_path / ("rows.jsonl" if write is json_lines else "rows.parquet")
    write(source, [row])
    (draft,) = drafts(source)
    assert draft.messages == ({"role": "user", "content": prompt},)
    assert json.loads(draft.answer) == answer
    assert draft.tags == tags
    assert draft.source == str(source)


@pytest.mark.parametrize(
    ("row", "settings", "answer"),
    [
        ({"q": "Q?", "meta": {"truth": {"value": "42"}}}, {"prompt": "q", "answer": "meta.truth.value"}, "42"),
        ({"prompt": "Q?", "label": "1", "answer": "2"}, {"answer": "answer"}, "2"),
        (
            {"text": "Q?", "solution": "x #### 5"},
            {"prompt": "text", "answer": "solution", "answer_form": "hashes"},
            "5",
        ),
        ({"prompt": "Q?", "answer": "is \\boxed{6}"}, {"answer_form": "boxed"}, "6"),
        ({"question": "Q?", "answer": "a #### 7"}, {"answer_form": "whole"}, "a #### 7"),
        ({"a.b": "Q?", "answer": "8"}, {"prompt": "a.b"}, "8"),
    ],
)
def test_the_profile_maps_what_is_not_recognised(tmp_path: Path, row: Row, settings: Row, answer: str) -> None:
    json_lines(tmp_path / "rows.jsonl", [row])
    (draft,) = drafts(tmp_path / "rows.jsonl", columns=settings)
    assert (draft.prompt, json.loads(draft.answer)) == ("Q?", answer)


@pytest.mark.parametrize(
    ("row", "settings", "reason"),
    [
        ({"q": "x", "a": "1"}, {}, "no column 'prompt' (columns here: q, a; set data.columns.prompt)"),
        ({"prompt": "x", "reward_model": {"style": "rule"}}, {}, "no 'ground_truth' in column 'reward_model'"),
        ({"prompt": "x", "reward_model": "42"}, {}, "no 'ground_truth' in column 'reward_model'"),
        ({"problem": "x", "solution": "is 42"}, {}, "does not end in a \\boxed{} with the answer (no \\boxed{})"),
        ({"problem": "x", "solution": "is \\boxed{42"}, {}, "(the last box is never closed)"),
        ({"question": "x", "answer": "42"}, {"answer_form": "hashes"}, "the answer has no ####"),
        ({"question": "x", "answer": "so ####  "}, {}, "the answer is empty"),
    ],
)
def test_rows_that_do_not_fit_their_layout_say_why(tmp_path: Path, row: Row, settings: Row, reason: str) -> None:
    json_lines(tmp_path / "rows.jsonl", [row])
    data = DataConfig(source=str(tmp_path / "rows.jsonl"), columns=settings)
    ((_, bad),) = read_source(data)
    assert isinstance(bad, BadRow)
    assert reason in bad.reason


def test_layouts_may_be_mixed_in_a_file(tmp_path: Path) -> None:
    json_lines(tmp_path / "rows.jsonl", [{"prompt": "a", "label": "1"}, {"question": "b", "answer": "#### 2"}])
    assert [(d.prompt, d.answer) for d in drafts(tmp_path / "rows.jsonl")] == [("a", '"1"'), ("b", '"2"')]


def test_instruction_and_verifiers_of_the_profile(tmp_path: Path) -> None:
    rows = [
        verl("a", "1", "aime2024", 0),
        verl("b", "2", "math_dapo", 1),
        {**verl("c", "3", "x", 2), "verifier": "exact"},
    ]
    json_lines(tmp_path / "rows.jsonl", rows)
    got = drafts(tmp_path / "rows.jsonl", instruction="Box it.", verifiers={"aime*": "dapo_math", "math*": "math"})
    assert [draft.prompt for draft in got] == ["a\n\nBox it.", "b\n\nBox it.", "c\n\nBox it."]
    assert [draft.verifier for draft in got] == ["dapo_math", "math", "exact"]


@pytest.mark.parametrize("write", [arrow_file, arrow_stream])
def test_both_forms_of_arrow(tmp_path: Path, write: Callable[[Path, list[Row]], None]) -> None:
    write(tmp_path / "rows.arrow", [{"prompt": f"p{n}", "answer": n} for n in range(5000)])
    got = drafts(tmp_path / "rows.arrow")
    assert [draft.prompt for draft in got] == [f"p{n}" for n in range(5000)]


def dataset(tmp_path: Path, source: str | Path, pictures: Pictures | None = None, **data: Any) -> Dataset:
    config = parse_config({"data": {"source": str(source), **data}}, "test")
    return make_dataset(str(source), config.data.hub_split, config, tmp_path / "cache", pictures)


def prompts(made: Dataset) -> list[str]:
    return [messages[-1]["content"] for messages in made.column("messages").to_pylist()]


def test_a_directory_is_its_files_of_one_split(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    (folder / "data").mkdir(parents=True)
    parquet(folder / "data" / "train-00000-of-00002.parquet", [{"prompt": "a", "answer": "1"}])
    parquet(folder / "data" / "train-00001-of-00002.parquet", [{"prompt": "b", "answer": "1"}])
    parquet(folder / "data" / "test-00000-of-00001.parquet", [{"prompt": "c", "answer": "1"}])
    json_lines(folder / "more.jsonl", [{"prompt": "d", "answer": "1"}])
    (folder / "README.md").write_text("x")
    (folder / "dataset_infos.json").write_text("{}")
    assert prompts(dataset(tmp_path, folder)) == ["a", "b", "d"]
    assert prompts(dataset(tmp_path, folder, hub_split="test")) == ["c", "d"]


def test_a_folder_that_datasets_saved_is_read(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list([{"prompt": f"p{n}", "answer": n} for n in range(30)])
    rows.save_to_disk(str(tmp_path / "saved"))
    assert prompts(dataset(tmp_path, tmp_path / "saved")) == [f"p{n}" for n in range(30)]


def test_a_data_set_of_the_hub_is_read_through_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder in place of the hub; everything else is `datasets`' own."""
    import datasets

    (tmp_path / "hub").mkdir()
    parquet(tmp_path / "hub" / "train-0.parquet", [verl(f"p{n}", str(n), "math_dapo", n) for n in range(20)])
    parquet(tmp_path / "hub" / "test-0.parquet", [verl("held out", "0", "math_dapo", 0)])
    load = datasets.load_dataset
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda name, split: load(str(tmp_path / "hub"), split=split, cache_dir=str(tmp_path / "hf")),
    )
    first = dataset(tmp_path, "someone/maths")
    assert prompts(first) == [f"p{n}" for n in range(20)]
    assert first.column("source").to_pylist() == ["someone/maths"] * 20
    assert dataset(tmp_path, "someone/maths").cached
    assert prompts(dataset(tmp_path, "someone/maths", hub_split="test")) == ["held out"]


def test_dapo_math_17k_with_every_row_a_hundred_times(tmp_path: Path) -> None:
    rows = [verl(DAPO.format(f"Find $x$ with $x + {n} = {2 * n}$."), str(n), "math_dapo", n) for n in range(40)]
    parquet(tmp_path / "dapo-math-17k.parquet", rows * 100)
    made = dataset(tmp_path, tmp_path / "dapo-math-17k.parquet")
    assert made.counts == {"read": 4000, "accepted": 40, "quarantined": 0, "duplicates": 3960}
    assert made.column("answer").to_pylist() == [f'"{n}"' for n in range(40)]
    assert made.column("tags").to_pylist() == [["data_source:math_dapo", "ability:MATH"]] * 40


def test_aime_2024_as_published(tmp_path: Path) -> None:
    rows = [verl(DAPO.format(f"Problem {n}"), f"{n:03}", "math_dapo", n) for n in range(30)]
    parquet(tmp_path / "aime-2024.parquet", rows)
    assert dataset(tmp_path, tmp_path / "aime-2024.parquet").counts["accepted"] == 30


def test_gsm8k_as_published(tmp_path: Path) -> None:
    rows = [
        {"question": f"Ann has {n} apples and gets 1,000?", "answer": f"<<{n}+1000>>\n#### 1,{n:03}"} for n in range(9)
    ]
    parquet(tmp_path / "train-00000-of-00001.parquet", rows)
    made = dataset(tmp_path, tmp_path / "train-00000-of-00001.parquet", instruction="End with the number.")
    assert made.column("answer").to_pylist() == [f'"1{n:03}"' for n in range(9)]
    assert all(prompt.endswith("?\n\nEnd with the number.") for prompt in prompts(made))


def png(colour: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (56, 84), (colour, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def test_geometry3k_with_its_images(tmp_path: Path) -> None:
    """The same question about other pictures is another prompt."""
    kept = Pictures(tmp_path / "images", Vision(14, 2, 2, (0.5,) * 3, (0.5,) * 3, 3136, 50_000, 5))
    rows = [
        {"images": [{"bytes": png(n), "path": None}], "problem": "<image>Find x.", "answer": str(n)} for n in range(12)
    ]
    parquet(tmp_path / "geo3k.parquet", [*rows, rows[0]])
    made = dataset(tmp_path, tmp_path / "geo3k.parquet", kept)
    assert made.counts == {"read": 13, "accepted": 12, "quarantined": 0, "duplicates": 1}
    assert len({names[0] for names in made.column("images").to_pylist()}) == 12
    assert sum(1 for _ in (tmp_path / "images").glob("*.png")) == 12
    converted = [
        {
            "data_source": "hiyouga/geometry3k",
            "prompt": chat(f"{row['problem']} You must put your final answer in \\boxed{{}}."),
            "images": row["images"],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
            "extra_info": {"split": "train", "index": n, "answer": row["answer"], "question": row["problem"]},
        }
        for n, row in enumerate(rows)
    ]
    parquet(tmp_path / "verl.parquet", converted)
    made = dataset(tmp_path, tmp_path / "verl.parquet", kept)
    assert made.counts["accepted"] == 12
    assert made.column("answer").to_pylist() == [f'"{n}"' for n in range(12)]


@pytest.mark.parametrize("write", [parquet, arrow_file, arrow_stream])
def test_rows_of_megabytes_come_in_small_blocks(tmp_path: Path, write: Callable[[Path, list[Row]], None]) -> None:
    path = tmp_path / ("rows.parquet" if write is parquet else "rows.arrow")
    write(path, [{"prompt": f"p{n}", "answer": n, "image": random.Random(n).randbytes(1 << 20)} for n in range(40)])
    blocks = list(Part(str(path), path).blocks())
    assert [block.first for block in blocks] == [1, *(block.first + block.lines for block in blocks[:-1])]
    assert sum(block.lines for block in blocks) == 40
    assert max(len(pickle.dumps(block)) for block in blocks) < 10e6
