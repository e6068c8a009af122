"""Python starts a pool's processes afresh and has each run the main script again, all but what stands under
`if __name__ == "__main__":`. A script without it would start the whole run again in each of them.

Invariant: nothing is started in such a process, and a script that would lead to one is refused before.
"""

import multiprocessing
import sys
from pathlib import Path

from forebay.errors import UserError

AGAIN = 97
"""Exit code of a pool's process in which the main script has called Forebay again."""
WORKER = "reward-worker"
"""Name of the processes that import users' reward functions."""
GUARD = '__name__ == "__main__"'


def require_guard() -> None:
    """Raises `UserError` if the main script has no guard at all, or in a reward worker, whose user's module asks for a
    run; ends the process if the main script has no guard around this call."""
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False):  # what multiprocessing itself looks at
        raise SystemExit(AGAIN)
    if process.name == WORKER:
        raise UserError(f"it starts Forebay when it is imported: put what does so under `if {GUARD}:`")
    script = _main_script()
    try:
        text = script.read_text(encoding="utf-8") if script else GUARD
    except (OSError, UnicodeDecodeError):
        return
    if "__main__" not in text:
        raise unguarded()


def unguarded() -> UserError:
    """What to do about it."""
    return UserError(
        f"{_main_script()}: every process that Forebay starts for rewards and data would run this script again: put "
        f"what it does under `if {GUARD}:`"
    )


def _main_script() -> Path | None:
    """The file that such a process runs again, if any: none for `python -c` and in notebooks."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return Path(file) if file else None
