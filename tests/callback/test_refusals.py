"""Stores that answer, and take nothing: the end of a run doesn't wait for them."""

import http.server
import pwd
import threading

import pytest
import requests

from callbacks.mlflow.delivery import is_refusal, load
from tests.callback.test_tracking import run_directory, tracking
from tests.test_cli import command  # noqa: F401

LONG = 3600  # seconds: a run that waits for the store doesn't end before the test is killed


@pytest.fixture
def refusing(request):
    """The address of a server that answers each request with the same status."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(request.param)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("refusing", [401, 403, 404], indirect=True)
def test_a_store_that_refuses_is_not_waited_for(refusing, request, tmp_path, capfd):
    _, end = tracking(run_directory(tmp_path / "run"), refusing, wait=LONG)
    end()
    assert f"error code {request.node.callspec.params['refusing']}" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("uri", "why"),
    [("http://[::1", "IPv6"), ("http://host:port", "Invalid url"), ("htp://host", "unsupported URI 'htp://host'")],
)
def test_an_address_that_is_none_is_not_waited_for(uri, why, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)  # which isn't checked at the start: it is MLflow's own
    _, end = tracking(run_directory(tmp_path / "run"), None, wait=LONG)
    end()
    assert why in capfd.readouterr().err


def test_a_page_in_place_of_an_answer_may_pass():
    """A proxy sends one while the server behind it starts."""
    page = requests.Response()
    page._content = b"<html>starting</html>"
    with pytest.raises(requests.JSONDecodeError) as raised:
        page.json()
    assert not is_refusal(raised.value)
    assert is_refusal(ValueError("Invalid IPv6 URL"))


def test_a_user_without_a_home_directory_is_told_to_set_it(monkeypatch):
    """As in a container whose user has no name. MLflow's own error doesn't name the variable."""

    def no_entry(user):
        raise KeyError(user)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    with pytest.raises(ImportError, match="this user has none: set HOME") as raised:
        load("sqlite")
    assert is_refusal(raised.value)


def test_sync_names_a_directory_in_place_of_its_own_file(tmp_path, command):  # noqa: F811
    directory = run_directory(tmp_path / "run")
    (directory / "mlflow.json").mkdir()
    code, _, error = command("sync", directory, "--track", f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert (code, error.count("\n")) == (2, 1)
    assert f"{directory / 'mlflow.json'}: it is a directory, not a file of a run: remove it" in error
