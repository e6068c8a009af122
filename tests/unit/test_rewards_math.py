import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.rewards.exact import score as exact
from forebay.rewards.math import equal, final_answer, score

SAME = [
    ("42", "42"), ("42.0", "42"), ("1,000", "1000"), ("1{,}000", "1000"), ("+7", "7"),
    ("\N{MINUS SIGN}3", "-3"), (r"\$5", "5"),
    ("0.5", "1/2"), (r"\frac{3}{4}", "0.75"), (r"\frac12", "1/2"), (r"-\frac{1}{2}", "-0.5"), (r"\text{42}", "42"),
    ("$42$", "42"), ("{42}", "42"), (r"50\%", "50%"), (r"5\text{ ms}", "5 ms"), ("5ms", "5 ms"),
    (r"90^\circ", r"90^{\circ}"), ("B", "B"), (r"\text{RRC}", "RRC"),
    ("10.0.0.0/24", "10.0.0.0/24"), ("9" * 50, "9" * 50),
    (r"\sqrt{8}", r"2\sqrt{2}"), (r"\{1,2\}", r"\{2,1\}"), ("$1+x$", "$x+1$"), ("2x+x", "$3x$"), ("3x", "3x"),
]  # fmt: skip
DIFFERENT = [
    ("17+25", "42"), ("x=42", "42"), (r"6\times 7", "42"), ("84/2", "42"), (r"\frac{84}{2}", "42"), ("2/4", "1/2"),
    (r"\sqrt{1764}", "42"), ("5 s", "5 ms"), ("5 s", "5"), ("5", "5 s"), ("50%", "0.5"), ("50%", "50"), ("42", "43"),
    ("RCR", "RRC"), ("b", "B"), ("1.0.0.10", "10.0.0.1"), ("1e2", "100"), ("", "42"), ("nan", "42"), ("inf", "42"),
    ("9" * 50 + ".1", "9" * 50), (r"9^{9^{9^9}}", r"\sqrt{2}"), ("10!", r"\sqrt{2}"), (r"2^{999}", r"\sqrt{2}"),
    ("1/0", "42"), (r"\frac{1}{0}", "42"), ("4 2", "42"), ("1,00", "100"), ("٤٢", "42"),
]  # fmt: skip


@pytest.mark.parametrize(("given_answer", "reference"), SAME)
def test_same(given_answer: str, reference: str) -> None:
    assert equal(given_answer, reference)


@pytest.mark.parametrize(("given_answer", "reference"), DIFFERENT)
def test_different(given_answer: str, reference: str) -> None:
    assert not equal(given_answer, reference)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"So \boxed{41}, no: \boxed{42}.", "42"),
        (r"\boxed{\boxed{42}}", "42"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{42", None),
        (r"\boxed{41} and \boxed{42", None),
        (r"\boxed{" + "1" * 201 + "}", None),
        (r"\boxed{}", None),
        ("Answer: 7\nno\n**Answer:** 42.", "42"),
        ("the final answer: $42$", "$42$"),
        ("17 + 25 = 42.", "42"),
        ("I get 1,234.5", "1,234.5"),
        ("it is **-3**", "-3"),
        ("42 apples", None),
        ("no number", None),
        ("10.0.0.1", None),
        ("at 10^4", None),
        ("", None),
        ("7 " + " " * 100_000, "7"),
    ],
)
def test_final_answer(response: str, answer: str | None) -> None:
    assert final_answer(response) == answer


@given(st.integers(-(10**12), 10**12))
def test_integers_written_in_any_usual_way_score(number: int) -> None:
    for text in (rf"\boxed{{{number}}}", rf"\boxed{{{number:,}}}", f"Answer: {number}", f"so it is {number}."):
        assert score(text, number, "") == score(text, str(number), "") == score(text, {"answer": number}, "") == 1.0
        assert score(text, number + 1, "") == 0.0


@given(st.text(max_size=80), st.integers(0, 1000))
def test_no_text_breaks_the_parser(text: str, number: int) -> None:
    assert score(text, number, "") in (0.0, 1.0)
    assert score(rf"\boxed{{{text}", number, "") in (0.0, 1.0)


@given(st.integers(1, 50), st.integers(1, 50), st.sampled_from("+-*/"))
def test_copying_the_question_does_not_score(a: int, b: int, sign: str) -> None:
    value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[sign]
    assert score(rf"\boxed{{{a}{sign}{b}}}", value, "") == 0.0
    assert score(rf"\boxed{{x={value}}}", value, "") == 0.0


def test_an_answer_of_another_kind_is_refused() -> None:
    for answer in (None, [1], {"value": 1}, True):
        with pytest.raises(TypeError, match="reward math needs"):
            score("1", answer, "")


def test_exact() -> None:
    assert exact(" blue  whale\n", "blue whale", "") == 1.0
    assert exact("Blue whale", "blue whale", "") == 0.0
    assert exact("7", 7, "") == 1.0
    with pytest.raises(TypeError, match="reward exact needs"):
        exact("7", ["7"], "")
