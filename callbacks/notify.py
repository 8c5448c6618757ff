"""Posts the state of the run to a server in the background; Notify: to a webhook."""

from __future__ import annotations

import atexit
import base64
import contextlib
import json
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from callbacks.arguments import check, is_number
from callbacks.base import Callback, Run, shown_status
from callbacks.error_text import recorded
from callbacks.formats import number
from callbacks.nearest import nearest
from callbacks.run_record import redaction
from callbacks.run_record.history import COUNTERS
from callbacks.run_record.journal import jsonable
from callbacks.types import JsonObject

if TYPE_CHECKING:
    import ssl
    import urllib.request


KINDS = ("end", "failure", "checkpoint")
"""The events for which a message can be sent."""
MOST = 8
"""The most messages under way: while a server takes none, no more messages about checkpoints are sent."""

_under_way: dict[threading.Thread, tuple[float, Posting]] = {}
"""The threads that send messages: until when the process waits for each at its end, and which callback sends it."""


class Posting(Callback):
    """What callbacks that post JSON objects share: a thread for each message, one warning, no redirects.

    Args:
        url: where to post, http or https; a user and password in it are sent by basic authentication.
        timeout: seconds to wait for an answer.
        what: the server, in a warning's words.
    """

    def __init__(self, url: str, timeout: float, what: str) -> None:
        is_time = is_number(timeout, 0, 3600) and timeout > 0
        check(self, is_time, "give seconds > 0, at most 3600", timeout=timeout)
        self.timeout = timeout
        self.server = _server(url)
        self._what = what
        # Credentials go into a header: `urllib` takes them for a part of the host's name.
        parts = urlsplit(url)
        user, at, host = parts.netloc.rpartition("@")
        self._url = parts._replace(netloc=host).geturl()
        self._headers = {"Content-Type": "application/json", "User-Agent": "tfloop"}
        if at:
            self._headers["Authorization"] = "Basic " + base64.b64encode(unquote(user).encode()).decode()
        self._has_warned = False

    def on_setup(self, run: Run) -> None:
        self._has_warned = False

    def _send(self, message: JsonObject) -> None:
        """Posts a message, without its secrets, in a thread."""
        body = json.dumps(jsonable(redaction.redact(message)), allow_nan=False).encode()
        # A daemon, so that a server that never answers can't keep the process alive: `_wait` limits the time.
        thread = threading.Thread(target=self._post, args=(body,), name="notify", daemon=True)
        # Before the start: the thread removes itself, and may end before the next line here.
        _under_way[thread] = (time.monotonic() + self.timeout, self)
        try:
            thread.start()
        except RuntimeError as error:
            del _under_way[thread]
            self._warn(str(error))

    def _post(self, body: bytes) -> None:
        import http.client
        import urllib.error
        import urllib.request

        try:
            request = urllib.request.Request(self._url, body, self._all_headers())  # noqa: S310 - http or https
            with _opener(self._tls()).open(request, timeout=self.timeout):
                pass
        except urllib.error.HTTPError as error:  # before OSError, of which it is one
            error.close()
            answer = f"it answered {error.code}"
            if 300 <= error.code < 400:
                answer += ", a redirect, which is never followed"
            self._warn(answer)
        except (OSError, http.client.HTTPException, ValueError) as error:
            cause = getattr(error, "reason", error)
            if isinstance(cause, TimeoutError):
                self.report_silence()
            else:
                self._warn(getattr(cause, "strerror", None) or type(cause).__name__)  # its whole text may hold the URL
        finally:
            del _under_way[threading.current_thread()]

    def report_silence(self) -> None:
        """Warns that the server hasn't answered in time."""
        self._warn(f"no answer within {self.timeout:g} s")

    def _all_headers(self) -> dict[str, str]:
        """The headers of a message; read when it is sent."""
        return self._headers

    def _tls(self) -> ssl.SSLContext | None:
        """The TLS context of a message; None: that of the system's authorities."""
        return None

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            redaction.tell(f"warning: {self._what} at {self.server} was not told ({reason})")


class Notify(Posting):
    """Posts a JSON object to a webhook: at the end of the run, when it fails, at each checkpoint.

    It has `text` (a line for people, which Slack and Mattermost show), `event` (see `on`), `task`, `run_directory`,
    `status`, `step`, `epoch`, `metrics`, `time`; and `reason`, or `error`. A server that is slow, down or refuses a
    message is reported once on stderr, and neither delays the run nor fails it; at its end, the process waits at most
    `timeout` for it. Redirects are not followed: the credentials go to the host of `url` and to no other. The URL is
    treated as a secret: no output shows more of it than its host.

    Args:
        url: where to post, http or https; a user and password in it are sent by basic authentication.
        on: the events for which messages are sent: `"end"`, `"failure"` and `"checkpoint"`.
        timeout: seconds to wait for an answer.

    Raises:
        ValueError: one of them is wrong.
    """

    def __init__(self, url: str, on: str | Iterable[str] = ("end", "failure"), timeout: float = 10.0) -> None:
        check(self, isinstance(on, Iterable), f"give some of {', '.join(KINDS)}", on=on)
        self.on = (on,) if isinstance(on, str) else tuple(on)
        for kind in self.on:
            if kind not in KINDS:
                raise ValueError(f"Notify(on={kind!r}): no such message{nearest(str(kind), KINDS)}")
        if not self.on:
            raise ValueError(f"Notify(on=()): give at least one of {', '.join(KINDS)}")
        super().__init__(url, timeout, "the webhook")
        redaction.hidden |= {url, self._url}  # before anything can fail and print it

    def on_checkpoint(self, run: Run, reason: str) -> None:
        self._tell(run, "checkpoint", "running", reason)

    def on_exception(self, run: Run, error: BaseException) -> None:
        # Masked before it is cut: a part of a secret would not be known as one.
        text = redaction.mask(f"{type(error).__name__}: {error}")
        self._tell(run, "failure", "failed", recorded(text))

    def on_fit_end(self, run: Run, status: str) -> None:
        if status != "failed":  # `on_exception` has told of it
            self._tell(run, "end", status, run.stop_reason)

    def _tell(self, run: Run, kind: str, status: str, why: str) -> None:
        # Only messages about checkpoints can pile up; the one about the end is always sent.
        if kind not in self.on or (kind == "checkpoint" and len(_under_way) >= MOST):
            return
        metrics = run.history[-1] if run.history else {}
        what = kind if kind == "checkpoint" else shown_status(status)
        text = f"{run.info['task']}: {what} at step {run.progress.step:,}"
        if why:
            text += f" ({why})"
        for name, value in metrics.items():
            if name not in COUNTERS:
                text += f", {name} {number(value)}"
        self._send({
            "text": text, "event": kind, "task": run.info["task"], "run_directory": str(run.directory),
            "status": status, "step": run.progress.step, "epoch": run.progress.epoch, "metrics": metrics,
            "time": time.time(), "error" if kind == "failure" else "reason": why,
        })  # fmt: skip


def _opener(tls: ssl.SSLContext | None) -> urllib.request.OpenerDirector:
    """Opens requests. A redirect is an error: another host must not get the credentials."""
    import urllib.request

    class Refusing(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *arguments: object) -> None:
            return None

    return urllib.request.build_opener(Refusing, urllib.request.HTTPSHandler(context=tls))


def _server(url: str) -> str:
    """The part of a URL that may be shown: scheme, host and port. A ValueError if it isn't a URL for HTTP."""
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname:
            return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")
    raise ValueError('Notify: the url (not shown, it may hold a secret) must be like "https://host/path"')


@atexit.register
def _wait() -> None:
    """Waits for the messages under way when the process ends."""
    for thread, (until, callback) in list(_under_way.items()):
        thread.join(max(0.0, until - time.monotonic()))
        # The thread would report it too late; or never, if the server sends a byte at a time.
        if thread.is_alive():
            callback.report_silence()
