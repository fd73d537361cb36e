"""A proxy in front of an S3 service that loses replies, refuses requests, lets rivals win and cuts bodies."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

CODES = {
    409: "ConditionalRequestConflict",
    412: "PreconditionFailed",
    500: "InternalError",
    503: "SlowDown",
    507: "XMinioStorageFull",
}


@dataclass
class Fault:
    """What happens to the next `times` requests of a `method` whose path and query contain `target`.

    `lose_reply` passes the request on and closes the connection in place of an answer; `cut` sends half of the
    answer's body; `rival` calls `act` before it passes the request on; `short_pages` makes the service list two names
    at a time; `unconditional` takes the condition off a write (services that check signatures refuse that). Of the
    others the service hears nothing: a number is an answer with that status, `stall` is none.
    """

    method: str
    target: str
    action: Literal["lose_reply", "cut", "rival", "short_pages", "stall", "unconditional"] | int
    times: int = 1
    act: Callable[[], object] = lambda: None
    met: int = field(default=0, init=False)


class FaultyProxy:
    """Passes requests on to a service, but for the faults in `faults`; `answered` lists method, path and status."""

    def __init__(self, service: str) -> None:
        self.service = urlsplit(service).netloc
        self.faults: list[Fault] = []
        self.answered: list[tuple[str, str, int]] = []
        self.stalled, self.ended = threading.Event(), threading.Event()
        self._lock = threading.Lock()

    def add(self, method: str, target: str, action: str | int, **details: object) -> Fault:
        """Put a fault in the way of the requests to come."""
        self.faults.append(Fault(method, target, action, **details))
        return self.faults[-1]

    def take(self, method: str, path: str) -> Fault | None:
        """The fault of a request, if it has one."""
        with self._lock:
            for fault in self.faults:
                if fault.method == method and fault.target in path and fault.met < fault.times:
                    fault.met += 1
                    return fault
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: FaultyProxy

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.proxy.take(self.command, self.path)
        action = fault.action if fault else None
        if isinstance(action, int):
            message = f"<Error><Code>{CODES[action]}</Code><Message>as the test wants it</Message></Error>"
            self._answer(action, [("Content-Type", "application/xml")], message.encode())
            return
        if action == "stall":
            self.proxy.stalled.set()
            self.proxy.ended.wait()
            self.close_connection = True
            return
        if fault and action == "rival":
            fault.act()
        status, headers, answer = self._pass_on(body, action)
        if action == "lose_reply":
            self.proxy.answered.append((self.command, self.path, 0))
            self.close_connection = True
            return
        self._answer(status, headers, answer, half=action == "cut")

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle  # noqa: N815

    def _pass_on(self, body: bytes, action: str | None) -> tuple[int, list[tuple[str, str]], bytes]:
        query = "&max-keys=2" if action == "short_pages" else ""
        dropped = {"expect", "connection"} | ({"if-none-match"} if action == "unconditional" else set())
        headers = {name: value for name, value in self.headers.items() if name.lower() not in dropped}
        connection = http.client.HTTPConnection(self.proxy.service, timeout=30)
        try:
            connection.request(self.command, self.path + query, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, half: bool = False) -> None:
        self.proxy.answered.append((self.command, self.path, status))
        self.send_response(status)
        length = str(len(body))
        for name, value in headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            elif name.lower() not in ("content-length", "connection", "transfer-encoding", "date", "server"):
                self.send_header(name, value)
        if status not in (204, 304):
            self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if half else body)
        self.close_connection = half

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


@contextmanager
def faulty_proxy(service: str) -> Generator[tuple[FaultyProxy, str]]:
    """A running proxy in front of the service at a URL, and the proxy's own URL."""
    proxy = FaultyProxy(service)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": proxy}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        proxy.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()
