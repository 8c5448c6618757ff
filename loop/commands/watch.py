"""`tfloop watch`: a server on loopback that shows the page of runs while they train."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer

from callbacks.run_record import journal
from callbacks.run_record.record import ABOUT, under_way
from callbacks.run_record.redaction import tell
from loop.commands import runs

_HOST = "127.0.0.1"
_NAMES = (_HOST, "localhost")
"""The names by which a browser may ask. Another name may be that of a foreign page that points here (DNS rebinding)."""


class LivePage:
    """The page of runs, made anew when they have something new."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._readers = list(map(runs.reader, paths))
        self._lock = threading.Lock()  # browsers ask at the same time
        self._state: object = None
        self._content = b""
        self._tag = ""

    def read(self) -> tuple[bytes, str]:
        """The page, and a tag that changes whenever the page does."""
        with self._lock:
            # Before the runs are read: what is written in between is then seen the next time.
            state = list(map(_state, self._paths))
            if state != self._state:
                text = runs.page_of([reader.read() for reader in self._readers], live=True)
                self._content = text.encode()
                self._tag = f'"{hashlib.sha256(self._content).hexdigest()[:32]}"'
                self._state = state
            return self._content, self._tag


def _state(path: Path) -> list[object]:
    """What changes whenever a run has something new."""
    state: list[object] = [under_way(path)]
    for name in (ABOUT, journal.NAME, "checkpoints"):
        with contextlib.suppress(OSError):
            stat = os.lstat(path / name)
            state.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
    return state


class Server(ThreadingHTTPServer):
    """Serves the page of runs to browsers of this machine, and nothing else.

    Args:
        paths: the run directories.
        port: where it listens.

    Attributes:
        page: the page.
        address: where a browser finds it.
    """

    daemon_threads = True  # a connection that a browser keeps open doesn't delay the end

    def __init__(self, paths: Sequence[Path], port: int) -> None:
        self._paths = paths
        self.page = LivePage(paths)
        super().__init__((_HOST, port), _Handler)
        self.address = f"http://{_HOST}:{self.server_port}/"

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # that of `HTTPServer` asks for the name of this host, which may take seconds
        self.server_name = _HOST
        self.server_port = self.server_address[1]

    def is_under_way(self) -> bool:
        """Whether one of the runs is still training."""
        return any(map(under_way, self._paths))

    def handle_error(self, request: object, client_address: object) -> None:
        """Prints nothing: a browser may go away at any time."""


class _Handler(BaseHTTPRequestHandler):
    """Answers one browser."""

    protocol_version = "HTTP/1.1"
    server_version = "tfloop"
    sys_version = ""
    timeout = 30  # seconds without a request, after which a connection is closed

    def do_GET(self) -> None:
        self._answer(with_content=True)

    def do_HEAD(self) -> None:
        self._answer(with_content=False)

    def _answer(self, with_content: bool) -> None:
        assert isinstance(self.server, Server)
        port = self.server.server_port
        hosts = self.headers.get_all("Host") or []
        # Exactly one: of several, a browser and this server might mean different ones.
        if len(hosts) != 1 or hosts[0] not in [f"{name}:{port}" for name in _NAMES]:
            self._send(HTTPStatus.FORBIDDEN, b"This server is for browsers of its own machine.\n", with_content)
        elif self.path != "/":
            self._send(HTTPStatus.NOT_FOUND, b"There is one page: /\n", with_content)
        else:
            content, tag = self.server.page.read()
            if self.headers.get("If-None-Match") == tag:
                self._send(HTTPStatus.NOT_MODIFIED, None, with_content, tag)
            else:
                self._send(HTTPStatus.OK, content, with_content, tag)

    def _send(self, status: HTTPStatus, content: bytes | None, with_content: bool, tag: str = "") -> None:
        self.send_response(status)
        if tag:
            self.send_header("ETag", tag)
        if content is not None:
            kind = "text/html" if status == HTTPStatus.OK else "text/plain"
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
        # Pages of elsewhere can neither show nor read this one, and it stays in no cache.
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        if content is not None and with_content:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """The terminal shows no line for each request."""


@contextlib.contextmanager
def served(paths: Sequence[Path], port: int) -> Iterator[Server]:
    """A server for the page of these runs; at another port where this one is in use."""
    try:
        server = Server(paths, port)
    except OSError as error:
        server = Server(paths, 0)  # any that is free
        tell(f"port {port} can't be used ({error.strerror}), taking {server.server_port}")
    with server:
        yield server
