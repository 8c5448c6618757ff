"""`tfloop watch`: the page is served to this machine alone, updates by itself, and Ctrl-C ends it."""

import asyncio
import contextlib
import fcntl
import http.client
import json
import signal
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from loop.commands import watch
from tests.callback.test_report import Page, drag, look_with_chromium
from tests.conftest import TFLOOP


def line(event, step, **more):
    return json.dumps({"time": 1.7e9 + step, "event": event, "step": step, "epoch": 0, **more}) + "\n"


def add(directory, *lines):
    with (directory / "journal.jsonl").open("a") as file:
        file.write("".join(lines))


@pytest.fixture
def directory(tmp_path):
    """A run that has made 50 steps."""
    path = tmp_path / "runs" / "one"
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps({"task": "Plain", "status": "running"}))
    add(path, line("restore", 0), line("fit_start", 0))
    for step in range(1, 51):
        add(path, line("steps_end", step, metrics={"loss": 1 / step, "accuracy": step / 100}))
    return path


@contextlib.contextmanager
def training(directory):
    """As if a process were training there: it holds the lock."""
    with (directory / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def serving(*paths):
    with watch.served(paths, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server, path="/", method="GET", host=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=240)
    with contextlib.closing(connection):
        connection.putrequest(method, path, skip_host=True)
        for value in [host] if isinstance(host, str) else host or [f"127.0.0.1:{server.server_port}"]:
            connection.putheader("Host", value)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers


def test_only_this_machine_is_answered_and_only_with_the_page(directory):
    with serving(directory) as server:
        assert server.socket.getsockname()[0] == "127.0.0.1"
        status, text, headers = ask(server)
        assert status == 200
        assert {"Plain", "killed", "50"} <= set(Page(text).texts)
        assert (headers["X-Content-Type-Options"], headers["X-Frame-Options"]) == ("nosniff", "DENY")
        port = server.server_port
        assert ask(server, host=f"localhost:{port}")[0] == 200
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1.evil.example:{port}", ""):
            status, text, _ = ask(server, host=host)
            assert (status, "Plain" in text) == (403, False), host
        assert ask(server, host=[f"127.0.0.1:{port}", "evil.example"])[0] == 403
        for path in ("/run.json", "/../run.json", "/journal.jsonl", "/?x=1", f"http://127.0.0.1:{port}/"):
            status, text, _ = ask(server, path)
            assert (status, "Plain" in text) == (404, False), path
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert ask(server, method=method)[0] == 501
        assert ask(server, method="HEAD")[:2] == (200, "")


def test_what_is_new_is_another_page_and_nothing_new_is_none(directory):
    with serving(directory) as server:
        _, before, headers = ask(server)
        tag = headers["ETag"]
        assert ask(server, If_None_Match=tag)[:2] == (304, "")
        add(directory, line("steps_end", 51, metrics={"loss": 7.125}))
        status, text, headers = ask(server, If_None_Match=tag)
        assert status == 200
        assert headers["ETag"] != tag
        assert "7.125" in Page(text).texts
        assert "7.125" not in before
        assert "connect-src 'self'" in text  # the served page alone may ask for more
        with serving(directory, directory.parent / "other") as both:  # not there yet: nothing of it is an error
            assert "2 runs" in Page(ask(both)[1]).texts


def test_a_port_that_is_taken_is_no_reason_to_fail(directory, capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with watch.served([directory], port) as server:
            assert server.server_port != port
            assert f"port {port} can't be used" in capfd.readouterr().err


@pytest.mark.parametrize(("number", "code", "last"), [("SIGINT", 130, ""), ("SIGTERM", 143, "stopped by SIGTERM\n")])
def test_a_signal_ends_it_cleanly(number, code, last, directory, tmp_path):
    command = [*TFLOOP, "watch", "one", "--port", "65535"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    try:
        said = ""
        while "see it in the browser" not in said:
            said = process.stderr.readline()
            assert said, process.wait()
        address = said.partition("http://")[2].partition("/")[0]
        with contextlib.closing(http.client.HTTPConnection(address, timeout=240)) as browser:
            browser.request("GET", "/")
            assert "Plain" in browser.getresponse().read().decode()  # its connection stays open
            process.send_signal(getattr(signal, number))
            out, error = process.communicate(timeout=240)
            assert (process.returncode, out, error) == (code, "", f"no longer watched\n{last}")
    finally:
        process.kill()


def test_bad_input_is_one_line(directory, command):
    for arguments, told in ((("nothing",), "no run of that name"), (("one", "one"), "are the same run")):
        code, out, error = command("watch", *arguments)
        assert (code, out, error.count("\n")) == (2, "", 1)
        assert told in error


CONNECTION = "document.getElementById('connection').textContent"


def test_chromium_updates_what_is_new_and_keeps_the_rest(directory, tmp_path):
    async def look(tab):
        with serving(directory) as server, training(directory):
            await tab.window(1100, 900)
            await tab.open(server.address, ["Curves"], "before && tag")
            await drag(tab)
            zoomed = await tab.value("view.range")
            assert zoomed
            await tab.value(
                "window.kept = document.querySelectorAll('.chart')[1],"
                "window.slider = document.querySelector('.tools input'),"
                "slider.value = 0.5, slider.dispatchEvent(new Event('input')), scrollTo(0, 100)"
            )
            add(directory, line("steps_end", 51, metrics={"loss": 7.125}))
            async with asyncio.timeout(60):
                while not await tab.value("document.body.innerText.includes('7.125')"):
                    await asyncio.sleep(0.05)
            # The chart of the other metric is the same element; zoom, smoothing and position stay.
            assert await tab.value("document.contains(kept) && document.contains(slider)")
            assert await tab.value("view.range") == zoomed
            assert await tab.value("[view.smoothing, slider.value, scrollY].join()") == "0.5,0.5,100"
            assert await tab.value("document.querySelectorAll('.chart')[0].querySelectorAll('path.raw').length") == 1
            add(directory, line("eval_end", 51, metrics={"eval_loss": 8.375}))  # another tile, and a row of the table
            async with asyncio.timeout(60):
                while not await tab.value("document.body.innerText.includes('8.375')"):
                    await asyncio.sleep(0.05)
            assert await tab.value(CONNECTION) == "Live: the page updates by itself."
        await tab.value("window.fetch = () => Promise.reject()")  # as when the server has ended
        async with asyncio.timeout(60):
            while "No connection" not in await tab.value(CONNECTION):
                await asyncio.sleep(0.05)
        assert [error for error in tab.errors if "favicon" not in error and "ERR_CONNECTION_REFUSED" not in error] == []

    look_with_chromium(tmp_path, look)


def test_nothing_of_the_run_directory_is_changed(directory):
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in directory.rglob("*")}
    with serving(directory) as server:
        ask(server)
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in Path(directory).rglob("*")} == before
