import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.rewards import exact, math
from forebay.rewards.extract import boxed, final_answer, visible
from forebay.rewards.math import SECONDS, compare, costly


def score(response: str, answer: object, prompt: str) -> float | None:
    return math.score(response, answer, prompt).score


@pytest.mark.parametrize(
    ("response", "answer", "rule"),
    [
        (r"So \boxed{41}, no: \boxed{42}.", "42", "boxed"),
        (r"\boxed{\boxed{42}}", "42", "boxed"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", "boxed"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}", "boxed"),
        (r"\boxed{[1, 2\}}", r"[1, 2\}", "boxed"),
        (r"\boxed{42", "", "boxed"),
        (r"\boxed{41} and \boxed{42", "", "boxed"),
        (r"\boxed{" + "1" * 201 + "}", "", "boxed"),
        (r"\boxed{}", "", "boxed"),
        (r"Answer: 7 \boxed{}", "", "boxed"),
        ("Answer: 7\nno\n**Answer:** 42.", "42", "answer_line"),
        ("the final answer: $42$", "$42$", "answer_line"),
        ("17 + 25 = 42.", "42", "trailing_number"),
        ("I get 1,234.5", "1,234.5", "trailing_number"),
        ("it is **-3**", "-3", "trailing_number"),
        ("it is \N{MINUS SIGN}3", "\N{MINUS SIGN}3", "trailing_number"),
        ("42 apples", "", "none"),
        ("no number", "", "none"),
        ("10.0.0.1", "", "none"),
        ("at 10^4", "", "none"),
        ("", "", "none"),
        ("7 " + " " * 100_000, "7", "trailing_number"),
    ],
)
def test_final_answer(response: str, answer: str, rule: str) -> None:
    found = final_answer(response)
    assert (found.text, found.rule) == (answer, rule)
    assert bool(found.problem) is not bool(answer)


def test_a_unit_may_follow_the_number_where_it_is_asked_for() -> None:
    assert final_answer("so it is -71.3 dBm.", unit=True).text == "-71.3 dBm"
    assert final_answer("so it is -71.3 dBm.").rule == "none"


@pytest.mark.parametrize(
    ("response", "rest"),
    [("a", "a"), ("<think>a</think>b", "b"), ("a</think>b</think>c", "c"), ("<think>a", ""), ("a<think>b", "a")],
)
def test_thinking_is_not_visible(response: str, rest: str) -> None:
    assert visible(response) == rest


@given(st.text(max_size=30))
def test_a_box_gives_back_what_was_put_in_it(text: str) -> None:
    inside = text.replace("\\", "").replace("{", "").replace("}", "").replace("think>", "").strip("*_` \t\r\n.")
    if inside == inside.strip() and inside:
        assert boxed(rf"so \boxed{{{{{inside}}}}} it is").text == f"{{{inside}}}"


def test_what_would_burn_time_is_known_and_what_would_not_is_not() -> None:
    for formula in (
        "9^{9^9}",
        "x^2^3",
        "10!",
        "2^{999}",
        "(x+1)^{200}",
        "(" * 9 + ")" * 9,
        r"2^{9\cdot 9\cdot 9\cdot 9}",
    ):
        assert costly(formula), formula
    for formula in ("x^2+x^9", "2^{10}", "(x+1)^2(x-1)^3", r"e^{2\pi i/3}", r"x^{\frac{3}{4}}", r"\sqrt{x^{2}+y^{2}}"):
        assert not costly(formula), formula


def test_a_comparison_that_takes_too_long_has_timed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: str) -> bool:
        while True:
            try:
                sum(range(10**6))
            except Exception:  # as math-verify and sympy do  # noqa: BLE001
                return False

    monkeypatch.setattr(math, "_verify", slow)
    monkeypatch.setattr(math, "SECONDS", 0.1)
    judgement = compare(r"\sqrt{3}", r"\sqrt{2}")
    assert (judgement.score, judgement.verdict) == (None, "timed_out")
    assert SECONDS == 1.0


def test_unevaluated_answers_count_if_asked_for() -> None:
    assert math.score(r"\boxed{17+25}", "42", "", unevaluated=True).verdict == "right"
    assert math.score(r"\boxed{17+26}", "42", "", unevaluated=True).verdict == "wrong"
    assert math.score(r"\boxed{10^9!}", "42", "", unevaluated=True).verdict == "wrong"


def test_a_reference_that_is_no_mathematics_is_compared_as_text() -> None:
    assert compare("a => b", "a => b").verdict == "right"
    assert compare(r"\sqrt{2}", "a => =>").verdict == "wrong"


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


def test_exact_refuses_an_answer_that_is_no_text() -> None:
    with pytest.raises(TypeError, match="reward exact needs"):
        exact.score("7", ["7"], "")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_limit_is_told_again_if_a_destructor_swallowed_it() -> None:
    class Slow:
        def __del__(self) -> None:
            begin = time.process_time()
            while time.process_time() - begin < 0.3:
                pass

    def work() -> None:
        Slow()
        while time.process_time() - begin < 5:
            pass

    begin = time.process_time()
    with pytest.raises(math._TooLongError), math._limited(0.1):
        work()
    assert time.process_time() - begin < 2
