"""The command line: exit codes, one line for each failure, and no heavy import before a command needs it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import forebay.doctor
import forebay.errors
from forebay import __version__, cli
from forebay.config import RunConfig, load_profile

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = str(ROOT / "profiles" / "quickstart_cpu.yaml")
SUMMARY: dict[str, Any] = {
    "run_id": "demo-1",
    "status": "completed",
    "mode": "fully_async",
    "wall_s": 201.4,
    "evaluation": {"n": 512, "before": 0.3515625, "after": 0.78125, "p_value": 1.2e-30},
    "step_time_s": 1.234,
    "train_wait_ratio": 0.256,
    "tokens_per_s": 4321.0,
    "staleness": {"bound": 4.0, "mean": 1.25, "p95": 2.0, "max": 2.0},
    "refresh": {
        "mode": "in_place",
        "count": 60,
        "pause_mean_s": 0.0121,
        "pause_max_s": 0.03,
        "pause_share_of_step": 0.0098,
        "tokens_recomputed": 1500,
        "tokens_discarded": 0,
    },
    "engines": {"restarts": 1, "idle_ratio": 0.25, "each": [{"idle_ratio": 0.5}, {"idle_ratio": 0.0}]},
    "trainer": {"restarts": 0},
    "fates": {"trained": 940, "filtered": 20},
}

invoke = CliRunner().invoke


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """A pipeline that notes its configuration and returns `SUMMARY`; nothing is checked before it."""
    import flows.local

    seen: list[RunConfig] = []

    def run_pipeline(config: RunConfig) -> dict[str, Any]:
        seen.append(config)
        return SUMMARY

    monkeypatch.setattr(flows.local, "run_pipeline", run_pipeline)
    monkeypatch.setattr(forebay.doctor, "preflight", lambda config: None)
    return seen


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def preflight(config: RunConfig) -> None:
        raise error

    monkeypatch.setattr(forebay.doctor, "preflight", preflight)


def test_run_hands_the_overridden_profile_on_and_shows_the_summary(pipeline: list[RunConfig]) -> None:
    result = invoke(cli.app, ["run", QUICKSTART, "--set", "training.steps=3", "--set", "mode=sync"])
    assert result.exit_code == 0, result.output
    assert [(config.training.steps, config.mode) for config in pipeline] == [(3, "sync")]
    words = " ".join(result.output.split())
    for shown in ("0.352 -> 0.781 on 512", "1.2e-30", "1.23 s median", "26%", "95% 2, max 2, bound", "940 trained"):
        assert shown in words
    assert "60 x in_place, pause 12 ms (1.0% of a step); tokens: 1,500 recomputed, 0 discarded" in words
    assert "engines idle 25% (50%, 0%)" in words
    assert "engines 1, trainer 0" in words
    assert "runs/demo-1/report.png" in words


def test_what_a_run_did_not_measure_is_a_dash() -> None:
    bare: dict[str, Any] = dict.fromkeys(SUMMARY) | {"run_id": "r", "status": "failed", "mode": "sync"}
    rows = dict(cli.summary_rows(bare, "s3://bucket/prefix/"))
    assert rows["p-value"] == rows["waiting for data"] == rows["groups"] == rows["weight refresh"] == "-"
    assert rows["restarts"] == rows["engines idle"] == "-"
    assert rows["accuracy"] == "- -> - on - held-out prompts"
    assert rows["summary"] == "s3://bucket/prefix/r/summary.json"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (forebay.errors.UserError("a: wrong\nb: wrong"), 2, "forebay: a: wrong\nforebay: b: wrong"),
        (forebay.errors.DeadlineError("engine 0 did not start in 5 s"), 1, "forebay: engine 0 did not start in 5 s"),
        (KeyboardInterrupt(), 130, "forebay: interrupted"),
    ],
)
def test_an_expected_failure_is_one_line_and_a_code(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, line: str
) -> None:
    fail_with(monkeypatch, error)
    result = invoke(cli.app, ["run", QUICKSTART])
    assert (result.exit_code, result.stderr.strip(), result.stdout) == (code, line, "")


def test_a_missing_package_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, ModuleNotFoundError("No module named 'vllm.entrypoints'", name="vllm.entrypoints"))
    result = invoke(cli.app, ["run", QUICKSTART])
    assert result.exit_code == 2
    assert result.stderr.startswith("forebay: vllm is not installed: run `make install`")


def test_a_missing_module_of_our_own_is_a_bug_and_stays_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, ModuleNotFoundError("No module named 'forebay.gone'", name="forebay.gone"))
    result = invoke(cli.app, ["run", QUICKSTART])
    assert isinstance(result.exception, ModuleNotFoundError)


def test_run_refuses_a_wrong_profile_before_any_check(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, AssertionError("checked"))
    result = invoke(cli.app, ["run", QUICKSTART, "--set", "training.stepz=3"])
    assert (result.exit_code, result.stderr.strip().endswith("did you mean steps?")) == (2, True)


def test_usage_mistakes_exit_with_2() -> None:
    for arguments in (["run"], ["walk"], ["run", QUICKSTART, "--fast"], ["doctor", "--set", "seed=1"]):
        assert invoke(cli.app, arguments).exit_code == 2, arguments


def test_config_prints_a_profile_that_loads_as_the_same(tmp_path: Path) -> None:
    result = invoke(cli.app, ["config", QUICKSTART, "--set", "seed=7"])
    assert result.exit_code == 0
    (tmp_path / "resolved.yaml").write_text(result.stdout)
    assert load_profile(tmp_path / "resolved.yaml") == load_profile(QUICKSTART, ["seed=7"])
    assert yaml.safe_load(result.stdout)["generation"]["engines"] == 1


def test_doctor_shows_every_check_and_exits_with_1_only_for_what_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    fine = forebay.doctor.Check("store", True, "is here", "never shown")
    note = forebay.doctor.Check("cores", False, "1 usable", "slow", error=None)
    bad = forebay.doctor.Check("vLLM", False, "[red]absent", "install it")
    for checks, code in (([fine, note], 0), ([fine, note, bad], 1)):
        monkeypatch.setattr(forebay.doctor, "examine", lambda config, checks=checks: checks)
        result = invoke(cli.app, ["doctor", QUICKSTART])
        assert result.exit_code == code
        assert "never shown" not in result.output
        assert "note" in result.output
    assert "[red]absent" in result.output


def test_version() -> None:
    assert invoke(cli.app, ["--version"]).output.strip() == f"forebay {__version__}"


def test_the_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from forebay.cli import main; sys.argv = ['forebay', '--help']\n"
        "try: main()\nexcept SystemExit as end: print(end.code)\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    *help_text, exit_code, modules = done.stdout.splitlines()
    assert exit_code == "0"
    assert any("doctor" in line for line in help_text)
    assert not set(modules.split()) & {"torch", "vllm", "prefect", "numpy", "pydantic", "transformers", "pyarrow"}


def test_the_installed_script_reports_a_missing_profile(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("forebay")
    done = subprocess.run([script, "run", "none.yaml"], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "forebay: none.yaml: no such profile\n"


def test_guard_keeps_unexpected_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, ZeroDivisionError("bug"))
    assert isinstance(invoke(cli.app, ["run", QUICKSTART]).exception, ZeroDivisionError)


def test_evaluate_needs_a_models_manifest(tmp_path: Path) -> None:
    profile = Path(__file__).parents[2] / "profiles/quickstart_cpu.yaml"
    result = CliRunner().invoke(cli.app, ["evaluate", str(profile), "--model", str(tmp_path)])
    assert result.exit_code == 2
    assert result.stderr == f"forebay: --model {tmp_path}: no manifest.json there; name the folder `model` of a run\n"


def test_a_deadline_that_no_simulated_group_keeps_is_the_users_to_raise() -> None:
    refused = invoke(cli.app, ["simulate", QUICKSTART, "--set", "control.group_deadline_s=0.1"])
    assert refused.exit_code == 2
    told = refused.stderr.splitlines()[-1]
    assert told.endswith("simulation: no group is generated within control.group_deadline_s (0.1 s): raise it")
