"""The exposition, read by a parser of the text format 0.0.4 that is written from its description alone."""

import asyncio
import math
import re
from dataclasses import dataclass, field

import httpx
import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.control.server import control_app
from forebay.telemetry.prometheus import exposition
from tests.unit.test_control_unit import STEPS, StubFleet, build

NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
FATES = ("trained", "filtered", "stale", "failed")


@dataclass
class Metric:
    """One metric family; `values` by its sorted labels."""

    kind: str = ""
    help: str = ""
    values: dict[tuple[tuple[str, str], ...], float] = field(default_factory=dict)

    @property
    def value(self):
        (value,) = self.values.values()
        return value

    def by(self, label):
        return {dict(labels)[label]: value for labels, value in self.values.items()}


def parse(text):
    """Metric families by name. Fails on whatever the format forbids."""
    assert text.endswith("\n")
    families, current = {}, ""
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            _, _, current, words = line.split(" ", 3)
            assert current not in families  # all lines of a metric form one group
            families[current] = Metric(help=_unescape(words, {"\\": "\\", "n": "\n"}))
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name == current
            assert not families[name].kind
            assert not families[name].values  # the type comes before the first sample
            assert kind in ("counter", "gauge", "histogram", "summary", "untyped")
            families[name].kind = kind
        else:
            name, labels, value = _sample(line)
            assert name == current
            assert labels not in families[name].values
            families[name].values[labels] = value
    return families


def _sample(line):
    name = NAME.match(line)[0]
    rest, labels = line[len(name) :], []
    if rest.startswith("{"):
        rest = rest[1:]
        while not rest.startswith("}"):
            label = LABEL.match(rest)[0]
            quoted = re.match(r'="((?:[^"\\\n]|\\["\\n])*)"(,|(?=}))', rest[len(label) :])
            labels.append((label, _unescape(quoted[1], {"\\": "\\", "n": "\n", '"': '"'})))
            rest = rest[len(label) + quoted.end() :]
        rest = rest[1:]
    assert re.fullmatch(r" \S+", rest)
    assert len(dict(labels)) == len(labels)
    return name, tuple(sorted(labels)), float(rest)


def _unescape(text, meanings):
    out, characters = [], iter(text)
    for character in characters:
        out.append(meanings[next(characters)] if character == "\\" else character)
    return "".join(out)


def make_status(**changes):
    fates = {"admitted": 15, "trained": 8, "filtered": 3, "stale": 1, "failed": 0, "in_flight": 3}
    verdicts = {"right": 40, "timed_out": 2}
    numbers = {"step": 2, "steps": 60, "version": 2, "queued": 1, "generating": 2, "credits": 1.75}
    return numbers | {"training_step": None, "engines": {0: 2, 1: 1}, "fates": fates, "verdicts": verdicts} | changes


def test_every_number_is_there_with_its_type():
    metrics = parse(exposition(make_status()))
    assert metrics["forebay_groups_total"].by("fate") == {"trained": 8, "filtered": 3, "stale": 1, "failed": 0}
    assert metrics["forebay_engine_version"].by("engine") == {"0": 2, "1": 1}
    assert metrics["forebay_responses_total"].by("verdict") == {"right": 40, "timed_out": 2}
    single = {name: m.value for name, m in metrics.items() if () in m.values}
    assert single == {
        "forebay_groups_admitted_total": 15,
        "forebay_groups_in_flight": 3,
        "forebay_generating_groups": 2,
        "forebay_queued_groups": 1,
        "forebay_credits_batches": 1.75,
        "forebay_step": 2,
        "forebay_steps": 60,
        "forebay_version": 2,
    }
    for name, metric in metrics.items():
        assert metric.kind == ("counter" if name.endswith("_total") else "gauge")
        assert metric.help


@given(st.text(st.characters(codec="utf-8")), st.floats(allow_nan=False))
def test_any_text_and_any_number_survive(text, number):
    metrics = parse(exposition(make_status(engines={text: 7}, credits=number)))
    assert metrics["forebay_engine_version"].by("engine") == {text: 7}
    assert metrics["forebay_credits_batches"].value == number


def test_not_a_number_is_a_value_too():
    assert math.isnan(parse(exposition(make_status(credits=math.nan)))["forebay_credits_batches"].value)


def test_scraped_in_every_state_of_a_run_the_fates_add_up(tmp_path):
    """Over HTTP, with the token only; engines that are lost leave the list."""
    unit = build(tmp_path, StubFleet(2))

    async def scrape(client):
        answer = await client.get("/v1/metrics")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        metrics = parse(answer.text)
        fates = metrics["forebay_groups_total"].by("fate")
        assert set(fates) == set(FATES)
        in_flight = metrics["forebay_groups_in_flight"].value
        assert metrics["forebay_groups_admitted_total"].value == sum(fates.values()) + in_flight
        assert metrics["forebay_generating_groups"].value + metrics["forebay_queued_groups"].value <= in_flight
        return metrics

    async def go():
        transport = httpx.ASGITransport(control_app(unit, "secret"))
        async with httpx.AsyncClient(transport=transport, base_url="http://cu") as client:
            assert (await client.get("/v1/metrics")).status_code == 401
            client.headers["authorization"] = "Bearer secret"
            assert (await scrape(client))["forebay_groups_admitted_total"].value == 0
            running = asyncio.create_task(unit.run(lambda: None))
            await asyncio.sleep(0)
            assert (await scrape(client))["forebay_groups_in_flight"].value > 0
            for step in range(1, STEPS + 1):
                await client.post("/v1/batches/next", content=msgpack.packb({"step": step}))
                await scrape(client)
                report = msgpack.packb(dict(step=step, train_wait_s=0.1, train_s=0.1, publish_s=0.0, metrics={}))
                assert (await client.post("/v1/steps", content=report)).status_code == 200
                snapshot = msgpack.packb(dict(version=step, path="x", manifest_sha256="0" * 64))
                assert (await client.post("/v1/snapshots", content=snapshot)).status_code == 200
                metrics = await scrape(client)
                assert (metrics["forebay_step"].value, metrics["forebay_version"].value) == (step, step)
            await asyncio.wait_for(running, 5)
            unit.controller.engine_lost(1)
            metrics = await scrape(client)
            assert set(metrics["forebay_engine_version"].by("engine")) == {"0"}
            # The fourth prompt of the stub's data cannot be scored.
            assert metrics["forebay_groups_total"].by("fate") == {"trained": 20, "filtered": 0, "stale": 0, "failed": 1}

    asyncio.run(go())


def test_a_parser_that_accepts_anything_would_prove_nothing():
    for broken in (
        "a 1",
        "# HELP a b\n# TYPE a gauge\na 1\na 2\n",
        "# HELP a b\na 1\n# TYPE a gauge\n",
        '# HELP a b\na{x="y"z"} 1\n',
        "# HELP a b\na\n",
    ):
        with pytest.raises((AssertionError, TypeError, ValueError, KeyError)):
            parse(broken)
