"""The telecom task: every family against its verifier, and its arithmetic against independent calculations."""

import ipaddress
import json
import math
import random
import re
from fractions import Fraction
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.config import DataConfig
from forebay.config.tasks import TelecomFamily
from forebay.data.builtin import draw_splits
from forebay.data.question import Question
from forebay.data.telecom import EASY_WORDS, FAMILIES
from forebay.data.telecom.addressing import colons, common_prefix, network, prefix_for
from forebay.data.telecom.manual import sections
from forebay.data.telecom.radio import free_space_loss_db, report_at
from forebay.data.telecom.throughput import MCS, lte_rate, nr_rate
from forebay.data.telecom.timers import failure_ms
from forebay.data.telecom.traffic import blocking, late, waiting
from forebay.rewards.judgement import Judgement
from forebay.rewards.verifier import load_verifier
from forebay.training.tiny_model import make_tokenizer

ALL = [(family, difficulty) for family in FAMILIES for difficulty in (1, 2, 3)]


def drawn(family: str, difficulty: int, seed: int) -> Question:
    return FAMILIES[family](random.Random(seed), difficulty)


def judged(question: Question, response: str) -> Judgement:
    judgement = load_verifier(question.verifier).function(response, question.answer, question.prompt)
    assert isinstance(judgement, Judgement)
    return judgement


def wrong_answers(question: Question) -> list[str]:
    """Answers near the right one, of the same form."""
    answer = question.answer
    if question.verifier == "numeric":
        spec = answer if isinstance(answer, dict) else {"value": answer, "unit": "", "tolerance": 0, "relative": 0}
        value, unit = spec["value"], spec["unit"]
        off = 1.2 * (spec["tolerance"] + spec["relative"] * abs(value)) or 1
        wrong = [f"{value + off:.6f} {unit}", f"{value - off:.6f} {unit}", f"{value:.6f} K", f"{value:.6f} + 0 {unit}"]
        return wrong + ([f"{value:.6f}"] if unit else [])
    if question.verifier == "address":
        text = str(answer)
        number = text.partition("/")
        near = str(ipaddress.ip_address(number[0]) + 1)
        return [near, near + "".join(number[1:]), number[0] if number[1] else f"{text}/24", "the first one"]
    if question.verifier == "json_call":
        calls = answer if isinstance(answer, list) else [answer]
        key = next(iter(calls[0]["arguments"]))
        less = {"name": calls[0]["name"], "arguments": {k: v for k, v in calls[0]["arguments"].items() if k != key}}
        other = {"name": "other", "arguments": calls[0]["arguments"]}
        return [json.dumps(less), json.dumps(other), json.dumps([*calls, calls[0]]), str(calls)]
    assert question.verifier == "math"
    return [f"{answer}x", f"not {answer}", str(answer)[:-1] or "-", "N99"]


@pytest.mark.parametrize(("family", "difficulty"), ALL)
def test_each_question_takes_its_answer_and_refuses_others(family: str, difficulty: int) -> None:
    for seed in range(150):
        question = drawn(family, difficulty, seed)
        assert question == drawn(family, difficulty, seed), "the same generator gives the same question"
        assert question.tags == (f"family:{family}", f"difficulty:{difficulty}")
        assert json.loads(json.dumps(question.answer)) == question.answer
        assert judged(question, question.solution).verdict == "right", question
        for answer in ("", "Answer:", *(f"Answer: {wrong}" for wrong in wrong_answers(question))):
            assert judged(question, answer).verdict == "wrong", (question, answer)
        unit = question.answer.get("unit") if isinstance(question.answer, dict) else ""
        if unit:
            assert unit in question.prompt, "a question says in which unit"


def test_the_settings_name_all_families() -> None:
    assert set(get_args(TelecomFamily)) == set(FAMILIES) == set(DataConfig().telecom.families)
    assert len(FAMILIES) >= 8


def test_a_drawn_set_has_all_families_and_difficulties_and_no_prompt_twice() -> None:
    data = DataConfig(source="builtin:telecom", train_prompts=600, validation_prompts=50, test_prompts=150)
    splits = draw_splits(data, 1)
    prompts = [draft.prompt_id for drafts in splits.values() for draft in drafts]
    assert len(set(prompts)) == len(prompts) == 800
    tags = {tag for draft in splits["train"] for tag in draft.tags}
    assert tags == {*(f"family:{family}" for family in FAMILIES), "difficulty:1", "difficulty:2", "difficulty:3"}
    assert all(draft.verifier for draft in splits["train"])
    few = DataConfig.model_validate(
        {
            "source": "builtin:telecom",
            "train_prompts": 20,
            "validation_prompts": 2,
            "test_prompts": 8,
            "telecom": {"families": {"ipv4": 1}, "difficulty": {2: 1}},
        }
    )
    assert {draft.tags for draft in draw_splits(few, 0)["train"]} == {("family:ipv4", "difficulty:2")}


# ---- the arithmetic


@given(st.integers(1, 120), st.integers(1, 60))
def test_erlang_b_is_the_closed_form(tenths: int, servers: int) -> None:
    traffic = Fraction(tenths, 10)
    terms = [traffic**k / math.factorial(k) for k in range(servers + 1)]
    assert blocking(float(traffic), servers) == pytest.approx(float(terms[-1] / sum(terms)), rel=1e-12)


@given(st.integers(1, 120), st.integers(1, 40))
def test_erlang_c_is_the_closed_form(tenths: int, servers: int) -> None:
    traffic = Fraction(tenths, 10)
    if servers <= traffic:
        assert waiting(float(traffic), servers) == 1.0
        return
    last = traffic**servers / math.factorial(servers) * servers / (servers - traffic)
    rest = sum(traffic**k / math.factorial(k) for k in range(servers))
    assert waiting(float(traffic), servers) == pytest.approx(float(last / (rest + last)), rel=1e-12)


def test_erlang_values_of_the_published_tables() -> None:
    assert blocking(4.461, 10) == pytest.approx(0.01, abs=2e-5)  # Erlang B table: 10 channels, 1 %
    assert blocking(13.182, 20) == pytest.approx(0.02, abs=2e-5)  # 20 channels, 2 %
    # A textbook's call centre: 100 calls in half an hour, 180 s each, 11 agents, 20 s.
    assert waiting(10, 11) == pytest.approx(0.6821, abs=1e-4)
    assert 1 - late(10, 14, 20, 180) == pytest.approx(0.888, abs=1e-3)


def test_smallest_numbers_of_servers_are_the_smallest() -> None:
    for seed in range(60):
        for family, probability in (("erlang_b", blocking), ("erlang_c", late)):
            question = drawn(family, 3, seed)
            calls, seconds = map(int, re.search(r"(\d+) calls per hour.*?(\d+) s\b", question.prompt).groups())  # type: ignore[union-attr]
            erlang, servers = calls * seconds / 3600, question.answer
            if probability is blocking:
                target = float(re.search(r"at most ([\d.]+) %", question.prompt)[1]) / 100  # type: ignore[index]
                values = [blocking(erlang, n) for n in (servers, servers - 1)]
            else:
                share, limit = re.search(r"at least ([\d.]+) % of callers wait (\d+) s", question.prompt).groups()  # type: ignore[union-attr]
                target = 1 - float(share) / 100
                values = [late(erlang, n, int(limit), seconds) for n in (servers, servers - 1)]
            assert values[0] < target < values[1]


@given(st.integers(0, 2**32 - 1), st.integers(0, 32))
def test_ipv4_networks_are_those_of_ipaddress(address: int, prefix: int) -> None:
    expected = ipaddress.ip_network((address, prefix), strict=False)
    assert network(address, prefix) == int(expected.network_address)


@given(st.integers(0, 2**128 - 1), st.integers(0, 2**128 - 1))
def test_ipv6_texts_are_those_of_ipaddress(address: int, mask: int) -> None:
    for value in (address, address & mask, address & ~0xFFFF0000FFFF, address & 0xFFFF << 32, address >> 90, 0):
        assert colons(value) == str(ipaddress.IPv6Address(value))


@settings(max_examples=50)
@given(st.integers(2, 100_000))
def test_the_smallest_subnet_is_the_smallest(hosts: int) -> None:
    prefix = prefix_for(hosts)
    usable = [len(range(1, ipaddress.ip_network(f"0.0.0.0/{p}").num_addresses - 1)) for p in (prefix, prefix + 1)]
    assert usable[0] >= hosts
    assert usable[1] < hosts or prefix == 30


def test_subnet_answers_by_ipaddress_alone() -> None:
    for seed in range(80):
        easy, hosts, routes = (drawn("ipv4", difficulty, seed) for difficulty in (1, 2, 3))
        inside = ipaddress.ip_interface(re.search(r"[\d.]+/\d+", easy.prompt)[0]).network  # type: ignore[index]
        assert easy.answer == str(
            inside.broadcast_address if "broadcast" in easy.prompt[:30] else inside.network_address
        )
        one, needed = re.search(r"contains ([\d.]+) and has at least (\d+)", hosts.prompt).groups()  # type: ignore[union-attr]
        found = ipaddress.ip_network(hosts.answer)
        assert ipaddress.ip_address(one) in found
        assert found.num_addresses - 2 >= int(needed)
        assert found.prefixlen == 30 or found.num_addresses / 2 - 2 < int(needed)
        parts = [ipaddress.IPv4Network(text) for text in re.findall(r"[\d.]+/\d+", routes.prompt)]
        whole = ipaddress.IPv4Network(routes.answer)
        assert all(part.subnet_of(whole) for part in parts)
        assert any(not part.subnet_of(half) for half in [next(whole.subnets())] for part in parts)
        assert any(not part.subnet_of(half) for half in [list(whole.subnets())[1]] for part in parts)


def test_ipv6_answers_by_ipaddress_alone() -> None:
    for seed in range(80):
        many, numbered, inside = (drawn("ipv6", difficulty, seed) for difficulty in (1, 2, 3))
        inner, outer = re.search(r"How many /(\d+) prefixes .* of ([\da-f:]+/\d+)", many.prompt).groups()  # type: ignore[union-attr]
        prefix = ipaddress.IPv6Network(outer)
        assert many.answer == prefix.num_addresses // 2 ** (128 - int(inner))
        outer, inner, index = re.search(
            r"([\da-f:]+/\d+) is cut into /(\d+) .* number (\d+)\?", numbered.prompt
        ).groups()  # type: ignore[union-attr]
        step = 2 ** (128 - int(inner))
        first = ipaddress.IPv6Network(outer)
        assert numbered.answer == f"{first.network_address + int(index) * step}/{inner}"
        assert ipaddress.IPv6Network(numbered.answer).subnet_of(first)
        length, address = re.search(r"Which /(\d+) .* address ([\da-f:]+)\?", inside.prompt).groups()  # type: ignore[union-attr]
        assert inside.answer == str(ipaddress.ip_interface(f"{address}/{length}").network)


def test_common_prefix_of_one_address_is_all_of_it() -> None:
    assert common_prefix(5, 5) == 32
    assert common_prefix(0, 2**32 - 1) == 0


def test_free_space_loss_of_a_hand_worked_link() -> None:
    assert free_space_loss_db(1000, 1) == pytest.approx(92.44)
    # 4 pi d f / c, squared: 2600 MHz over 2 km.
    assert free_space_loss_db(2600, 2) == pytest.approx(
        20 * math.log10(4 * math.pi * 2000 * 2.6e9 / 299_792_458), abs=0.02
    )


def test_link_budgets_by_adding_up_what_the_prompt_says() -> None:
    for seed in range(80):
        chain, link = drawn("link_budget", 1, seed), drawn("link_budget", 2, seed)
        terms = [int(term) for term in re.findall(r"([+-]?\d+) dBm?;", chain.prompt)]
        assert chain.answer["value"] == sum(terms)
        numbers = [float(number) for number in re.findall(r"(-?[\d.]+) dB", link.prompt)]
        level = numbers[0] + numbers[1] + numbers[2] - sum(numbers[3:])
        assert link.answer["value"] == pytest.approx(level)


def test_data_rates_of_published_examples() -> None:
    # FR1, 100 MHz at 30 kHz, 4 layers, 256QAM, 948/1024: the 2.34 Gbit/s that data sheets give.
    assert nr_rate(4, 8, 948 / 1024, 273, 30, 0.14, 1) == pytest.approx(2337.0, abs=0.5)
    # FR2, 400 MHz at 120 kHz, 2 layers, 64QAM.
    expected = 1e-6 * 2 * 6 * 948 / 1024 * 264 * 12 / (1e-3 / (14 * 8)) * (1 - 0.18)
    assert nr_rate(2, 6, 948 / 1024, 264, 120, 0.18, 1) == pytest.approx(expected)
    # LTE: 100 blocks, one layer, 64QAM, all of it: 100.8 Mbit/s.
    assert lte_rate(1, 6, 1, 100, 0) == pytest.approx(100.8)
    efficiency = [bits * rate for bits, rate in MCS]
    assert efficiency == sorted(efficiency), "a higher index carries more"
    assert len(MCS) == 28


def test_event_a3_is_reported_after_an_unbroken_run() -> None:
    assert report_at([5, 5, 1, 5, 5, 5], 3, 3) == 6
    assert report_at([4, 4], 3.5, 2) == 2
    assert report_at([3, 3, 3], 3, 2) is None, "the condition is strict"


def test_handover_times_by_searching_windows() -> None:
    for seed in range(80):
        question = drawn("handover", 1, seed)
        samples = [int(value) for value in re.findall(r"#\d+ ([+-]\d+) dB", question.prompt)]
        threshold, run = map(int, re.search(r"threshold (\d+) dB; (\d+) in a row", question.prompt).groups())  # type: ignore[union-attr]
        ends = [end for end in range(run, len(samples) + 1) if min(samples[end - run : end]) > threshold]
        assert question.answer["value"] == 40 * ends[0]


def test_radio_link_failure_of_hand_worked_sequences() -> None:
    out, into = ["out"], ["in"]
    assert failure_ms(out * 3, 3, 1, 100, 20) == 160, "T310 starts at 60 ms and runs on"
    assert failure_ms(out * 2, 3, 1, 100, 20) == 0
    assert failure_ms(out * 3 + into, 3, 1, 100, 20) == 0, "one in-sync stops it"
    assert failure_ms(out * 3 + into + out * 9, 3, 2, 100, 20) == 160, "one of two does not"
    assert failure_ms(out * 3 + into * 2 + out * 3, 3, 2, 100, 20) == 260, "it starts again at 160 ms"
    assert failure_ms(out * 2 + into + out * 2, 3, 1, 100, 20) == 0, "the out-of-syncs must follow each other"
    assert failure_ms(out * 3 + out * 4 + into, 3, 1, 100, 20) == 160, "at the time of expiry is too late"


def test_alarm_roots_by_walking_up_the_prompt() -> None:
    for difficulty in (1, 2, 3):
        steps = []
        for seed in range(100):
            question = drawn("alarm", difficulty, seed)
            feeder = dict(re.findall(r"(\w+) is fed by (\w+);", question.prompt))
            alarms = set(re.findall(r"(\w+) is in alarm;", question.prompt))
            at = re.search(r"The alarm on (\w+) is", question.prompt)[1]  # type: ignore[index]
            assert at in alarms
            walked = 0
            while feeder[at] in alarms:
                at, walked = feeder[at], walked + 1
            assert question.answer == at
            steps.append(walked)
        assert len(set(steps)) > 2


def test_every_fact_of_the_manual_is_read_and_unique() -> None:
    entries = sections()
    assert {kind: len(found) for kind, found in entries.items()} == {"alarm": 36, "parameter": 30, "team": 5}
    for field in ("code", "name"):
        values = [fields[field] for _, fields in entries["alarm"]]
        assert len(set(values)) == len(values)
    assert len({(f["name"], f["area"]) for _, f in entries["parameter"]}) == 30
    assert {f["team"] for _, f in entries["alarm"]} == {f["team"] for _, f in entries["team"]}


def test_what_a_manual_question_needs_is_quoted() -> None:
    for difficulty in (1, 2, 3):
        for seed in range(60):
            question = drawn("manual", difficulty, seed)
            excerpt = question.prompt.partition("Question:")[0]
            answer = question.answer if not isinstance(question.answer, dict) else f"{question.answer['value']:g}"
            if "after the alarm" not in question.prompt:
                assert str(answer) in excerpt


@pytest.mark.parametrize("family", EASY_WORDS)
def test_easy_questions_consist_of_their_words(family: str) -> None:
    tokenizer = make_tokenizer(["\nAnswer: ", *EASY_WORDS[family]])
    for seed in range(300):
        question = drawn(family, 1, seed)
        for text in (question.prompt, question.solution, question.hasty):
            encoded = tokenizer.encode(text)
            assert 0 not in encoded.ids, text
            assert tokenizer.decode(encoded.ids) == text
            assert len(encoded.ids) < 48


@pytest.mark.parametrize("family", EASY_WORDS)
def test_hasty_solutions_are_mostly_wrong_but_no_nonsense(family: str) -> None:
    verdicts = [judged(question, question.hasty) for question in (drawn(family, 1, seed) for seed in range(300))]
    right = sum(judgement.verdict == "right" for judgement in verdicts) / len(verdicts)
    assert 0.1 < right < 0.75
