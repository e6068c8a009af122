"""Telecom families `ipv4` and `ipv6`: subnetting.

Invariants:
- Arithmetic is on integers; networks are written as RFC 4632 (IPv4) and RFC 5952 (IPv6) say.
- A subnet's usable hosts are its addresses less network and broadcast address (RFC 1812, 4.2.2.11, 5.3.5).
"""

import random

from forebay.data.question import Question, answered

_PRIVATE = ((0x0A000000, 8), (0xAC100000, 12), (0xC0A80000, 16))
"""RFC 1918."""
_DOCUMENTATION = 0x20010DB8
"""RFC 3849: 2001:db8::/32."""


def dotted(address: int) -> str:
    return ".".join(str(address >> shift & 255) for shift in (24, 16, 8, 0))


def network(address: int, prefix: int, bits: int = 32) -> int:
    """The address with all bits behind the prefix at 0 (RFC 4632, 3.1)."""
    return address >> (bits - prefix) << (bits - prefix)


def prefix_for(hosts: int) -> int:
    """The longest IPv4 prefix whose subnet has so many usable addresses: 2^(32 - p) - 2 >= hosts."""
    prefix = 30
    while 2 ** (32 - prefix) - 2 < hosts:
        prefix -= 1
    return prefix


def common_prefix(first: int, last: int, bits: int = 32) -> int:
    """Length of the longest prefix that both addresses share."""
    return bits - (first ^ last).bit_length()


def colons(address: int) -> str:
    """RFC 5952: lower case, no leading zeros, `::` for the longest run (the first of equals) of two or more zeros."""
    groups = [address >> shift & 0xFFFF for shift in range(112, -1, -16)]
    start, length = 0, 1
    for at in range(8):
        run = next((end for end in range(at, 8) if groups[end]), 8) - at
        if run > length:
            start, length = at, run
    texts = [f"{group:x}" for group in groups]
    if length < 2:
        return ":".join(texts)
    return ":".join(texts[:start]) + "::" + ":".join(texts[start + length :])


def draw_ipv4(rng: random.Random, difficulty: int) -> Question:
    """1: network or broadcast address; 2: the smallest subnet for so many hosts; 3: the shortest aggregate."""
    tags = ("family:ipv4", f"difficulty:{difficulty}")
    address = _private(rng)
    if difficulty == 1:
        prefix = rng.randint(20, 30)
        base = network(address, prefix)
        if rng.random() < 0.5:
            prompt = f"What is the broadcast address of the subnet that contains {dotted(address)}/{prefix}?"
            answer = dotted(base + 2 ** (32 - prefix) - 1)
        else:
            prompt = f"What is the network address of the subnet that contains {dotted(address)}/{prefix}?"
            answer = dotted(base)
        work = f"Blocks of {2 ** (32 - prefix)} addresses"
        return Question(f"{prompt} Give the address alone.", answer, "address", tags, answered(work, answer))
    if difficulty == 2:
        hosts = rng.randint(2, 4000)
        prefix = prefix_for(hosts)
        answer = f"{dotted(network(address, prefix))}/{prefix}"
        prompt = (
            f"Which is the smallest IPv4 subnet that contains {dotted(address)} and has at least {hosts} usable host "
            "addresses (without network and broadcast address)? Give it as network/prefix."
        )
        work = f"2^{32 - prefix} - 2 = {2 ** (32 - prefix) - 2} >= {hosts}"
        return Question(prompt, answer, "address", tags, answered(work, answer))
    prefix = rng.randint(22, 27)
    base, size = network(address, prefix - rng.randint(2, 4)), 2 ** (32 - prefix)
    count = network(address, prefix) - base
    blocks = sorted({base + size * rng.randrange(max(2, count // size + 2)) for _ in range(rng.randint(2, 5))})
    if len(blocks) < 2:
        return draw_ipv4(rng, difficulty)
    shared = common_prefix(blocks[0], blocks[-1] + size - 1)
    answer = f"{dotted(network(blocks[0], shared))}/{shared}"
    rng.shuffle(blocks)
    prompt = (
        f"Routes {', '.join(f'{dotted(block)}/{prefix}' for block in blocks)} are to be announced as one aggregate. "
        "Which is the longest prefix that covers all of them? Give it as network/prefix."
    )
    return Question(prompt, answer, "address", tags, answered(f"The first {shared} bits agree", answer))


def draw_ipv6(rng: random.Random, difficulty: int) -> Question:
    """1: how many subnets; 2: the n-th subnet; 3: the prefix that an interface's address is in, short form."""
    tags = ("family:ipv6", f"difficulty:{difficulty}")
    if difficulty == 1:
        outer, inner = rng.randint(28, 56), rng.choice((56, 60, 62, 64))
        if not 0 < inner - outer <= 24:
            return draw_ipv6(rng, difficulty)
        base = network(_documented(rng), max(outer, 32), 128)
        outer = max(outer, 32)
        count = 2 ** (inner - outer)
        prompt = f"How many /{inner} prefixes can be delegated out of {colons(base)}/{outer}? Give the number."
        return Question(prompt, count, "numeric", tags, answered(f"2^({inner} - {outer})", count))
    if difficulty == 2:
        outer, inner = rng.choice((32, 36, 40, 44, 48)), rng.choice((48, 52, 56, 60, 64))
        if inner - outer < 4:
            return draw_ipv6(rng, difficulty)
        base = network(_documented(rng), outer, 128)
        index = rng.randrange(1, min(2 ** (inner - outer), 5000))
        answer = f"{colons(base + (index << (128 - inner)))}/{inner}"
        prompt = (
            f"{colons(base)}/{outer} is cut into /{inner} prefixes, numbered from 0 in ascending order. Which one has "
            f"number {index}? Give it as prefix/length."
        )
        work = f"{index} is {index:x} in hexadecimal, shifted by {128 - inner} bits"
        return Question(prompt, answer, "address", tags, answered(work, answer))
    prefix = rng.choice((36, 40, 44, 48, 52, 56, 57, 58, 60, 61, 62, 63, 64))
    address = _documented(rng)
    full = ":".join(f"{address >> shift & 0xFFFF:04x}" for shift in range(112, -1, -16))
    answer = f"{colons(network(address, prefix, 128))}/{prefix}"
    prompt = f"Which /{prefix} prefix contains the address {full}? Give it in short form, as prefix/length."
    return Question(prompt, answer, "address", tags, answered("", answer))


def _private(rng: random.Random) -> int:
    base, prefix = rng.choice(_PRIVATE)
    return base + rng.randrange(1, 2 ** (32 - prefix) - 1)


def _documented(rng: random.Random) -> int:
    return _DOCUMENTATION << 96 | rng.getrandbits(96)
