"""The quickstart as a user runs it, on several seeds: wall time, held-out accuracy before and after, p-value.

python -m benchmarks.quickstart [--seeds 0 1 2]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.results import report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="profiles/quickstart_cpu.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    rows = [_run(args.profile, seed) for seed in args.seeds]
    report(
        "quickstart",
        f"forebay run {args.profile}",
        rows,
        {
            "least_gain_points": min(row["gain_points"] for row in rows),
            "largest_p_value": max(row["p_value"] for row in rows),
            "longest_wall_s": max(row["wall_s"] for row in rows),
        },
    )


def _run(profile: str, seed: int) -> dict[str, Any]:
    """One run from nothing: a fresh scratch folder, so the warm start is made as well."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).with_name("forebay")), "run", profile]
        settings = [f"seed={seed}", f"storage.scratch={folder}/scratch", f"storage.uri=file://{folder}/runs"]
        started = time.monotonic()
        subprocess.run([*command, *(part for text in settings for part in ("--set", text))], check=True)
        wall = time.monotonic() - started
        summaries = list(Path(folder, "runs").glob("*/summary.json"))
        summary = json.loads(summaries[0].read_text())
    evaluation = summary["evaluation"]
    return {
        "seed": seed,
        "wall_s": round(wall, 1),
        "n": evaluation["n"],
        "before": evaluation["before"],
        "after": evaluation["after"],
        "gain_points": 100 * (evaluation["after"] - evaluation["before"]),
        "p_value": evaluation["p_value"],
        "step_time_s": summary["step_time_s"],
        "train_wait_ratio": summary["train_wait_ratio"],
        "staleness_max": summary["staleness"]["max"],
        "spearman": summary["lengths"]["spearman"],
        **{f"{name}_s": seconds for name, seconds in summary["stages"].items()},
    }


if __name__ == "__main__":
    main()
