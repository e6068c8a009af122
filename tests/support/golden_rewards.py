r"""The golden table of the verifiers: (verifier, response, truth, expected score), written by thinking, not by running.

`differs` names the difference, in docs/rewards.md, for which the public reference of `math` (math-verify) or of
`dapo_math` (verl's math_dapo) says otherwise; tests/unit/test_rewards_golden.py runs both. `prompt` is for mazes.
"""

from typing import Any, NamedTuple

CALL = {"name": "ping", "arguments": {"host": "10.0.0.1", "count": 3}}
PARIS = {"choice": "B", "options": {"A": "Rome", "B": "Paris", "C": "Paris, Texas"}}
LEVEL = {"value": -71.34, "unit": "dBm", "tolerance": 0.05}
MAZE = "a1>a1vb1vSa1Gb2"


class Golden(NamedTuple):
    verifier: str
    response: str
    truth: Any
    expected: float
    differs: str = ""
    prompt: str = ""


def _math(*rows: tuple[Any, ...]) -> list[Golden]:
    """(content of the box, truth, expected, differs)"""
    return [Golden("math", rf"\boxed{{{row[0]}}}", *row[1:]) for row in rows]


NESTED_BRACES = [
    *_math(
        (r"\frac{1}{2}", r"\frac{1}{2}", 1),
        (r"\boxed{42}", "42", 1),
        ("{42}", "42", 1),
        (r"\frac{\sqrt{3}}{2}", r"\frac{\sqrt{3}}{2}", 1),
        (r"\sqrt{\frac{a}{b}}", r"\sqrt{\frac{a}{b}}", 1),
        (r"\left(\frac{1}{2},\frac{3}{4}\right)", r"(\frac12,\frac34)", 1),
        (r"x^{2^{n}}", r"x^{2^{n}}", 1),
    ),
    Golden("math", r"\fbox{7}", "7", 1, "boxes"),
    Golden("math", r"The set \(\{1\}\), so \boxed{\frac{7}{\sqrt{2}}}.", r"\frac{7}{\sqrt{2}}", 1),
]

FRACTIONS = _math(
    ("3/4", r"\frac{3}{4}", 1),
    ("0.75", "3/4", 1),
    (r"\dfrac{3}{4}", "3/4", 1),
    (r"\tfrac34", "0.75", 1),
    (".5", "1/2", 1),
    (r"-\frac{1}{2}", "-0.5", 1),
    (r"\frac{-1}{2}", "-1/2", 1),
    (r"1\frac{1}{2}", "3/2", 1),
    (r"-1\frac12", "-1.5", 1),
    ("3/4", "6/8", 1),
    ("6/8", "3/4", 0, "unevaluated"),
    (r"\frac{84}{2}", "42", 0, "unevaluated"),
    ("42/1", "42", 0, "unevaluated"),
    (r"\frac{3}{4}", "4/3", 0),
    (r"\frac{1}{0}", "0", 0),
    ("1/0", "42", 0),
    ("0.333", "1/3", 0),
    ("0.333333", "1/3", 0, "rounded"),
)

UNITS = _math(
    ("5 ms", "5 ms", 1),
    ("5ms", "5 ms", 1),
    (r"5\text{ ms}", "5 ms", 1),
    (r"5\,\mathrm{ms}", "5 ms", 1),
    ("5 milliseconds", "5 ms", 1, "units"),
    ("5 s", "5 ms", 0, "units"),
    ("5000 ms", "5 s", 0),
    ("5", "5 ms", 0, "units"),
    ("5 ms", "5", 0, "units"),
    (r"12\text{ cm}^2", "12 cm^2", 1, "units"),
    ("12 cm²", "12 cm^2", 1, "units"),
    (r"12 \text{ cm}", "12 m", 0, "units"),
    (r"90^\circ", r"90^{\circ}", 1),
    ("90 degrees", r"90^\circ", 1),
    ("90", r"90^\circ", 0, "units"),
    ("3 dB", "3 dBm", 0),
    (r"\$5", "5", 1),
    ("5 dollars", "5", 0),
    ("5 m 30 cm", "5.3 m", 0),
    ("10.0.0.0/24", "10.0.0.0/24", 1),
    ("1.0.0.10", "10.0.0.1", 0, "words"),
)

PERCENT = _math(
    (r"50\%", "50%", 1),
    ("50 percent", "50%", 1),
    ("12.5%", r"12.5\%", 1),
    ("50%", "0.5", 0, "percent"),
    ("50%", "50", 0, "percent"),
    ("0.5", "50%", 0, "percent"),
    ("50%", "5%", 0),
)

THOUSANDS = _math(
    ("1,000", "1000", 1),
    ("1{,}000", "1000", 1),
    (r"1\,000", "1000", 1, "separators"),
    ("1 000 000", "1000000", 1, "separators"),
    ("1\N{NARROW NO-BREAK SPACE}000", "1000", 1, "separators"),
    ("1,234.50", "1234.5", 1),
    ("1000", "1,000", 1),
    ("1,00", "100", 0),
    ("12,34", "1234", 0),
    ("1.000", "1000", 0),
    ("4 2", "42", 0),
    ("10,000", "1000", 0),
)

LATEX_TEXT = _math(
    (r"\text{42}", "42", 1),
    (r"\text{RRC}", "RRC", 1),
    (r"\textbf{Monday}", "Monday", 1),
    ("monday", "Monday", 0, "words"),
    ("RCR", "RRC", 0, "words"),
    (r"\text{yes}", "no", 0),
    (r"\text{The answer is }42", "42", 0),
    ("x=42", "42", 0, "unevaluated"),
    ("17+25", "42", 0, "unevaluated"),
    (r"6\times 7", "42", 0, "unevaluated"),
    (r"\sqrt{1764}", "42", 0, "unevaluated"),
    ("2^{10}", "1024", 0, "unevaluated"),
    (r"\log_2 8", "3", 0, "unevaluated"),
    ("042", "42", 1),
    ("+7", "7", 1),
    ("٤٢", "42", 0),
    ("42", "42.0", 1),
    ("43", "42", 0),
)

INTERVALS = _math(
    ("[1,2)", "[1, 2)", 1),
    ("(1,2)", "[1,2]", 0),
    ("(1,3)", "(1,2)", 0),
    (r"(-\infty, 3]", r"(-\infty,3]", 1),
    ("(-∞, 3]", r"(-\infty,3]", 1, "signs"),
    (r"[1,2]\cup[3,4]", r"[3,4]\cup[1,2]", 1),
    (r"[1,2]\cup[3,4]", r"[1,4]", 0),
    (r"\left[0,\frac12\right]", "[0,0.5]", 1),
)

SETS = _math(
    (r"\{1,2\}", r"\{2,1\}", 1),
    (r"\left\{1, 2\right\}", r"\{1,2\}", 1),
    (r"\{1,2\}", r"\{1,2,3\}", 0),
    (r"\{1,2\}", r"\{1,3\}", 0),
    ("1, 2", "1,2", 1),
    ("2,1", "1, 2", 1),
    ("1,3", "1,2", 0),
    ("(2,1)", "(1,2)", 0),
)

FORMULAS = _math(
    (r"\sqrt{8}", r"2\sqrt{2}", 1),
    (r"8\sqrt{2}", r"2\sqrt{2}", 0),
    ("$1+x$", "$x+1$", 1),
    ("(x+1)^2", "x^2+2x+1", 1),
    ("(x+1)^2", "x^2+1", 0),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}", 1),
    (r"\pi/2", r"\frac{\pi}{2}", 1),
    ("π/2", r"\frac{\pi}{2}", 1),
    ("6.28", r"2\pi", 0),
    ("y=2x+1", "y=1+2x", 1),
    ("2", "x=2", 1),
    ("3", "x=2", 0),
    ("3x", "3x", 1),
    ("2x+x", "$3x$", 1),
    ("-i", "$i$", 0),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", 1),
    (r"\int_0^1 2x\,dx + \sqrt{2}", r"1+\sqrt{2}", 0, "unevaluated"),
    (r"\sum_{k=1}^{2} k\sqrt{2}", r"3\sqrt{2}", 0, "unevaluated"),
    ("2i+3", "$3+2i$", 1),
)

MULTIPLE_BOXES = [
    Golden("math", r"\boxed{41}, no: \boxed{42}.", "42", 1, "boxes"),
    Golden("math", r"\boxed{42}, no: \boxed{41}.", "42", 0),
    Golden("math", r"x is \boxed{1} or \boxed{2}", r"\{1,2\}", 0, "boxes"),
    Golden("math", r"\boxed{42} \boxed{}", "42", 0),
    Golden("math", r"\boxed{42} and again \boxed{42}", "42", 1),
]

THINKING = [
    Golden("math", r"<think>maybe \boxed{41}</think>It is \boxed{42}.", "42", 1),
    Golden("math", r"<think>\boxed{42}</think>I do not know.", "42", 0, "thinking"),
    Golden("math", r"<think>it must be \boxed{42}", "42", 0, "thinking"),
    Golden("math", r"so \boxed{41}</think>\boxed{42}", "42", 1, "thinking"),
    Golden("math", r"\boxed{42} <think>or \boxed{43}", "42", 1, "thinking"),
    Golden("math", "<think>a</think>Answer: 7", "7", 1),
    Golden("math", "<think>a</think>\n\n**42**", "42", 1),
    Golden("math", "<think>Answer: 42</think>", "42", 0, "thinking"),
]

UNFINISHED = [
    Golden("math", r"\boxed{42", "42", 0),
    Golden("math", r"\boxed{41} then \boxed{42", "42", 0),
    Golden("math", r"\boxed{42} then \boxed{\frac{1}{", "42", 0),
    Golden("math", r"\boxed{\frac{1}{2}", "1/2", 0, "unfinished"),
    Golden("math", "Answer:", "42", 0),
    Golden("math", "The answer is", "42", 0),
    Golden("math", "", "42", 0),
    Golden("math", r"\boxed", "42", 0),
    Golden("math", "42 apples are left", "42", 0, "prose"),
]

UNICODE_MINUS = _math(
    ("\N{MINUS SIGN}3", "-3", 1),
    ("\N{EN DASH}3", "-3", 1, "signs"),
    ("\N{MINUS SIGN}\\frac{1}{2}", "-1/2", 1),
    ("x^2 \N{MINUS SIGN} 1", "x^2-1", 1),
    ("\N{MINUS SIGN}3", "3", 0),
    ("3", "\N{MINUS SIGN}3", 0),
)

SCIENTIFIC = _math(
    ("1e3", "1000", 1, "scientific"),
    ("1E3", "1000", 1),
    ("1.5e-3", "0.0015", 1, "scientific"),
    (r"3\times10^8", r"3 \times 10^{8}", 1),
    ("3e8", r"3\times 10^8", 1, "scientific"),
    ("3\N{MULTIPLICATION SIGN}10^8", r"3\times 10^8", 1),
    (r"1.6\cdot10^{-19}", r"1.6\times10^{-19}", 1),
    (r"3\times10^8", "300000000", 0, "unevaluated"),
    (r"3\times10^7", r"3\times10^8", 0),
    ("1e2", "1e3", 0),
)

ANSWER_LINES = [
    Golden("math", r"Answer: \boxed{}", "42", 0),
    Golden("math", r"Answer: \boxed{42}", "42", 1),
    Golden("math", r"\boxed{41}" "\nAnswer: 42", "42", 0),
    Golden("math", "Answer: 42", "42", 1),
    Golden("math", "answer: 7\nAnswer: 42", "42", 1),
    Golden("math", "Answer: 42\nAnswer: 41", "42", 0),
    Golden("math", "Final Answer: $42$.", "42", 1),
    Golden("math", "17 + 25 = 42.", "42", 1),
    Golden("math", "I get 1,234.5", "1234.5", 1),
    Golden("math", "Answer: the number 42", "42", 0, "prose"),
]

MARKDOWN = [
    Golden("math", "**Answer:** 42", "42", 1),
    Golden("math", "**Answer: 42**", "42", 1),
    Golden("math", "The answer is **42**.", "42", 1),
    Golden("math", r"**Answer**: \(42\)", "42", 1),
    Golden("math", r"\boxed{**42**}", "42", 1, "markdown"),
    Golden("math", "Answer: `42`", "42", 1, "markdown"),
    Golden("math", "### Answer\n\n42", "42", 1),
    Golden("math", "__Answer:__ __42__", "42", 1, "markdown"),
]

HUGE = _math(
    ("9^{9^{9^9}}", "42", 0),
    (r"9^{9^{9^9}}", r"\sqrt{2}", 0),
    ("9^9^9^9", r"\sqrt{2}", 0),
    (r"10^{100000}", r"\sqrt{2}", 0),
    (r"9^{99\cdot99\cdot99\cdot99}", r"\sqrt{2}", 0),
    (r"((((9^{99})^{9})^{9})^{9})^{9}", r"\sqrt{2}", 0),
    (r"(x+y+z+w)^{200}", "$x+y$", 0),
    (r"(x+y+z+w)^{99}(x-y)^{99}", "$x+y$", 0),
    ("10^9!", r"\sqrt{2}", 0),
    ("10!", "3628800", 0),
    ("1e999999", "42", 0),
    ("2^{999}", "2^{999}", 1),
    ("9" * 50, "9" * 50, 1),
    ("9" * 50 + ".1", "9" * 50, 0),
    ("1" * 5000, "7", 0),
    ("7", "1" * 5000, 0),
    (r"\exp(\exp(\exp(99)))", r"\sqrt{2}", 0),
)

HOSTILE = [
    Golden("math", r"\boxed{" + "{" * 10_000, "42", 0),
    Golden("math", r"\boxed{" * 10_000, "42", 0),
    Golden("math", r"\boxed{42}" + " " * 100_000, "42", 1),
    Golden("math", "answer " * 20_000, "42", 0),
    Golden("math", "Answer: " * 20_000, "42", 0),
    Golden("math", "\\" * 20_000, "42", 0),
    Golden("math", "7 " + " " * 100_000, "7", 1),
    Golden("math", "<think>" * 20_000 + r"\boxed{42}", "42", 0),
    Golden("math", "1" + ",000" * 20_000, "42", 0),
    *_math(
        ("(" * 90 + "1" + ")" * 90, r"\sqrt{2}", 0),
        (r"\sqrt{" * 25 + "2" + "}" * 25, r"\sqrt{2}", 0),
        (r"\frac{1}{" * 18 + "2" + "}" * 18, r"\sqrt{2}", 0),
        (r"\prod_{i=1}^{99} i", r"\sqrt{2}", 0),
        (r"\int_0^1 \sin(\cos(\tan(x^x)))dx", r"\sqrt{2}", 0),
        (r"\binom{99999}{50000}", r"\sqrt{2}", 0),
        (r"\lim_{x\to 0}\frac{\sin x}{x}", r"\frac{\pi}{\pi}+x", 0),
        ("__import__('os').system('true')", r"\sqrt{2}", 0),
        (r"\input{/etc/passwd}", r"\sqrt{2}", 0),
        ("\x00\x01\ud7ff", "42", 0),
        ("nan", "42", 0),
        ("inf", "42", 0),
        (r"\infty", "42", 0),
        ("\N{RIGHT-TO-LEFT OVERRIDE}24", "42", 0),
        (r"\frac{\frac{\frac{1}{0}}{0}}{0}", r"\sqrt{2}", 0),
        ("+".join(["x^9"] * 40), "$x$", 0),
        ("(x+1)" * 30, "$x$", 0),
        ("|" * 60, r"\sqrt{2}", 0),
        ("=" * 100, "$x=1$", 0),
        ("x_{1}" * 30, "$x_1$", 0),
    ),
]

DAPO = [
    Golden("dapo_math", "Answer: 34", "34", 1),
    Golden("dapo_math", "so\nAnswer: $34$", "34", 1),
    Golden("dapo_math", r"Answer: \boxed{34}", "34", 1),
    Golden("dapo_math", r"\boxed{34}", "34", 0, "no box without an Answer line"),
    Golden("dapo_math", "Answer: 34.0", "34", 0),
    Golden("dapo_math", "Answer: 34.", "34", 0),
    Golden("dapo_math", "Answer: $34$.", "34", 1),
    Golden("dapo_math", "**Answer:** 34", "34", 1, "markdown"),
    Golden("dapo_math", "**Answer: 34**", "34", 1, "markdown"),
    Golden("dapo_math", "answer : 34", "34", 1),
    Golden("dapo_math", "Answer: x = 34", "34", 1),
    Golden("dapo_math", "Answer: 17+25=42", "42", 1),
    Golden("dapo_math", "Answer: 17+25", "42", 0),
    Golden("dapo_math", "Answer: 1,234", "1234", 1),
    Golden("dapo_math", "Answer: 1{,}234", "1234", 1),
    Golden("dapo_math", "Answer: 34 degrees", "34", 1),
    Golden("dapo_math", r"Answer: 34^\circ", "34", 1),
    Golden("dapo_math", "Answer: 5 cm", "5", 1),
    Golden("dapo_math", "Answer: 3 hours", "3", 1),
    Golden("dapo_math", r"Answer: 42 \text{ m}", "42", 1),
    Golden("dapo_math", "Answer: $42$ apples", "42", 1),
    Golden("dapo_math", r"Answer: \text{42}", "42", 1),
    Golden("dapo_math", r"Answer: \frac12", r"\frac{1}{2}", 1),
    Golden("dapo_math", r"Answer: \sqrt2", r"\sqrt{2}", 1),
    Golden("dapo_math", r"Answer: \dfrac{1}{2}", r"\frac{1}{2}", 0),
    Golden("dapo_math", "Answer: 1/2", r"\frac{1}{2}", 0),
    Golden("dapo_math", "Answer: (1, 2)", "(1,2)", 1),
    Golden("dapo_math", 'Answer: "42"', "42", 1),
    Golden("dapo_math", r"Answer: 50\%", "50", 0),
    Golden("dapo_math", "Answer: -5", "-5", 1),
    Golden("dapo_math", "Answer: \N{MINUS SIGN}5", "-5", 0),
    Golden("dapo_math", "Answer: 41\nAnswer: 42", "42", 1),
    Golden("dapo_math", "Answer: 42\nAnswer: 41", "42", 0),
    Golden("dapo_math", "Answer: 42\n" + "x" * 200, "42", 1),
    Golden("dapo_math", "Answer: 42\n" + "x" * 300, "42", 0),
    Golden("dapo_math", "The answer is 42", "42", 0),
    Golden("dapo_math", "Answer:", "42", 0),
    Golden("dapo_math", "", "42", 0),
    Golden("dapo_math", "<think>Answer: 42</think>", "42", 0),
    Golden("dapo_math", "Answer: " + "$" * 290, "42", 0),
    Golden("dapo_math", "Answer: " + r"\boxed{" * 40, "42", 0),
    Golden("dapo_math", "Answer: " * 20_000, "42", 0),
]

BOXED = [
    Golden("boxed", r"\boxed{42}", "42", 1),
    Golden("boxed", r"\boxed{RRC}", "RRC", 1),
    Golden("boxed", r"\boxed{0.5}", "1/2", 1),
    Golden("boxed", r"\boxed{41}\boxed{42}", "42", 1),
    Golden("boxed", "Answer: 42", "42", 0),
    Golden("boxed", "42", "42", 0),
    Golden("boxed", r"\boxed{17+25}", "42", 0),
    Golden("boxed", r"\boxed{42", "42", 0),
    Golden("boxed", r"<think>\boxed{42}</think>", "42", 0),
]

GEO3K = [
    Golden("geo3k", r"<think>a</think>\boxed{42}", "42", 1.0),
    Golden("geo3k", r"\boxed{42}", "42", 0.9),
    Golden("geo3k", r"<think>a</think>\boxed{41}", "42", 0.1),
    Golden("geo3k", r"<think></think>\boxed{42}", "42", 0.9),
    Golden("geo3k", "<think>a</think>Answer: 42", "42", 0.0),
    Golden("geo3k", r"<think>\boxed{42}</think>", "42", 0.0),
    Golden("geo3k", "42", "42", 0.0),
]

FORMAT = [
    Golden("format", r"<think>a</think>\boxed{1}", "", 1),
    Golden("format", "<think>a</think>\nso\n" r"\boxed{1} it is", "", 1),
    Golden("format", r"<think>a</think>\boxed{}", "", 0),
    Golden("format", r"<think>a</think>\boxed{1", "", 0),
    Golden("format", r"<think> </think>\boxed{1}", "", 0),
    Golden("format", r"a<think>b</think>\boxed{1}", "", 0),
    Golden("format", r"<think>a</think><think>b</think>\boxed{1}", "", 0),
    Golden("format", "<think>" * 20_000, "", 0),
]

EXACT = [
    Golden("exact", " blue  whale\n", "blue whale", 1),
    Golden("exact", "Blue whale", "blue whale", 0),
    Golden("exact", "the blue whale", "blue whale", 0),
    Golden("exact", "<think>a fish?</think>blue whale", "blue whale", 1),
    Golden("exact", "7", 7, 1),
    Golden("exact", "True", True, 1),
    Golden("exact", "", "blue whale", 0),
]

NUMERIC = [
    Golden("numeric", "Answer: 5000 ms", "5 s", 1),
    Golden("numeric", "Answer: 5 s", "5 ms", 0),
    Golden("numeric", "Answer: 5", "5 s", 0),
    Golden("numeric", "Answer: 5", {"value": 5, "unit": "s", "unit_required": False}, 1),
    Golden("numeric", "Answer: 5 h", {"value": 5, "unit": "s", "unit_required": False}, 0),
    Golden("numeric", "The received level is -71.3 dBm.", LEVEL, 1),
    Golden("numeric", "The received level is \N{MINUS SIGN}71.3 dBm", LEVEL, 1),
    Golden("numeric", "It is **-71.39 dBm**", LEVEL, 1),
    Golden("numeric", "It is -71.5 dBm", LEVEL, 0),
    Golden("numeric", "It is -71.3 dB", LEVEL, 0),
    Golden("numeric", "It is 71.3 dBm", LEVEL, 0),
    Golden("numeric", r"\boxed{1.02}", {"value": 1.0, "relative": 0.02}, 1),
    Golden("numeric", r"\boxed{1.03}", {"value": 1.0, "relative": 0.02}, 0),
    Golden("numeric", "2.4 GHz", "2400 MHz", 1),
    Golden("numeric", "100 Mbps", "100 Mbit/s", 1),
    Golden("numeric", "Answer: 1,250 kbit/s", "1.25 Mbit/s", 1),
    Golden("numeric", "8 Mbit", "1 MB", 1),
    Golden("numeric", "8 Mbit/s", "1 MB", 0),
    Golden("numeric", "5 us", "5 µs", 1),
    Golden("numeric", r"\boxed{5\,\mu\text{s}}", "5 µs", 1),
    Golden("numeric", "50%", "50%", 1),
    Golden("numeric", "0.5", "50%", 0),
    Golden("numeric", r"\boxed{3\times10^8}", 300000000, 1),
    Golden("numeric", r"\boxed{3\times10^{8}\text{ m}}", "300000 km", 1),
    Golden("numeric", "about 1e3", "1000", 1),
    Golden("numeric", r"\boxed{17+25}", 42, 0),
    Golden("numeric", "nan", 42, 0),
    Golden("numeric", r"\boxed{1e99999}", 42, 0),
    Golden("numeric", "no idea", 42, 0),
    Golden("numeric", "<think>42</think>", 42, 0),
]

CHOICE = [
    Golden("choice", "B", "B", 1),
    Golden("choice", "(B)", "B", 1),
    Golden("choice", "The answer is B.", "B", 1),
    Golden("choice", "**B**", "B", 1),
    Golden("choice", r"\boxed{B}", "B", 1),
    Golden("choice", r"\boxed{\text{(B)}}", "B", 1),
    Golden("choice", "Answer: b", "B", 1),
    Golden("choice", "Answer: (D)", "D", 1),
    Golden("choice", "Answer: A or B", "B", 0),
    Golden("choice", "A, B", "B", 0),
    Golden("choice", "I choose C", "B", 0),
    Golden("choice", r"\boxed{E}", "B", 0),
    Golden("choice", r"\boxed{}", "B", 0),
    Golden("choice", "It is a dog", "G", 0),
    Golden("choice", "<think>B</think>", "B", 0),
    Golden("choice", "<think>A</think>B", "B", 1),
    Golden("choice", "Answer: B) Paris", PARIS, 1),
    Golden("choice", "Answer: B. paris", PARIS, 1),
    Golden("choice", "Answer: B) Rome", PARIS, 0),
    Golden("choice", "Answer: Paris", PARIS, 1),
    Golden("choice", "Answer: Rome", PARIS, 0),
    Golden("choice", "Answer: B", PARIS, 1),
]

JSON_CALL = [
    Golden("json_call", '{"name": "ping", "arguments": {"host": "10.0.0.1", "count": 3}}', CALL, 1),
    Golden("json_call", '{"arguments": {"count": 3.0, "host": "10.0.0.1"}, "name": "ping"}', CALL, 1),
    Golden("json_call", 'I call\n```json\n{"name":"ping","arguments":{"host":"10.0.0.1","count":3}}\n```', CALL, 1),
    Golden(
        "json_call", '<tool_call>{"name": "ping", "arguments": "{\\"host\\": \\"10.0.0.1\\", \\"count\\": 3}"}', CALL, 1
    ),
    Golden("json_call", '{"name": "ping", "arguments": {"host": "10.0.0.1", "count": 4}}', CALL, 0),
    Golden("json_call", '{"name": "ping", "arguments": {"host": "10.0.0.1", "count": "3"}}', CALL, 0),
    Golden("json_call", '{"name": "ping", "arguments": {"host": "10.0.0.1"}}', CALL, 0),
    Golden("json_call", '{"name": "ping", "arguments": {"host": "10.0.0.1", "count": 3, "ttl": 1}}', CALL, 0),
    Golden("json_call", '{"name": "pong", "arguments": {"host": "10.0.0.1", "count": 3}}', CALL, 0),
    Golden("json_call", '{"name": "ping", "arguments": {"host": "10.0.0.1", "count": 3}', CALL, 0),
    Golden("json_call", '{"name": "ping", "name": "ping", "arguments": {"host": "10.0.0.1", "count": 3}}', CALL, 0),
    Golden("json_call", '<think>{"name": "ping", "arguments": {"host": "10.0.0.1", "count": 3}}</think>', CALL, 0),
    Golden("json_call", '{"name": "a", "arguments": {}} {"name": "b", "arguments": {}}', {"name": "b"}, 0),
    Golden("json_call", '[{"name": "a"}, {"name": "b", "arguments": {}}]', [{"name": "a"}, {"name": "b"}], 1),
    Golden("json_call", '{"name": "b"} {"name": "a"}', [{"name": "a"}, {"name": "b"}], 0),
    Golden("json_call", '{"name": "on", "arguments": {"led": 1}}', {"name": "on", "arguments": {"led": True}}, 0),
    Golden("json_call", '{"name": "x", "arguments": {"v": NaN}}', {"name": "x", "arguments": {"v": None}}, 0),
    Golden("json_call", "ping 10.0.0.1 three times", CALL, 0),
    Golden("json_call", '{"a":' * 20_000, CALL, 0),
    Golden("json_call", '{"name": "x", "arguments": {"v": ' + "[" * 9_000, CALL, 0),
]

MAZES = [
    Golden("maze", "a1b1b2", None, 1, prompt=MAZE),
    Golden("maze", "a1a2a1b1b2", None, 1, prompt=MAZE),
    Golden("maze", "a1a2b2", None, 0, prompt=MAZE),
    Golden("maze", "b1b2", None, 0, prompt=MAZE),
    Golden("maze", "a1b1", None, 0, prompt=MAZE),
    Golden("maze", "", None, 0, prompt=MAZE),
]

GOLDEN = [
    *NESTED_BRACES, *FRACTIONS, *UNITS, *PERCENT, *THOUSANDS, *LATEX_TEXT, *INTERVALS, *SETS, *FORMULAS,
    *MULTIPLE_BOXES, *THINKING, *UNFINISHED, *UNICODE_MINUS, *SCIENTIFIC, *ANSWER_LINES, *MARKDOWN, *HUGE, *HOSTILE,
    *DAPO, *BOXED, *GEO3K, *FORMAT, *EXACT, *NUMERIC, *CHOICE, *JSON_CALL, *MAZES,
]  # fmt: skip
