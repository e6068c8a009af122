"""The built-in picture task: a few coloured shapes on a white ground, and a question with one exact answer.

Invariants:
- A picture is a 3 x 3 board of places, each of them empty or with one shape; 28 pixels a place, so that a model of the
  Qwen2-VL family reads a place as one token and leaves the picture at its size.
- A question's answer is a word of `vocabulary()`: a number from 0 to 4, or a colour.
"""

import io
import random

from PIL import Image, ImageDraw

PLACE, SIDE = 28, 3
MOST = 4
"""Shapes in a picture, at most."""
COLOURS = {"red": (220, 30, 30), "green": (30, 160, 60), "blue": (40, 70, 220), "yellow": (240, 200, 20)}
SHAPES = ("circle", "square", "triangle")
_NUMBERS = tuple(str(number) for number in range(MOST + 1))
_COUNT = "how many {} shapes?"
_COLOUR = "what colour is the {}?"


def draw_shapes(rng: random.Random) -> tuple[str, str, bytes]:
    """(question, answer, picture as PNG)."""
    places = rng.sample(range(SIDE * SIDE), rng.randint(1, MOST))
    board = [(place, rng.choice(SHAPES), rng.choice(list(COLOURS))) for place in places]
    kinds = [shape for _, shape, _ in board]
    single = [(shape, colour) for _, shape, colour in board if kinds.count(shape) == 1]
    if single and rng.random() < 0.5:
        shape, answer = rng.choice(single)
        return _COLOUR.format(shape), answer, _paint(board)
    colour = rng.choice(list(COLOURS))
    return _COUNT.format(colour), str(sum(c == colour for _, _, c in board)), _paint(board)


def vocabulary() -> list[str]:
    """Everything that a question or an answer is put together from."""
    words = {word for text in (_COUNT, _COLOUR) for word in text.replace("{}", " ").split()}
    return [*sorted(words), " ", "?", *COLOURS, *SHAPES, *_NUMBERS]


def _paint(board: list[tuple[int, str, str]]) -> bytes:
    image = Image.new("RGB", (SIDE * PLACE, SIDE * PLACE), "white")
    draw = ImageDraw.Draw(image)
    for place, shape, colour in board:
        left, top = place % SIDE * PLACE + 3, place // SIDE * PLACE + 3
        right, bottom = left + PLACE - 7, top + PLACE - 7
        if shape == "circle":
            draw.ellipse((left, top, right, bottom), fill=COLOURS[colour])
        elif shape == "square":
            draw.rectangle((left, top, right, bottom), fill=COLOURS[colour])
        else:
            draw.polygon([(left, bottom), (right, bottom), ((left + right) / 2, top)], fill=COLOURS[colour])
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
