"""Secrets: what nothing may write, show or send, whichever way it goes."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from callbacks import Notify, notify, redact

# Notify


@contextmanager
def listening(answer):
    """A real server on loopback, and the requests that it has had; `answer` gives status and headers."""
    got = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            got.append((self.command, self.path, self.headers.get("Authorization")))
            status, headers = answer()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        serving.daemon_threads = True
        thread = threading.Thread(target=serving.serve_forever, args=(0.02,))
        thread.start()
        yield f"127.0.0.1:{serving.server_port}", got
        serving.shutdown()
        thread.join()


@pytest.fixture
def forgotten(monkeypatch):
    """What a test has redact know is forgotten when it is over."""
    monkeypatch.setattr(redact, "hidden", set())


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_notify_never_follows_a_redirect(status, monkeypatch, capsys, forgotten):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    run = SimpleNamespace(
        info={"task": "T"}, progress=SimpleNamespace(step=3, epoch=1), history=[], directory="d", stop_reason=""
    )
    with (
        listening(lambda: (200, {})) as (other, stolen),
        listening(lambda: (status, {"Location": f"http://{other}/collect"})) as (place, got),
    ):
        Notify(f"http://me:tOpSeCrEt@{place}/hook", on="end").on_fit_end(run, "finished")
        for thread in list(notify._under_way):
            thread.join(60)
    assert [method for method, _, _ in got] == ["POST"]
    assert got[0][2]
    assert stolen == []
    expected = f"warning: the webhook at http://{place} was not told (it answered {status}, a redirect, which is never "
    assert capsys.readouterr().err == expected + "followed)\n"
