"""TCP ports.

Invariant: a port held by `hold_port` is given to nobody else; only a server that binds it on purpose gets it.
"""

import contextlib
import os
import socket
from pathlib import Path

from forebay.errors import UserError

LISTEN = "0A"
"""State column of /proc/net/tcp."""


def free_port(host: str) -> int:
    """A port that is free now."""
    with hold_port(host, 0) as held:
        return int(held.getsockname()[1])


def hold_port(host: str, port: int) -> socket.socket:
    """Bind without listening; 0 takes a free port. Close the socket to give the port back.

    Both sides set SO_REUSEADDR, so a server (vLLM, uvicorn) can bind and listen while the port is held, before it
    starts and across its restarts; a plain bind and the kernel's choice of free ports pass it by. Raises `UserError`
    if it is in use.
    """
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((host, port))
    except OSError as error:
        held.close()
        raise UserError(f"port {port} on {host} cannot be taken: {error.strerror}{_owner(port)}") from None
    return held


def require_free(host: str, port: int, setting: str) -> None:
    """Raises `UserError` that names the process in the way and the setting that chooses another port."""
    try:
        hold_port(host, port).close()
    except UserError as error:
        raise UserError(f"{error}; choose another port with {setting}, or 0 for a free one") from None


def _owner(port: int) -> str:
    """Which process listens there, in parentheses; nothing if it is another user's."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    for name in filter(str.isdigit, os.listdir("/proc")) if inodes else ():
        with contextlib.suppress(OSError):
            if any(os.readlink(entry) in inodes for entry in Path(f"/proc/{name}/fd").iterdir()):
                return f" (in use by {Path(f'/proc/{name}/comm').read_text().strip()}, pid {name})"
    return ""
