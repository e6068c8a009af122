"""What Forebay raises: one line that says what, where and what to do.

Exit codes: 2 for the user's mistake (`UserError`), 1 for ours or the machine's (`RunError`).
The command line prints `str(error)` and nothing else; a traceback means a bug.
"""


class ForebayError(Exception):
    """Base of every expected failure. `exit_code` is the process's exit code."""

    exit_code = 1


class UserError(ForebayError):
    """The profile, a file or the command line is wrong; the user can put it right."""

    exit_code = 2


class RunError(ForebayError):
    """Something we depend on failed: a process died, a deadline passed, a disk is full."""

    exit_code = 1


class DeadlineError(RunError):
    """A wait passed its deadline. The message names who waited for whom and how long."""


class DataError(ForebayError):
    """One row or one response is bad: it is quarantined with this reason, the run goes on."""

    exit_code = 2
