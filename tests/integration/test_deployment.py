"""`prefect.yaml` as it is: a real Prefect server, work pool and worker; only the stages are stubs."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

REPOSITORY = Path(__file__).parents[2]
STUBS = REPOSITORY / "tests" / "stub_stages"
POOL = "forebay"


@dataclass(frozen=True)
class Deployed:
    """A server with both deployments and a worker."""

    environment: dict[str, str]
    api: httpx.Client
    folder: Path


def environment(home: Path) -> tuple[dict[str, str], str]:
    """Environment of `infra/prefect/prefect.env` on a free port, and the API's URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    lines = (REPOSITORY / "infra" / "prefect" / "prefect.env").read_text().splitlines()
    settings = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    url = settings["PREFECT_API_URL"].replace("4200", str(port))
    settings |= {
        "PREFECT_API_URL": url,
        "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_HOME": str(home),
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "NO_COLOR": "1",
        "COLUMNS": "200",
    }
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    path = os.pathsep.join(filter(None, (str(STUBS), clean.get("PYTHONPATH"))))
    return {**clean, **settings, "PYTHONPATH": path}, url


def prefect(deployed_environment: dict[str, str], *words: str) -> str:
    """Run the Prefect command line in the repository; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "prefect", *words],
        env=deployed_environment,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"prefect {' '.join(words)}: {done.stdout}"
    return done.stdout


def start(words: list[str], env: dict[str, str], cwd: Path, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "prefect", *words],
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    folder = tmp_path_factory.mktemp("deployed")
    env, url = environment(folder / "home")
    (folder / "home").mkdir()
    started = [start(["server", "start"], env, REPOSITORY, folder / "server.log")]
    try:
        with httpx.Client(base_url=url, trust_env=False, timeout=30) as api:
            wait_for(api, started[0], folder / "server.log")
            prefect(env, "work-pool", "create", POOL, "--type", "process")
            # The worker is started elsewhere: the deployment has to bring the flow's folder.
            started.append(start(["worker", "start", "--pool", POOL], env, folder, folder / "worker.log"))
            prefect(env, "--no-prompt", "deploy", "--all")
            yield Deployed(env, api, folder)
    finally:
        for process in reversed(started):
            stop(process)


def wait_for(api: httpx.Client, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()
        try:
            if api.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    pytest.fail(f"no Prefect server in 120 s: {log.read_text()}")


def read(deployed: Deployed, name: str) -> dict[str, Any]:
    answer = deployed.api.get(f"/deployments/name/pipeline/{name}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_both_deployments_are_as_declared(deployed: Deployed) -> None:
    once, weekly = read(deployed, "pipeline"), read(deployed, "retrain")
    for deployment in (once, weekly):
        assert deployment["entrypoint"] == "flows/pipeline.py:pipeline"
        assert deployment["work_pool_name"] == POOL
        assert deployment["concurrency_limit"] is None
        assert deployment["parameters"]["profile"] == "profiles/quickstart_cpu.yaml"
        (step,) = deployment["pull_steps"]
        assert step == {"prefect.deployments.steps.set_working_directory": {"directory": str(REPOSITORY)}}
    assert once["schedules"] == []
    (schedule,) = weekly["schedules"]
    assert schedule["active"]
    assert schedule["schedule"]["cron"] == "0 3 * * 0"
    assert schedule["schedule"]["timezone"] == "UTC"


def test_the_form_knows_the_settings_and_refuses_wrong_ones(deployed: Deployed) -> None:
    deployment = read(deployed, "pipeline")
    schema = deployment["parameter_openapi_schema"]
    assert {"profile", "overrides", "config"} == set(schema["properties"])
    assert "steps" in schema["definitions"]["TrainingConfig"]["properties"]
    for config, reason in (
        ({"mode": "never"}, "mode"),
        ({"training": {"steps": 0}}, "steps"),
        ({"training": {"stepps": 5}}, "stepps"),
    ):
        answer = deployed.api.post(
            f"/deployments/{deployment['id']}/create_flow_run", json={"parameters": {"config": config}}
        )
        assert answer.status_code == 409, answer.text
        assert reason in answer.text


def test_a_worker_runs_the_deployment(deployed: Deployed) -> None:
    overrides = ["training.steps=4", f"storage.scratch={deployed.folder}/scratch"]
    overrides.append(f"storage.uri=file://{deployed.folder}/store")
    words = ["deployment", "run", "pipeline/pipeline", "-p", f"overrides={json.dumps(overrides)}"]
    prefect(deployed.environment, *words, "--watch", "--watch-interval", "1")

    (path,) = (deployed.folder / "store").glob("*/summary.json")
    summary = json.loads(path.read_text())
    assert summary["status"] == "completed"
    assert summary["run_id"].startswith("quickstart_cpu-")
    artifacts = deployed.api.post("/artifacts/filter", json={"sort": "KEY_ASC"}).json()
    assert [artifact["key"] for artifact in artifacts] == ["evaluation", "report", "response-lengths", "training"]
    assert all(artifact["flow_run_id"] and artifact["task_run_id"] for artifact in artifacts)
    messages = [entry["message"] for entry in deployed.api.post("/logs/filter", json={"limit": 200}).json()]
    assert any("step 4/4" in message for message in messages), messages


def test_cancelling_ends_the_run_and_its_processes(deployed: Deployed) -> None:
    overrides = [f"storage.scratch={deployed.folder}/cancelled", f"storage.uri=file://{deployed.folder}/cancelled"]
    answer = deployed.api.post(
        f"/deployments/{read(deployed, 'pipeline')['id']}/create_flow_run",
        json={"parameters": {"overrides": overrides}, "job_variables": {"env": {"STUB_TRAIN": "wait"}}},
    )
    run_id = answer.json()["id"]
    (pid_file,) = until("the run trains", lambda: list(deployed.folder.glob("cancelled/runs/*/child.pid")))
    child = int(pid_file.read_text())
    assert Path(f"/proc/{child}").exists()

    prefect(deployed.environment, "flow-run", "cancel", run_id)
    until("the run is cancelled", lambda: deployed.api.get(f"/flow_runs/{run_id}").json()["state_name"] == "Cancelled")
    assert not Path(f"/proc/{child}").exists()
    (path,) = deployed.folder.glob("cancelled/*/summary.json")
    assert json.loads(path.read_text())["status"] == "cancelled"


def until(what: str, condition: Callable[[], Any]) -> Any:
    """The first true value of the condition, which has a minute."""
    deadline = time.monotonic() + 60
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within a minute: {what}"
        time.sleep(0.1)
    return value
