"""Profiles: what is accepted, and the one line that each mistake gets."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from forebay.config import RunConfig, load_profile, parse_config
from forebay.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
PROFILES = sorted(ROOT.glob("profiles/*.yaml"))


def refusal(tmp_path: Path, text: str, overrides: tuple[str, ...] = ()) -> str:
    profile = tmp_path / "p.yaml"
    profile.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_profile(profile, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value).replace(str(profile), "p.yaml")


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_every_committed_profile_is_valid_and_named_after_its_file(profile: Path) -> None:
    assert load_profile(profile).name == profile.stem


def test_an_empty_profile_is_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("# nothing\n")
    assert load_profile(tmp_path / "p.yaml") == RunConfig()


def test_overrides_are_yaml_and_the_last_one_wins(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("training:\n  steps: 5\nlaunch:\n")
    overrides = ["training.steps=7", "training.steps=8", "training.learning_rate=1e-3", "mode=sync"]
    overrides += ["launch.pin=false", "data.maze.sizes={3: 1, 4: 2}", "generation.extra_args=[--max-logprobs, '1']"]
    config = load_profile(tmp_path / "p.yaml", overrides)
    assert (config.training.steps, config.training.learning_rate, config.mode) == (8, 1e-3, "sync")
    assert config.launch.pin is False
    assert config.data.maze.sizes == {3: 1.0, 4: 2.0}
    assert config.generation.extra_args == ["--max-logprobs", "1"]


def test_a_resolved_profile_loads_as_itself() -> None:
    config = parse_config({"name": "x", "data": {"maze": {"sizes": {3: 1}}}}, where="test")
    assert parse_config(yaml.safe_load(yaml.safe_dump(config.model_dump())), where="test") == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training:\n  step: 5\n", "p.yaml: training.step: unknown key; did you mean steps?"),
        ("trainer: {}\n", "p.yaml: trainer: unknown key; did you mean training?"),
        (
            "launch:\n  zzz: 5\n",
            "p.yaml: launch.zzz: unknown key; known here: host, pin, pin_api_servers, trainer_cores",
        ),
        ("model:\n  warm_start:\n    step: 1\n", "p.yaml: model.warm_start.step: unknown key; did you mean steps?"),
        ("training:\n  steps: 0\n", "p.yaml: training.steps: input should be greater than 0 (got 0)"),
        ("training: 5\n", "p.yaml: training: is a section: write keys under it, or leave it out (got 5)"),
        ("training:\n", "p.yaml: training: is a section: write keys under it, or leave it out (got None)"),
        (
            "mode: async\n",
            "p.yaml: mode: input should be 'sync', 'one_step_off' or 'fully_async' (got 'async')",
        ),
        (
            "control:\n  max_staleness: .inf\n",
            "p.yaml: control.max_staleness: input should be a finite number (got inf)",
        ),
        ("name: ../x\n", "p.yaml: name: string should match pattern"),
        ("- a\n", "p.yaml: a profile is a mapping of keys, not a list"),
        ("a: [1\n", "p.yaml: not valid YAML ("),
        ("seed: 1\nname: x\nseed: 2\n", "p.yaml: not valid YAML (line 3: key 'seed' stands here a second time)"),
        (
            "training:\n  steps: 1\n  steps: 2\n",
            "p.yaml: not valid YAML (line 3: key 'steps' stands here a second time)",
        ),
        ("training: !!python/object/apply:os.getcwd []\n", "p.yaml: not valid YAML ("),
        ("control:\n  port: 65536\n", "p.yaml: control.port: input should be less than or equal to 65535 (got 65536)"),
        ("storage:\n  uri: ftp://x\n", "p.yaml: storage.uri: write file://DIR or s3://BUCKET/PREFIX (got 'ftp://x')"),
        ("control:\n  work_in_progress: x\n", "p.yaml: control.work_in_progress: input should be a valid number"),
        (
            "generation:\n  extra_args: [--host, a]\n",
            "p.yaml: generation.extra_args: --host is for Forebay to give: set l",
        ),
        (
            "generation:\n  extra_args: [--por=9]\n",
            "p.yaml: generation.extra_args: --por is for Forebay to give: set g",
        ),
        (
            "generation:\n  kv_cache: 0M\n",
            "p.yaml: generation.kv_cache: write a size, for example 512M or 4G (got '0M')",
        ),
        ("training:\n  betas: [5, 0.9]\n", "p.yaml: training.betas.0: input should be less than 1 (got 5)"),
        ("name: 2026-13-45\n", "p.yaml: not valid YAML (month must be in 1..12)"),
        ("training:\n  steps: {{ steps }}\n", "p.yaml: not valid YAML (line 2: {'steps': None} is no key)"),
        ("? [a, b]\n: 1\n", "p.yaml: not valid YAML (line 1: ['a', 'b'] is no key)"),
        (f"training: {'[' * 5000}\n", "p.yaml: not valid YAML ("),
        (f"seed: {'1' * 5000}\n", "p.yaml: not valid YAML ("),
        ("data:\n  maze:\n    sizes: {}\n", "p.yaml: data.maze.sizes: give at least one side length, each from 2 to 8"),
    ],
)
def test_a_mistake_gets_one_line_that_names_the_key(tmp_path: Path, text: str, message: str) -> None:
    said = refusal(tmp_path, text)
    assert said.startswith(message)
    assert "\n" not in said


@pytest.mark.parametrize("key", ["storage.uri", "storage.endpoint_url"])
def test_credentials_in_a_uri_are_refused_and_not_repeated(key: str) -> None:
    for uri in ("s3://id:hush@bucket/x", "s3://id:hu/sh@bucket/x"):
        with pytest.raises(UserError, match="no credentials in a URI") as caught:
            load_profile(None, [f"{key}={uri}"])
        assert "id:" not in str(caught.value)
        assert "sh@" not in str(caught.value)


@pytest.mark.parametrize("key", ["data.source", "data.test_source"])
def test_credentials_in_a_source_are_refused_and_not_repeated(key: str) -> None:
    for uri in ("s3://id:hush@bucket/x", "s3://id:hu/sh@bucket/x", "s3://hush@bucket/x"):
        with pytest.raises(UserError, match="no credentials in a URI") as caught:
            load_profile(None, [f"{key}={uri}"])
        assert "id:" not in str(caught.value)
        assert "sh@" not in str(caught.value)
    load_profile(None, ["data.source=s3://bucket/a@b.jsonl"])


def test_every_mistake_is_told_at_once(tmp_path: Path) -> None:
    said = refusal(tmp_path, "seed: x\ntraining:\n  steps: -1\n").splitlines()
    assert [line.split(": ")[1] for line in said] == ["seed", "training.steps"]


def test_a_long_value_is_cut(tmp_path: Path) -> None:
    assert len(refusal(tmp_path, f"training: {'x' * 5000}\n")) < 200


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("generation:\n  max_new_tokens: 256\n", "leaves no room for a prompt in model.max_model_len (256)"),
        ("schedule:\n  policy: asp\n  minibatch_slack: 4\n", "schedule.minibatch_slack (4) must be less than"),
        ("control:\n  batch_groups: 3\n", "a minibatch may have 4 prompts but control.batch_groups is 3"),
        (
            "schedule:\n  policy: asp\ncontrol:\n  batch_groups: 4\n",
            "a minibatch may have 5 prompts but control.batch_groups is 4",
        ),
        ("schedule:\n  window: 3\n", "schedule.window (3) holds no minibatch"),
        ("mode: sync\nschedule:\n  minibatch_barrier: true\n", "sends prompts one by one"),
        ("lengths:\n  predictor: history\n", "lengths.predictor history needs lengths.history"),
        ("mode: sync\ntraining:\n  streaming: true\n", "but mode sync trains whole batches"),
        (
            "algorithm:\n  advantage: gae\ntraining:\n  streaming: true\n",
            "algorithm.advantage gae needs the whole batch",
        ),
        (
            "training:\n  updates_per_batch: 2\n  streaming: true\n",
            "training.updates_per_batch 2 needs the whole batch",
        ),
        ("training:\n  mini_batches: 4\n  streaming: true\n", "training.mini_batches 4 needs the whole batch"),
        ("generation:\n  group_size: 1\n", "advantage grpo compares the responses of a group"),
        (
            "generation:\n  group_size: 1\nalgorithm:\n  advantage: gae\ncontrol:\n  dynamic_sampling: true\n",
            "control.dynamic_sampling compares the responses of a group",
        ),
        (
            "algorithm:\n  advantage: gae\ncritic:\n  warmup_steps: 60\n",
            "critic.warmup_steps (60) leaves no step of training.steps (60) to the policy",
        ),
        ("control:\n  work_in_progress: 0.5\n", "control.work_in_progress (0.5) is less than one batch"),
        ("training:\n  micro_batch_tokens: 255\n", "cannot hold one sequence of model.max_model_len (256)"),
        (
            "generation:\n  base_port: 65535\n  engines: 2\n",
            "generation.base_port (65535) and 2 engines go beyond port 65535",
        ),
        (
            "generation:\n  base_port: 8000\n  engines: 2\ncontrol:\n  port: 8001\n",
            "control.port (8001) is also an engine's port",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path: Path, text: str, message: str) -> None:
    said = refusal(tmp_path, text)
    assert said.startswith("p.yaml: ")
    assert message in said


@pytest.mark.parametrize(
    "text",
    ["control:\n  batch_groups: 4\n", "generation:\n  base_port: 65534\n  engines: 2\n"],
)
def test_the_largest_fitting_settings_are_accepted(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.yaml").write_text(text)
    load_profile(tmp_path / "p.yaml")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.steps", "--set training.steps: write key=value, for example --set training.steps=20"),
        ("=5", "--set =5: write key=value"),
        ("training..steps=5", "--set training..steps=5: write key=value"),
        ("name.x=5", "--set name.x=5: name is a value, not a section"),
        ("seed=[", "--set seed=[: the value is not valid YAML; quote it"),
        ("training.stepz=5", "p.yaml: training.stepz: unknown key; did you mean steps?"),
        ("training.steps=", "p.yaml: training.steps: input should be a valid integer (got None)"),
    ],
)
def test_a_wrong_override_is_told(tmp_path: Path, override: str, message: str) -> None:
    assert refusal(tmp_path, "name: x\n", (override,)).startswith(message)


def test_a_missing_profile_names_those_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=r"^profiles/quick\.yaml: no such profile; there are .*quickstart_cpu\.yaml"):
        load_profile("profiles/quick.yaml")


def test_a_profile_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9\n")
    for path in (tmp_path, tmp_path / "latin.yaml"):
        with pytest.raises(UserError, match="cannot be read as a profile"):
            load_profile(path)


@pytest.mark.parametrize(
    ("mode", "bound", "work"), [("sync", 0.0, 1.0), ("one_step_off", 1.0, 2.0), ("fully_async", 3.0, 1.5)]
)
def test_the_mode_sets_the_bounds_of_the_one_rule(mode: str, bound: float, work: float) -> None:
    config = parse_config({"mode": mode, "control": {"max_staleness": 3, "work_in_progress": 1.5}}, where="test")
    assert (config.staleness_bound, config.work_in_progress) == (bound, work)


@pytest.mark.parametrize(("mode", "streams"), [("sync", False), ("one_step_off", False), ("fully_async", True)])
def test_the_trainer_streams_where_nothing_waits_for_whole_batches(mode: str, streams: bool) -> None:
    assert parse_config({"mode": mode}, where="test").streaming is streams
    assert parse_config({"mode": mode, "training": {"streaming": False}}, where="test").streaming is False


@pytest.mark.parametrize(
    "section",
    [{"algorithm": {"advantage": "gae"}}, {"training": {"updates_per_batch": 2}}, {"training": {"mini_batches": 2}}],
)
def test_what_needs_the_whole_batch_is_not_streamed(section: dict[str, dict[str, object]]) -> None:
    assert parse_config({"mode": "fully_async"} | section, where="test").streaming is False


def test_ppo_may_have_one_response_for_each_prompt() -> None:
    values = {"algorithm": {"advantage": "gae"}, "generation": {"group_size": 1}}
    assert parse_config(values, where="test").generation.group_size == 1


def test_an_engine_takes_as_many_responses_as_it_decodes_unless_told_otherwise() -> None:
    assert parse_config({"generation": {"max_num_seqs": 48}}, where="test").concurrent_samples == 48
    assert parse_config({"control": {"max_concurrent_samples": 12}}, where="test").concurrent_samples == 12


def test_the_configuration_imports_nothing_heavy() -> None:
    code = "import sys, forebay.config; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = set(done.stdout.split())
    assert {"forebay", "pydantic", "yaml"} <= loaded
    assert not loaded & {"torch", "vllm", "prefect", "numpy", "transformers", "deepspeed", "pyarrow", "httpx"}
