"""`forebay data`: what it tells of good and of broken files, in single lines; the preparation of a profile."""

import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

import forebay.data.sources
from forebay import cli
from forebay.config import RunConfig
from forebay.data.inspect import ROWS, inspect
from forebay.errors import UserError

invoke = CliRunner(env={"COLUMNS": "300"}).invoke


def json_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def told(path: Path | str, code: int = 0, *more: str) -> str:
    """What the command prints, white space made single."""
    result = invoke(cli.app, ["data", "inspect", str(path), *more])
    assert result.exit_code == code, result.output
    assert not isinstance(result.exception, Exception) or isinstance(result.exception, SystemExit)
    return " ".join(result.output.split())


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


GSM8K = [{"question": f"How many are {n} apples?", "answer": f"<<{n}>>\n#### {n}"} for n in range(5)]


def test_a_good_file(tmp_path: Path) -> None:
    text = told(parquet(tmp_path / "train.parquet", [*GSM8K, GSM8K[0]]))
    assert f"source {tmp_path}/train.parquet: parquet," in text
    assert "6 rows looked at 6 rows columns question: text answer: text layout GSM8K (6 rows)" in text
    assert (
        'would take 5 rows would leave out 1 repeated, 0 bad first prompt "How many are 0 apples?" its answer "0"'
        in text
    )
    assert "to do reward.name has to fit the answers: math" in text


def test_what_the_sources_recipes_use(tmp_path: Path) -> None:
    row = {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": "x"}],
        "reward_model": {"ground_truth": "1"},
    }
    text = told(json_lines(tmp_path / "a.jsonl", [row]))
    assert "layout verl (1 row)" in text
    assert "its tags data_source:math_dapo" in text
    assert "dapo_math for data_source math_dapo" in text
    assert "fit the answers: choice" in told(json_lines(tmp_path / "b.jsonl", [{"prompt": "x", "answer": "B"}]))
    call = {"prompt": "x", "answer": {"name": "f", "arguments": {}}}
    assert "json_call for tool calls" in told(json_lines(tmp_path / "c.jsonl", [call]))


def test_a_wrong_column(tmp_path: Path) -> None:
    source = json_lines(tmp_path / "rows.jsonl", [{"frage": "x", "gold": "1"}] * 3)
    text = told(source, 1)
    assert "layout none that is known (verl, slime / vime / miles, plain (TRL)" in text
    assert "3 rows: no column 'prompt' (columns here: frage, gold; set data.columns.prompt) (row 1:" in text
    mapped = told(source, 0, "--set", "data.columns.prompt=frage", "--set", "data.columns.answer=gold")
    assert "layout mapped in the profile (3 rows) would take 1 row would leave out 2 repeated, 0 bad" in mapped
    profile = tmp_path / "profile.yaml"
    profile.write_text(yaml.safe_dump({"data": {"columns": {"prompt": "frage", "answer": "gold"}}}))
    assert told(source, 0, "--profile", str(profile)) == mapped


def test_mixed_types_and_contradictions(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "answer": 1},
        {"prompt": "b", "answer": "x"},
        {"prompt": 7, "answer": None},
        {"prompt": "a", "answer": 2},
    ]
    text = told(json_lines(tmp_path / "rows.jsonl", rows))
    assert "prompt: text in 3 rows, number in 1 row" in text
    assert "1 row: the prompt is of type int, not text or a list of messages (row 3:" in text
    assert "column answer mixes number and text: write one kind" in text
    assert "1 row with an earlier prompt and another answer" in text


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_bytes(b'{"prompt": "a", "answer": 1}\n{"prompt": "caf\xe9", "answer": 1}\n')
    assert "1 row: not valid UTF-8 (byte 16 of the line) (row 2:" in told(source)
    (tmp_path / "rows.csv").write_bytes(b"prompt,answer\na,1\ncaf\xe9,1\n")
    assert "1 row: message 1 of the prompt is not valid Unicode (save the file as UTF-8) (row 2:" in told(
        tmp_path / "rows.csv"
    )


def png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (56, 84)).save(buffer, "PNG")
    return buffer.getvalue()


def test_images(tmp_path: Path) -> None:
    (tmp_path / "there.png").write_bytes(png())
    (tmp_path / "cut.png").write_bytes(png()[:60])
    rows = [
        {"problem": f"<image>{name}", "answer": "1", "images": [name]}
        for name in ("there.png", "missing.png", "cut.png")
    ]
    text = told(json_lines(tmp_path / "rows.jsonl", rows))
    assert "would take 1 row, 1 with images would leave out 0 repeated, 2 bad" in text
    assert f"1 row: the image {tmp_path}/missing.png cannot be read (No such file or directory) (row 2:" in text
    assert "1 row: an image cannot be read (" in text
    assert "model.path has to name a model that reads them" in text
    assert not list(tmp_path.glob("**/*.unfinished"))


@pytest.mark.parametrize(
    ("name", "content", "code", "words"),
    [
        ("empty.jsonl", b"", 1, "would take 0 rows"),
        ("empty.jsonl", b"", 1, "to do there are no rows in it"),
        ("empty.csv", b"", 1, "to do there are no rows in it"),
        ("empty.json", b"[]", 1, "to do there are no rows in it"),
        ("empty.parquet", b"", 2, "cannot be read (Parquet file size is 0 bytes)"),
        ("wrong.parquet", b"x" * 100, 2, "cannot be read (Parquet magic bytes not found in footer."),
        ("wrong.arrow", b"x" * 100, 2, "wrong.arrow: cannot be read ("),
        ("wrong.json", b"{}", 2, "must be a list of objects"),
        ("quote.csv", b'prompt,answer\n"a,1\nb,2\n', 2, "cannot be read (row 1: a quote is not closed: close it"),
        ("late.csv", b'prompt,answer\n\na,1\n\n"b,2\nc,3\n', 2, "cannot be read (row 2: a quote is not closed"),
        ("inner.csv", b'prompt,answer\n"a "b" c",1\n', 2, "each quote in it is written twice"),
        ("head.csv", b'"prompt,answer\n', 2, "cannot be read (the header: a quote is not closed"),
        ("twice.csv", b"prompt,answer,prompt\na,1,b\n", 2, "two columns have the name 'prompt': rename one"),
        ("utf16.jsonl", '{"prompt": "a"}'.encode("utf-16"), 2, "it is UTF-16: save it as UTF-8"),
        ("utf16.csv", "prompt,answer".encode("utf-16"), 2, "it is UTF-16: save it as UTF-8"),
        ("rows.txt", b"x", 2, "give a file that ends in .parquet"),
        ("missing.jsonl", None, 2, "no such file"),
        ("missing", None, 2, "/missing: no such file or folder"),
    ],
)
def test_files_of_no_use_are_told_in_one_line(
    tmp_path: Path, name: str, content: bytes | None, code: int, words: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    result = invoke(cli.app, ["data", "inspect", str(tmp_path / name)])
    assert result.exit_code == code
    assert words in " ".join(result.output.split())
    assert code == 1 or result.output.count("\n") == 1
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("data/mine", "data.source: data/mine: no such file or folder"),
        ("./mine", "data.source: ./mine: no such file or folder"),
        ("a/b/c", "data.source: a/b/c: no such file or folder"),
        ("", "data.source: is empty: name a file"),
        ("s3://", "data.source: s3://: write s3://BUCKET/PREFIX"),
        ("s3://x.jsonl", "data.source: s3://x.jsonl: write s3://BUCKET/PREFIX"),
        ("builtin:maze", "`forebay data prepare` draws the tasks"),
        ("s3://id:hush@bucket/x", "data.source: no credentials in a URI; set AWS_ACCESS_KEY_ID"),
        ("owner/name", "ConnectionError: Couldn't reach 'owner/name' on the Hub"),
        ("owner/name", "check the name or the connection"),
    ],
)
def test_sources_that_are_not_there_are_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, words: str
) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", "http://127.0.0.1:9")
    start = time.monotonic()
    result = invoke(cli.app, ["data", "inspect", source])
    assert time.monotonic() - start < 5
    assert result.exit_code == 2
    assert words in result.output
    assert "hush" not in result.output
    assert result.output.count("\n") == 1


@pytest.mark.parametrize("text", ["x" * 400 + ",1", '"' + "x\n" * 200 + '",1', '"open\n' + "x,1\n" * 200])
def test_a_field_beyond_the_bound_names_its_row_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(forebay.data.sources, "LONGEST_LINE", 256)
    (tmp_path / "rows.csv").write_text(f"prompt,answer\na,1\nb,1\n{text}\nc,1\n")
    text = told(tmp_path / "rows.csv", 2)
    assert "cannot be read (row 3: a line or field of more than 0 MB: shorten it, close its quote, or" in text


def test_two_columns_of_one_name_in_parquet(tmp_path: Path) -> None:
    table = pa.table([["a"], ["1"], ["b"]], names=["prompt", "answer", "prompt"])
    pq.write_table(table, tmp_path / "rows.parquet")
    assert "two columns have the name 'prompt': rename one" in told(tmp_path / "rows.parquet", 2)


def test_a_truncated_parquet_file(tmp_path: Path) -> None:
    source = parquet(tmp_path / "rows.parquet", [{"prompt": f"p{n}", "answer": str(n)} for n in range(5000)])
    whole = source.read_bytes()
    source.write_bytes(whole[: len(whole) // 2])
    assert "is not a parquet file); it is damaged or incomplete: fetch or write it again" in told(source, 2)
    source.write_bytes(whole[:4] + bytes(2000) + whole[2004:])
    assert f"forebay: data.source: {source}: cannot be read (" in told(source, 2)


def test_a_folder_says_how_many_files_and_is_looked_at_beyond_the_first(tmp_path: Path) -> None:
    for n in range(3):
        json_lines(tmp_path / f"train-{n}.jsonl", [{"prompt": f"{n}", "answer": "1"}, {"prompt": "x", "answer": "1"}])
    json_lines(tmp_path / "train-3.jsonl", [{"prompt": "y"}])
    text = told(tmp_path)
    assert f"source 4 files, the first is {tmp_path}/train-0.jsonl: jsonl," in text
    assert "looked at 7 rows columns" in text
    assert "would take 4 rows would leave out 2 repeated, 1 bad" in text
    assert f"; set data.columns.answer) ({tmp_path}/train-3.jsonl row 1: " in text
    (tmp_path / "train-4.parquet").write_bytes(b"PAR1")
    assert f"data.source: {tmp_path}/train-4.parquet: cannot be read (" in told(tmp_path, 2)


@pytest.mark.parametrize("first", [ROWS - 1, ROWS])
def test_the_first_rows_of_a_folder_are_all_only_if_they_are(tmp_path: Path, first: int) -> None:
    for name, rows in (("a", first), ("b", 1), ("c", 1)):
        json_lines(tmp_path / f"{name}.jsonl", [{"prompt": f"{name} {n}", "answer": "1"} for n in range(rows)])
    assert f"looked at {ROWS:,} rows: the first ones" in told(tmp_path)
    (tmp_path / "c.jsonl").unlink()
    assert (f"looked at {ROWS:,} rows: the first ones" in told(tmp_path)) is (first == ROWS)


def test_no_more_than_the_first_rows_are_looked_at(tmp_path: Path) -> None:
    text = told(
        json_lines(tmp_path / "rows.jsonl", [{"prompt": f"p{n} {'x' * 80}", "answer": "1"} for n in range(3 * ROWS)])
    )
    rows = int(text.partition("looked at ")[2].partition(" ")[0].replace(",", ""))
    assert ROWS <= rows < 2 * ROWS
    assert "rows: the first ones" in text


def test_a_line_of_100_mb_is_one_bad_row_and_little_memory(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    with source.open("w") as file:
        file.write('{"prompt": "a", "answer": 1}\n{"prompt": "')
        for _ in range(100):
            file.write("x" * (1 << 20))
        file.write('", "answer": 1}\n{"prompt": "b", "answer": 1}\n')
    script = (
        "import sys\nfrom pathlib import Path\nfrom forebay.cli import app\n"
        "try:\n    app(['data', 'inspect', sys.argv[1]])\nfinally:\n"
        "    print(Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0])\n"  # not its parent's
    )
    done = subprocess.run([sys.executable, "-c", script, str(source)], capture_output=True, text=True, timeout=120)
    text = " ".join(done.stdout.split())
    assert done.stderr == ""
    assert "would take 2 rows would leave out 0 repeated, 1 bad" in text
    assert "1 row: the line is longer than 32 MB (row 2:" in text
    assert int(text.rpartition(" ")[2]) < 700 * 1024


def test_prepare_makes_the_rows_of_a_profile_and_tells_the_account(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{n}", "answer": "1"} for n in range(30)]
    json_lines(tmp_path / "rows.jsonl", [*rows, rows[3], {"prompt": "x"}])
    profile = tmp_path / "profile.yaml"
    values = {
        "model": {"path": "builtin:random-qwen3"},
        "data": {
            "source": str(tmp_path / "rows.jsonl"),
            "train_prompts": 8,
            "validation_prompts": 2,
            "test_prompts": 4,
        },
        "reward": {"name": "exact"},
        "generation": {"max_new_tokens": 8},
        "storage": {"scratch": str(tmp_path / "scratch")},
    }
    profile.write_text(yaml.safe_dump(values))
    result = invoke(cli.app, ["data", "prepare", str(profile)])
    text = " ".join(result.output.split())
    assert result.exit_code == 0, result.output
    assert (
        "read 32 rows kept 8 train, 2 validation, 4 test, 16 unused left out 1 quarantined, 1 duplicate, 0 leaked"
        in text
    )
    assert "1 row: no column 'answer' (columns here: prompt; set data.columns.answer)" in text
    assert "read now" in text
    assert "found read" in invoke(cli.app, ["data", "prepare", str(profile)]).output


def test_text_in_parquet_that_is_not_utf8_costs_its_row(tmp_path: Path) -> None:
    texts = pa.Array.from_buffers(
        pa.string(), 3, [None, pa.array([0, 1, 3, 4], pa.int32()).buffers()[1], pa.py_buffer(b"a\xe9bc")]
    )
    pq.write_table(pa.table({"prompt": texts, "answer": ["1", "2", "3"]}), tmp_path / "rows.parquet")
    text = told(tmp_path / "rows.parquet")
    assert "would take 2 rows would leave out 0 repeated, 1 bad" in text
    assert "1 row: not a valid row of Arrow (" in text
    assert "(row 2:" in text


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([".jsonl", ".json", ".csv", ".arrow", ".parquet"]), st.binary(max_size=300), st.data())
def test_no_bytes_give_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, content: bytes, data: st.DataObject
) -> None:
    """Noise, and good files with a hole of noise in them."""
    tmp_path = tmp_path_factory.mktemp("noise")
    source = tmp_path / f"rows{suffix}"
    rows = [{"prompt": f"p{n} é", "answer": str(n)} for n in range(20)]
    if suffix == ".parquet":
        parquet(source, rows)
    elif suffix == ".arrow":
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(source), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    elif suffix == ".csv":
        source.write_text("prompt,answer\n" + "".join(f'"{row["prompt"]}",{row["answer"]}\n' for row in rows))
    else:
        source.write_text(json.dumps(rows) if suffix == ".json" else "".join(json.dumps(row) + "\n" for row in rows))
    whole = source.read_bytes()
    place = data.draw(st.integers(0, len(whole)))
    source.write_bytes(whole[:place] + content + whole[place + data.draw(st.integers(0, len(content))) :])
    refused = ""
    try:
        inspect(str(source), RunConfig(), tmp_path)
    except UserError as error:
        refused = str(error)
    assert "\n" not in refused
