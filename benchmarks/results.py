"""How a benchmark ends: a table for people, one JSON object as the last line, and a dated file with the machine."""

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

FOLDER = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory),
        "load": os.getloadavg()[0],
    }


def report(name: str, title: str, rows: list[dict[str, Any]], result: dict[str, Any]) -> None:
    """Print the table (a row may lack some of the columns), save `results/<name>.json`, print the JSON line last."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right" if column != columns[0] else "left")
    for row in rows:
        table.add_row(*(_text(row[column]) if column in row else "" for column in columns))
    Console(width=200).print(table)
    record = {"benchmark": name, "date": time.strftime("%Y-%m-%d"), "machine": machine(), **result}
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(record | {"rows": rows}, indent=1) + "\n")
    print(json.dumps(record))


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
