"""A Control Unit of a few lines: serves prepared batches to a trainer and writes down what it is told."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgpack

Batch = dict[str, Any]


@dataclass
class ControlStub:
    """`batch_of(step)` gives the batch, None for "not yet", or a text: the run is over. A trainer that streams gets it
    group by group."""

    token: str
    batch_of: Callable[[int], Batch | str | None]
    steps: list[dict[str, Any]] = field(default_factory=list)
    snapshots: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    """Requests for batches."""
    calls: list[str] = field(default_factory=list)
    """Paths in the order in which they were called."""
    url: str = ""

    def __enter__(self) -> "ControlStub":
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers["Authorization"] != f"Bearer {stub.token}":
                    self._answer(401, {"detail": "no token"})
                else:
                    self._answer(*stub.answer(self.path, msgpack.unpackb(body)))

            def _answer(self, status: int, content: Any) -> None:
                data = b"" if content is None else msgpack.packb(content)
                self.send_response(status)
                self.send_header("Content-Type", "application/msgpack")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, message: dict[str, Any]) -> tuple[int, Any]:
        self.calls.append(path)
        if path == "/v1/steps":
            self.steps.append(message)
        elif path == "/v1/snapshots":
            self.snapshots.append(message)
        elif path == "/v1/checkpoints":
            self.checkpoints.append(message["step"])
        elif path == "/v1/batches/next":
            self.asked.append(message)
            batch = self.batch_of(message["step"])
            if isinstance(batch, dict) and message.get("streaming"):
                batch = next_groups(batch, message["received"])
            if isinstance(batch, str):
                return 410, {"reason": batch}
            return (204, None) if batch is None else (200, batch)
        return 200, {"ok": True}


def next_groups(batch: Batch, received: int) -> Batch:
    """One group, and in the end none: the completeness of a batch may be known only after its last group."""
    return batch | {"groups": batch["groups"][received : received + 1], "complete": received >= len(batch["groups"])}
