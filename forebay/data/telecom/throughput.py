"""Telecom family `throughput`: data rates of LTE and NR.

Invariants:
- NR rates follow TS 38.306, 4.1.2 (one slot format, all symbols downlink or uplink, scaling factor said in the
  question); resource blocks are those of TS 38.101-1 and -2, table 5.3.2-1, MCS those of TS 38.214, table 5.1.3.1-2.
- LTE rates are counted in resource elements (TS 36.211: 12 subcarriers, 14 symbols a millisecond with normal cyclic
  prefix), less the overhead that the question states.
- An answer is right within 0.5 %.
"""

import random

from forebay.data.question import Question, answered, quantity

NR_BLOCKS = {
    (15, 5): 25, (15, 10): 52, (15, 15): 79, (15, 20): 106, (15, 40): 216, (15, 50): 270,
    (30, 10): 24, (30, 20): 51, (30, 40): 106, (30, 50): 133, (30, 60): 162, (30, 80): 217, (30, 100): 273,
    (120, 50): 32, (120, 100): 66, (120, 200): 132, (120, 400): 264,
}  # fmt: skip
"""(Subcarrier spacing in kHz, bandwidth in MHz) -> resource blocks; 120 kHz: FR2."""
LTE_BLOCKS = {1.4: 6, 3: 15, 5: 25, 10: 50, 15: 75, 20: 100}
"""Bandwidth in MHz -> resource blocks (TS 36.101, table 5.6-1)."""
OVERHEAD = {("FR1", "downlink"): 0.14, ("FR2", "downlink"): 0.18, ("FR1", "uplink"): 0.08, ("FR2", "uplink"): 0.10}
MODULATIONS = {2: "QPSK", 4: "16QAM", 6: "64QAM", 8: "256QAM"}
MCS = (
    (2, 120), (2, 193), (2, 308), (2, 449), (2, 602), (4, 378), (4, 434), (4, 490), (4, 553), (4, 616), (4, 658),
    (6, 466), (6, 517), (6, 567), (6, 616), (6, 666), (6, 719), (6, 772), (6, 822), (6, 873), (8, 682.5), (8, 711),
    (8, 754), (8, 797), (8, 841), (8, 885), (8, 916.5), (8, 948),
)  # fmt: skip
"""Index -> (bits a symbol, 1024 times the code rate)."""
_WITHIN = 0.005


def nr_rate(
    layers: int, bits: int, rate: float, blocks: int, spacing_khz: int, overhead: float, scaling: float
) -> float:
    """Mbit/s of one carrier: 1e-6 v Qm f R (12 N_PRB / T_s) (1 - OH), T_s = 1e-3 / (14 * 2^mu) s (TS 38.306, 4.1.2)."""
    symbols_per_s = 14 * 1000 * spacing_khz / 15
    return 1e-6 * layers * bits * scaling * rate * 12 * blocks * symbols_per_s * (1 - overhead)


def lte_rate(layers: int, bits: int, rate: float, blocks: int, overhead: float) -> float:
    """Mbit/s: layers x bits x code rate x 12 x 14 x 1000 x blocks, less the overhead."""
    return 1e-6 * layers * bits * rate * 12 * 14 * 1000 * blocks * (1 - overhead)


def draw_throughput(rng: random.Random, difficulty: int) -> Question:
    """1: LTE, everything given; 2: NR with resource blocks given; 3: NR, MCS table row and carrier aggregation."""
    return (_lte, _nr, _aggregated)[difficulty - 1](rng, f"difficulty:{difficulty}")


def _lte(rng: random.Random, difficulty: str) -> Question:
    width, blocks = rng.choice(list(LTE_BLOCKS.items()))
    layers, bits, rate, overhead = (
        rng.choice((1, 2, 4)),
        rng.choice((2, 4, 6, 8)),
        rng.randint(20, 93),
        rng.randint(10, 30),
    )
    prompt = (
        f"LTE downlink, {width:g} MHz ({blocks} resource blocks of 12 subcarriers), 14 symbols per ms, "
        f"{MODULATIONS[bits]}, code rate {rate / 100:g}, {layers} layers, {overhead} % of all resource elements are "
        "overhead. What is the physical-layer data rate in Mbit/s, within 0.5 %?"
    )
    return _asked(prompt, lte_rate(layers, bits, rate / 100, blocks, overhead / 100), difficulty)


def _nr(rng: random.Random, difficulty: str) -> Question:
    (spacing, width), blocks = rng.choice(list(NR_BLOCKS.items()))
    layers, (bits, rate), scaling = rng.choice((1, 2, 4)), rng.choice(MCS), rng.choice((1, 1, 0.8, 0.75, 0.4))
    way = rng.choice(("downlink", "uplink"))
    overhead = OVERHEAD[_range(spacing), way]
    prompt = (
        f"NR {way} in {_range(spacing)}, {width} MHz with {spacing} kHz subcarrier spacing ({blocks} resource blocks), "
        f"{MODULATIONS[bits]}, code rate {rate:g}/1024, {layers} layers, scaling factor {scaling:g}, overhead "
        f"{overhead:g}, all symbols {way}. What is the data rate by the formula of TS 38.306, 4.1.2, in Mbit/s, within "
        "0.5 %?"
    )
    return _asked(prompt, nr_rate(layers, bits, rate / 1024, blocks, spacing, overhead, scaling), difficulty)


def _aggregated(rng: random.Random, difficulty: str) -> Question:
    total, carriers = 0.0, []
    for number, ((spacing, width), blocks) in enumerate(rng.sample(list(NR_BLOCKS.items()), 2), 1):
        layers, index = rng.choice((1, 2, 4)), rng.randrange(len(MCS))
        bits, rate = MCS[index]
        overhead = OVERHEAD[_range(spacing), "downlink"]
        total += nr_rate(layers, bits, rate / 1024, blocks, spacing, overhead, 1)
        carriers.append(
            f"carrier {number}: {_range(spacing)}, {width} MHz, {spacing} kHz subcarrier spacing, {layers} layers, "
            f"MCS {index} of TS 38.214, table 5.1.3.1-2"
        )
    prompt = (
        f"NR downlink with two aggregated carriers; {'; '.join(carriers)}. All symbols are downlink, scaling factor 1, "
        "overhead as in TS 38.306, 4.1.2, which also has the formula. What is the total data rate in Mbit/s, within "
        "0.5 %?"
    )
    return _asked(prompt, total, difficulty)


def _range(spacing: int) -> str:
    return "FR2" if spacing == 120 else "FR1"


def _asked(prompt: str, rate: float, difficulty: str) -> Question:
    answer = quantity(round(rate, 6), "Mbit/s", 0.0, _WITHIN)
    return Question(prompt, answer, "numeric", ("family:throughput", difficulty), answered("", f"{rate:.3f} Mbit/s"))
