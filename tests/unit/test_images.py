"""Images of prompts: from a row to kept PNG, pixels and prompt ids, against transformers' own processor."""

import base64
import io
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from forebay.config import ImagesConfig, parse_config
from forebay.data.images import Pictures, fitting, pixels_of, vision_of
from forebay.data.prepare import prepare_data
from forebay.data.read import read_source
from forebay.data.schema import BadRow, Draft, prompt_id, read_rows
from forebay.data.shapes import draw_shapes, vocabulary
from forebay.data.template import Template
from forebay.errors import DataError, RunError, UserError
from forebay.run import RunContext
from forebay.training.random_models import save_random_model

ANY = ImagesConfig()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vl")
    save_random_model("qwen2_5_vl", 0, folder)
    return folder


@pytest.fixture
def pictures(model: Path, tmp_path: Path) -> Pictures:
    found = Pictures.of(tmp_path / "images", model)
    assert found is not None
    return found


def photo(width: int, height: int, seed: int = 0, mode: str = "RGB", kind: str = "PNG") -> bytes:
    noise = np.random.default_rng(seed).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).resize((width, height)).convert(mode).save(buffer, kind)
    return buffer.getvalue()


def processor(model: Path) -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil.from_pretrained(model)


@pytest.mark.parametrize(
    ("width", "height", "mode", "kind"),
    [
        (84, 84, "RGB", "PNG"),
        (100, 61, "RGB", "PNG"),
        (31, 500, "L", "PNG"),
        (700, 433, "RGB", "JPEG"),
        (20, 20, "RGBA", "PNG"),
        (90, 57, "P", "GIF"),
    ],
)
def test_pixels_are_those_of_the_models_own_processor(
    model: Path, pictures: Pictures, width: int, height: int, mode: str, kind: str
) -> None:
    raw = photo(width, height, mode=mode, kind=kind)
    pixels = pictures.pixels(pictures.keep(raw, ANY))
    with Image.open(io.BytesIO(raw)) as image:
        expected = processor(model)(image.convert("RGB"), return_tensors="np")
    assert [list(pixels.grid)] == expected["image_grid_thw"].tolist()
    assert np.abs(pixels.values - expected["pixel_values"]).max() < 2e-6
    # What is kept is a fixed point: a processor elsewhere makes the same of it.
    (kept,) = pictures.folder.glob("*.png")
    with Image.open(kept) as image:
        again = processor(model)(image, return_tensors="np")
    assert np.abs(pixels.values - again["pixel_values"]).max() < 2e-6


@given(st.integers(1, 3000), st.integers(1, 3000))
@settings(max_examples=200, deadline=None)
def test_sizes_are_multiples_within_bounds(height: int, width: int) -> None:
    least, most, cell = 3136, 50176, 28
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(DataError, match="200 times"):
            fitting(height, width, cell, least, most)
        return
    tall, wide = fitting(height, width, cell, least, most)
    assert tall % cell == wide % cell == 0 < min(tall, wide)
    # An extreme sliver keeps one row of cells, and may then be larger than asked for.
    assert tall * wide <= most or min(tall, wide) == cell
    assert fitting(tall, wide, cell, least, most) == (tall, wide) or min(tall, wide) == cell


def test_prompt_ids_are_those_of_the_models_own_processor(model: Path, pictures: Pictures) -> None:
    """Two images of different sizes, at their marks and without marks."""
    raw = [photo(84, 56), photo(56, 140, seed=1)]
    names = tuple(pictures.keep(one, ANY) for one in raw)
    config = parse_config({"model": {"max_model_len": 512}}, "test")
    template = Template(model, config, pictures)
    marked = Draft(({"role": "user", "content": "a <image> b <image>c?"},), '"1"', "s", images=names)
    plain = Draft(({"role": "system", "content": "x"}, {"role": "user", "content": "c?"}), '"1"', "s", images=names)
    rows = template.rows([marked, plain])
    tokenizer = AutoTokenizer.from_pretrained(model)

    class ImagesOnly(Qwen2_5_VLProcessor):  # the part for videos needs torchvision
        def check_argument_for_proper_class(self, name, argument):
            return None if argument is None else super().check_argument_for_proper_class(name, argument)

    own = ImagesOnly(processor(model), tokenizer, None)
    image, text = {"type": "image"}, lambda words: {"type": "text", "text": words}
    messages = [
        [{"role": "user", "content": [text("a "), image, text(" b "), image, text("c?")]}],
        [{"role": "system", "content": "x"}, {"role": "user", "content": [image, image, text("c?")]}],
    ]
    opened = [Image.open(io.BytesIO(one)) for one in raw]
    for row, chat in zip(rows, messages, strict=True):
        assert not isinstance(row, DataError), row
        written = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        expected = own(images=opened, text=[written], add_special_tokens=False)["input_ids"][0]
        assert list(row.prompt_ids) == list(expected)
        assert row.prompt_ids.count(pictures.vision.token) == 6 + 10
        assert row.images == names


def test_the_images_make_the_prompts_identity() -> None:
    messages = ({"role": "user", "content": "how many?"},)
    ids = {prompt_id(messages, images) for images in ((), ("a",), ("b",), ("a", "b"), ("b", "a"))}
    assert len(ids) == 5


def source(tmp_path: Path, rows: list[dict]) -> Path:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def outcome(path: Path, pictures: Pictures | None, **images: object) -> list[str]:
    """The names of each row's images, or why it is bad."""
    data = parse_config({"data": {"source": str(path), "images": images}}, "test").data
    items = [item for _, item in read_source(data, pictures)]
    return [item.reason if isinstance(item, BadRow) else ",".join(item.images) for item in items]


def test_layouts_of_images(tmp_path: Path, pictures: Pictures) -> None:
    """Hugging Face's {bytes, path}, plain bytes, paths and data URLs give the same image."""
    raw = photo(84, 84)
    (tmp_path / "pics").mkdir()
    (tmp_path / "pics" / "one.png").write_bytes(raw)
    url = "data:image/png;base64," + base64.b64encode(raw).decode()
    name = pictures.keep(raw, ANY)
    layouts = [
        [{"images": [{"bytes": raw, "path": None}]}],
        [{"images": [{"bytes": None, "path": "pics/one.png"}]}],
        [{"images": [raw]}],
        [{"images": raw}],
        [{"images": ["pics/one.png"]}],
        [{"images": "pics/one.png"}],
        [{"images": url}],
    ]
    for layout in layouts:
        rows = [{"prompt": [{"role": "user", "content": "<image>which?"}], "answer": "x", **row} for row in layout]
        assert outcome(source(tmp_path, rows), pictures) == [name]
    assert len(list(pictures.folder.iterdir())) == 1


def test_bad_images_are_quarantined_with_the_reason(tmp_path: Path, pictures: Pictures) -> None:
    good, broken = photo(84, 84), photo(200, 200)[:400]
    bomb = io.BytesIO()
    Image.new("1", (9000, 9000)).save(bomb, "PNG")
    images = [[good], [broken], [b"GIF89a no"], ["gone.png"], ["../out.png"], ["/etc/passwd"], [bomb.getvalue()]]
    images += [[good] * 3, [photo(8000, 20)], ["data:image/png;base64,?"], []]
    texts = ["q"] * 7 + ["<image><image>q", "q", "q", "q"]
    rows = [
        {"prompt": f"{text}{i}", "answer": "x", "images": [_item(image) for image in found]}
        for i, (text, found) in enumerate(zip(texts, images, strict=True))
    ]
    told = outcome(source(tmp_path, rows), pictures, max_per_prompt=3)
    expected = [
        pictures.keep(good, ANY),
        "an image cannot be read",
        "an image cannot be read",
        r"gone.png cannot be read",
        "is not below",
        "is not below",
        "9000 x 9000 pixels",
        "3 images, but <image> stands 2 times in the prompt",
        "more than 200 times",
        "not base64",
        "",
    ]
    assert all(part in reason for part, reason in zip(expected, told, strict=True)), told
    assert told[-1] == ""
    assert outcome(source(tmp_path, rows[:1]), pictures, max_mb=0.0001)[0].startswith("an image has 0.0 MB")
    assert outcome(source(tmp_path, rows[7:8]), pictures, max_per_prompt=2)[0].startswith("3 images; data.images")
    assert "reads none" in outcome(source(tmp_path, rows[:1]), None)[0]


def _item(image: bytes | str) -> dict[str, bytes | str | None]:
    return {"bytes": image, "path": None} if isinstance(image, bytes) else {"bytes": None, "path": image}


def test_text_that_has_the_image_token_itself_is_refused(model: Path, pictures: Pictures) -> None:
    template = Template(model, parse_config({}, "test"), pictures)
    (row,) = template.rows([Draft(({"role": "user", "content": "see <|image_pad|>"},), "1", "s")])
    assert str(row) == "the prompt has 1 image tokens for 0 images"


def test_an_image_is_scaled_to_the_profiles_bound(pictures: Pictures) -> None:
    name = pictures.keep(photo(400, 400), ImagesConfig(max_pixels=56 * 84))
    assert pictures.tokens(name) == 4
    assert pictures.pixels(name).grid == (1, 4, 4)


def test_a_damaged_or_missing_kept_image_is_named(pictures: Pictures) -> None:
    name = pictures.keep(photo(84, 84), ANY)
    place = pictures.folder / f"{name}.png"
    place.write_bytes(place.read_bytes()[:200])
    with pytest.raises(RunError, match="cannot be read"):
        pictures.pixels(name)
    Image.new("RGB", (84, 84)).save(place)
    with pytest.raises(RunError, match="is not the one that prepare_data kept"):
        pictures.pixels(name)
    place.unlink()
    with pytest.raises(RunError, match="cannot be read"):
        pictures.pixels(name)


def test_other_families_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llava", "vision_config": {}}')
    with pytest.raises(UserError, match="images of a llava are not supported"):
        vision_of(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl", "vision_config": {}, "image_token_id": 5}')
    with pytest.raises(UserError, match="no preprocessor_config"):
        vision_of(tmp_path)
    (tmp_path / "processor_config.json").write_text('{"image_processor": {"max_pixels": 7000, "merge_size": 3}}')
    vision = vision_of(tmp_path)
    assert vision is not None
    assert (vision.most, vision.merge, vision.patch, vision.token) == (7000, 3, 14, 5)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert vision_of(tmp_path) is None


def test_shapes_have_exact_answers(pictures: Pictures) -> None:
    """Answers against the colours that are in the picture; the picture keeps its size."""
    rng = random.Random(3)
    words = vocabulary()
    for _ in range(50):
        prompt, answer, png = draw_shapes(rng)
        assert answer in words
        rest = prompt
        for word in sorted(words, key=len, reverse=True):
            rest = rest.replace(word, "")
        assert rest == ""
        image = Image.open(io.BytesIO(png))
        assert image.size == (84, 84)
        middles = [image.getpixel((28 * x + 14, 28 * y + 14)) for x in range(3) for y in range(3)]
        colours = {"red": (220, 30, 30), "green": (30, 160, 60), "blue": (40, 70, 220), "yellow": (240, 200, 20)}
        if prompt.startswith("how many"):
            assert middles.count(colours[prompt.split()[2]]) == int(answer)
        else:
            assert colours[answer] in middles
    assert pictures.tokens(pictures.keep(png, ANY)) == 9
    assert np.abs(pixels_of(image, pictures.vision).values).max() < 3


def test_the_built_in_task_through_the_stage(tmp_path: Path) -> None:
    values = {
        "model": {"path": "builtin:random-qwen2_5_vl", "max_model_len": 128},
        "data": {"source": "builtin:shapes", "train_prompts": 6, "validation_prompts": 2, "test_prompts": 3},
        "reward": {"name": "exact"},
        "generation": {"max_new_tokens": 8},
        "storage": {"scratch": str(tmp_path)},
    }
    run = RunContext.create(parse_config(values, "test"))
    prepared = prepare_data(run)
    assert prepared.counts == {
        "read": 11,
        "train": 6,
        "validation": 2,
        "test": 3,
        "quarantined": 0,
        "unused": 0,
        "duplicates": 0,
        "leaked": 0,
    }
    pictures = Pictures.of(run.images, run.start_model)
    assert pictures is not None
    for split in (prepared.train, prepared.validation, prepared.test):
        for row in read_rows(split):
            (name,) = row.images
            assert row.prompt_ids.count(pictures.vision.token) == len(pictures.pixels(name).values) // 4 == 9
    values["model"]["path"] = "builtin:random-qwen3"
    with pytest.raises(UserError, match="builtin:shapes has images"):
        prepare_data(RunContext.create(parse_config(values | {"name": "text"}, "test")))


def test_the_name_is_that_of_the_colours_whoever_compressed_them(pictures: Pictures) -> None:
    raw, again = photo(84, 84), io.BytesIO()
    Image.open(io.BytesIO(raw)).save(again, "PNG", compress_level=0)
    assert raw != again.getvalue()
    assert pictures.keep(raw, ANY) == pictures.keep(again.getvalue(), ANY)
    assert pictures.keep(Image.open(io.BytesIO(raw)), ANY) == pictures.keep(raw, ANY)  # as `datasets` gives it
    assert pictures.keep(photo(84, 84, seed=1), ANY) != pictures.keep(raw, ANY)


def test_the_processors_chat_template_is_the_one_that_counts(model: Path, pictures: Pictures, tmp_path: Path) -> None:
    """Folders of Qwen2-VL's time have it in a file of its own."""
    folder = tmp_path / "old"
    shutil.copytree(model, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = settings.pop("chat_template")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    text_only = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": text_only}))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    draft = Draft(({"role": "user", "content": "which?"},), "1", "s", images=(pictures.keep(photo(84, 84), ANY),))
    config = parse_config({}, "test")
    rows = [Template(place, config, pictures).rows([draft])[0] for place in (model, folder)]
    assert rows[0] == rows[1]
