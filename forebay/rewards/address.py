"""Verifier for IPv4 and IPv6 addresses and networks.

Invariants:
- Any spelling of the same address is right (RFC 4291); a network's prefix must be the same, and its host bits 0.
- The last box, `Answer:` line counts, as everywhere; without either, the response's last word.
"""

import ipaddress
from typing import Any

from forebay.rewards.extract import final_answer, visible
from forebay.rewards.judgement import Judgement, right, wrong
from forebay.rewards.numbers import plain

Address = ipaddress.IPv4Address | ipaddress.IPv6Address | ipaddress.IPv4Network | ipaddress.IPv6Network


def score(response: str, answer: Any, prompt: str) -> Judgement:
    """`answer`: text such as 10.0.0.1, 10.0.0.0/24, 2001:db8::/48. Raises `TypeError` or `ValueError`."""
    if not isinstance(answer, str):
        raise TypeError(f"reward address needs text, not {type(answer).__name__}")
    expected = _read(answer)
    found = final_answer(response)
    if found.rule in ("boxed", "answer_line"):
        if found.problem:
            return wrong(found.problem)
        text = plain(found.text)
    else:
        text = (visible(response).split() or [""])[-1].strip("*_`.")
    try:
        given = _read(text)
    except ValueError:
        return wrong(f"{text[:60]!r} is no address or network")
    return right(f"{given}, as the reference") if given == expected else wrong(f"{given} is not {expected}")


def _read(text: str) -> Address:
    return ipaddress.ip_network(text, strict=True) if "/" in text else ipaddress.ip_address(text)
