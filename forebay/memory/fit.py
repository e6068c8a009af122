"""Whether a profile fits the devices that it names, and if not, what would.

Invariants:
- Advice is computed, not written: each setting that is named was estimated and fits.
- A built-in model without `hardware.device_memory_gib` is taken for a run on CPUs: its devices' memory is the host's.
- The least change comes first: the same ranks without offloading, then with it, then more ranks.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from forebay.config import RunConfig
from forebay.errors import UserError
from forebay.memory.architecture import Architecture, parse_size
from forebay.memory.built_in import BUILT_IN, model_of
from forebay.memory.engines import engine_devices, engines_memory, kv_tokens, parallel_sizes
from forebay.memory.items import GIB, FleetMemory, gib
from forebay.memory.trainer import recomputes, trainer_memory

MORE_RANKS = (2, 4, 8, 16, 32, 64)
SUGGESTIONS = 3


@dataclass(frozen=True)
class DryRun:
    """The estimate for a profile."""

    fleets: tuple[FleetMemory, FleetMemory]
    """Trainer and engines."""
    problems: tuple[str, ...]
    """One line for each thing that does not fit, with what would."""


def dry_run(config: RunConfig) -> DryRun:
    """Raises `UserError` if the model's sizes are not known."""
    a = model_of(config)
    trainer, engines = trainer_memory(config, a), engines_memory(config, a)
    problems = [*_count(config, trainer, engines), *_cache(config, a)]
    if on_cpu(config):
        problems += _cpu(config, trainer, engines)
    else:
        problems += [*_trainer(config, a, trainer), *_engines(config, a, engines)]
    return DryRun((trainer, engines), tuple(problems))


def check(result: DryRun) -> None:
    """Raises `UserError`, one line for each problem."""
    if result.problems:
        raise UserError("\n".join(result.problems))


def verdict(config: RunConfig, result: DryRun) -> str:
    """For a profile that fits."""
    device = room(config)
    if on_cpu(config):
        here = " and on this machine" if config.hardware.host_memory_gib is None else ""
        return (
            f"fits: trainer and engines {gib(_together(*result.fleets))} of the {gib(cpu_memory(config))} GiB of CPU "
            f"memory that they share, beside what their programs take (assumed: a run on CPUs{here}, since "
            "hardware.device_memory_gib is not set)"
        )
    if device is None:
        return "hardware.device_memory_gib is not set: nothing to compare with"
    shares = " and ".join(f"{fleet.name} {fleet.device / device:.0%}" for fleet in result.fleets)
    return f"fits: {shares} of the {gib(device)} GiB of each device beside the reserve"


def room(config: RunConfig) -> float | None:
    """Bytes of a device that a fleet may use; None: unknown."""
    memory = config.hardware.device_memory_gib
    return None if memory is None else (memory - config.hardware.reserve_gib) * GIB


def on_cpu(config: RunConfig) -> bool:
    """Whether the profile is taken for one of a run on CPUs."""
    return config.model.path.startswith(BUILT_IN) and config.hardware.device_memory_gib is None


def cpu_memory(config: RunConfig) -> float:
    """Bytes of the host, or of this machine if the profile names none."""
    host = config.hardware.host_memory_gib
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if host is None else host * GIB


def _together(*fleets: FleetMemory) -> float:
    """Bytes of all on one host whose memory is the devices'."""
    return sum(fleet.devices * fleet.device + fleet.host for fleet in fleets)


def _cpu(config: RunConfig, trainer: FleetMemory, engines: FleetMemory) -> Iterator[str]:
    needed, there = _together(trainer, engines), cpu_memory(config)
    if needed > there:
        fleets = f"trainer {gib(_together(trainer))}, engines {gib(_together(engines))}"
        yield (
            f"trainer and engines do not fit: {gib(needed)} GiB ({fleets}) of {gib(there)} GiB of CPU memory; lower "
            "generation.engines, generation.kv_cache or training.micro_batch_tokens"
        )


def _count(config: RunConfig, trainer: FleetMemory, engines: FleetMemory) -> Iterator[str]:
    wanted, there = trainer.devices + engines.devices, config.hardware.devices
    if there is not None and wanted > there:
        yield (
            f"training.ranks ({trainer.devices}) and generation.engines ({config.generation.engines}, each of "
            f"{engine_devices(config)}) need {wanted} devices, hardware.devices is {there}: lower one of them"
        )


def _trainer(config: RunConfig, a: Architecture, memory: FleetMemory) -> Iterator[str]:
    if not _too_large(config, memory):
        return
    wanted = ", or ".join(_advice(config, a)) or _otherwise(config, memory)
    yield f"the trainer does not fit: {_short(config, memory)}; what fits: {wanted}"


def _cache(config: RunConfig, a: Architecture) -> Iterator[str]:
    tokens, most = kv_tokens(config, a), config.model.max_model_len
    if tokens < most:
        yield (
            f"generation.kv_cache ({config.generation.kv_cache}) holds {tokens:,} tokens, less than one sequence of "
            f"model.max_model_len ({most:,}): raise it"
        )


def _engines(config: RunConfig, a: Architecture, memory: FleetMemory) -> Iterator[str]:
    if not _too_large(config, memory):
        return
    wanted = ", or ".join(_engine_advice(config, a, memory)) or _otherwise(config, memory)
    yield f"the engines do not fit: {_short(config, memory)}; what fits: {wanted}"


def _too_large(config: RunConfig, memory: FleetMemory) -> bool:
    device, host = room(config), config.hardware.host_memory_gib
    return (device is not None and memory.device > device) or (host is not None and memory.host > host * GIB)


def _short(config: RunConfig, memory: FleetMemory) -> str:
    """What is needed, what is there."""
    device, host = room(config), config.hardware.host_memory_gib
    if device is not None and memory.device > device:
        largest = max(memory.items, key=lambda item: item.device)
        return (
            f"{gib(memory.device)} GiB on each of {memory.devices} devices, which have {gib(device)} GiB beside the "
            f"reserve, most of it {largest.name} ({gib(largest.device)})"
        )
    assert host is not None, "one of the two is too small"
    largest = max(memory.items, key=lambda item: item.host)
    return f"{gib(memory.host)} GiB on a host of {host:,.1f} GiB, most of it {largest.name} ({gib(largest.host)})"


def _otherwise(config: RunConfig, memory: FleetMemory) -> str:
    """Where no setting helps."""
    device, host = room(config), config.hardware.host_memory_gib
    larger = []
    if device is not None and memory.device > device:
        larger.append(f"hardware.device_memory_gib={math.ceil(memory.device / GIB + config.hardware.reserve_gib)}")
    if host is not None and memory.host > host * GIB:
        larger.append(f"hardware.host_memory_gib={math.ceil(memory.host / GIB)}")
    return f"devices with {' and '.join(larger)}, or a smaller model"


def _advice(config: RunConfig, a: Architecture) -> list[str]:
    """Settings with which the trainer fits, by how much they change; none of them has another of the list in it."""
    found: list[dict[str, Any]] = []
    for changes in _changes(config, a):
        if any(kept.items() <= _least(changes).items() for kept in found):
            continue
        changed = _changed(config, changes)
        if changed is not None and not _too_large(changed, trainer_memory(changed, a)):
            found.append(changes)
        if len(found) == SUGGESTIONS:
            break
    return [" and ".join(f"training.{key}={_text(value)}" for key, value in changes.items()) for changes in found]


def _least(changes: dict[str, Any]) -> dict[str, Any]:
    """The same with less offloaded."""
    return changes | {"offload": "optimizer"} if changes.get("offload") == "all" else changes


def _changes(config: RunConfig, a: Architecture) -> Iterator[dict[str, Any]]:
    training = config.training
    stages: list[dict[str, Any]] = [{}]
    if training.backend == "deepspeed":
        stages += [{"zero_stage": stage} for stage in range(max(training.zero_stage + 1, 2), 4)]
    again = [{}] if recomputes(config, a) else [{}, {"activation_checkpointing": True}]
    offloads: list[dict[str, Any]] = [{}]
    offloads += [{"offload": kind} for kind in ("optimizer", "all") if training.offload == "none" or kind == "all"]
    least = config.model.max_model_len
    smaller = [{}] if training.micro_batch_tokens <= least else [{}, {"micro_batch_tokens": least}]
    plain = [stage | more | less for stage in stages for more in again for less in smaller]
    yield from (changes for changes in plain if changes)
    yield from (changes | offload for offload in offloads if offload for changes in plain)
    for times in MORE_RANKS:
        yield from (changes | {"ranks": times * training.ranks} for changes in plain)


def _changed(config: RunConfig, changes: dict[str, Any]) -> RunConfig | None:
    """None if the profile's checks forbid it."""
    values = config.model_dump()
    values["training"] |= changes
    try:
        return RunConfig.model_validate(values)
    except ValidationError:
        return None


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _engine_advice(config: RunConfig, a: Architecture, memory: FleetMemory) -> Iterator[str]:
    """A smaller cache that still holds one sequence; more tensor-parallel ranks; fewer engines."""

    def fits(**changes: Any) -> bool:
        changed = _with_engines(config, **changes)
        holds = kv_tokens(changed, a) >= config.model.max_model_len
        return holds and not _too_large(changed, engines_memory(changed, a))

    if (device := room(config)) is not None:
        cache = parse_size(config.generation.kv_cache)
        left = int((device - memory.device + cache) // GIB)
        if 0 < left * GIB < cache and fits(kv_cache=f"{left}G"):
            yield f"generation.kv_cache={left}G"
    tensor, _ = parallel_sizes(config)
    for times in MORE_RANKS:
        if a.heads % (tensor * times):
            break
        if fits(extra_args=[*config.generation.extra_args, "--tensor-parallel-size", str(tensor * times)]):
            yield f"--tensor-parallel-size {tensor * times} in generation.extra_args"
            break
    engines = next((n for n in range(config.generation.engines - 1, 0, -1) if fits(engines=n)), 0)
    if engines:
        yield f"generation.engines={engines}"


def _with_engines(config: RunConfig, **changes: Any) -> RunConfig:
    return config.model_copy(update={"generation": config.generation.model_copy(update=changes)})
