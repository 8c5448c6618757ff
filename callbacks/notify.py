"""Notify: tells a webhook how the run goes, in the background."""

from __future__ import annotations

import atexit
import base64
import contextlib
import json
import threading
import time
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote, urlsplit

from callbacks.arguments import check, is_number
from callbacks.base import Callback, Run, shown_status
from callbacks.nearest import nearest
from callbacks.run_record import redaction
from callbacks.run_record.journal import jsonable

KINDS = ("end", "failure", "checkpoint")
"""The events of which a message can be sent."""
MOST = 8
"""So many messages are under way at most: while a server takes none, no more messages about checkpoints are sent."""

_under_way: dict[threading.Thread, float] = {}
"""The threads of messages, and until when the process may wait for each at its end."""


class Notify(Callback):
    """Posts a JSON object to a webhook: at the end of the run, when it fails, at each checkpoint.

    It has `text` (a line for people, which Slack and Mattermost show), `event` (see `on`), `task`, `run_directory`,
    `status`, `step`, `epoch`, `metrics`, `time`; and `reason`, or `error`. A server that is slow, down or unwilling is
    told once on stderr, and neither delays the run nor fails it; the process, at its end, waits for it for `timeout`
    at most. Redirects are not followed: the credentials go to the host of `url` and to no other. The URL is taken for
    a secret: nothing that is written shows more of it than its host.

    Args:
        url: where to post, http or https; a user and password in it are sent by basic authentication.
        on: of what messages are sent: `"end"`, `"failure"` and `"checkpoint"`.
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
        good = is_number(timeout, 0, 3600) and timeout > 0
        check(self, good, "give seconds > 0, at most 3600", timeout=timeout)
        self.timeout = timeout
        self.place = _place(url)
        parts = urlsplit(url)
        user, at, host = parts.netloc.rpartition("@")
        self._url = parts._replace(netloc=host).geturl()
        redaction.hidden |= {url, self._url}
        self._headers = {"Content-Type": "application/json", "User-Agent": "tfloop"}
        if at:
            self._headers["Authorization"] = "Basic " + base64.b64encode(unquote(user).encode()).decode()
        self._told = False

    def on_setup(self, run: Run) -> None:
        self._told = False

    def on_checkpoint(self, run: Run, reason: str) -> None:
        self._tell(run, "checkpoint", "running", reason)

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._tell(run, "failure", "failed", f"{type(error).__name__}: {error}")

    def on_fit_end(self, run: Run, status: str) -> None:
        if status != "failed":
            self._tell(run, "end", status, run.stop_reason)

    def _tell(self, run: Run, kind: str, status: str, why: str) -> None:
        if kind not in self.on or (kind == "checkpoint" and len(_under_way) >= MOST):
            return
        metrics = run.history[-1] if run.history else {}
        what = kind if kind == "checkpoint" else shown_status(status)
        text = f"{run.info['task']}: {what} at step {run.progress.step:,}"
        text += f" ({why})" * bool(why) + "".join(
            f", {name} {value:.4g}" for name, value in metrics.items() if name not in ("epoch", "step", "examples")
        )
        message = {
            "text": text, "event": kind, "task": run.info["task"], "run_directory": str(run.directory),
            "status": status, "step": run.progress.step, "epoch": run.progress.epoch, "metrics": metrics,
            "time": time.time(), "error" if kind == "failure" else "reason": why,
        }  # fmt: skip
        body = json.dumps(jsonable(redaction.redact(message)), allow_nan=False).encode()
        thread = threading.Thread(target=self._post, args=(body,), name="notify", daemon=True)
        _under_way[thread] = time.monotonic() + self.timeout
        try:
            thread.start()
        except RuntimeError as error:
            del _under_way[thread]
            self._trouble(str(error))

    def _post(self, body: bytes) -> None:
        import http.client
        import urllib.error
        import urllib.request

        try:
            request = urllib.request.Request(self._url, body, self._headers)  # noqa: S310 - it is http or https
            with _opener().open(request, timeout=self.timeout):
                pass
        except urllib.error.HTTPError as error:
            error.close()
            redirects = 300 <= error.code < 400
            self._trouble(f"it answered {error.code}" + ", a redirect, which is never followed" * redirects)
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = getattr(error, "reason", error)
            text = getattr(why, "strerror", None) or type(why).__name__  # not all of it, which may hold the URL
            self._trouble(f"no answer within {self.timeout:g} s" if isinstance(why, TimeoutError) else text)
        finally:
            del _under_way[threading.current_thread()]

    def _trouble(self, reason: str) -> None:
        if not self._told:
            self._told = True
            redaction.tell(f"warning: the webhook at {self.place} was not told ({reason})")


def _opener() -> Any:
    """What posts. It hands a redirect back as an error: another host must not get the credentials."""
    import urllib.request

    class Refusing(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *arguments: Any) -> None:
            return None

    return urllib.request.build_opener(Refusing)


def _place(url: str) -> str:
    """The part of a URL that may be shown.

    Raises:
        ValueError: it is none to which one can post.
    """
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname:
            return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")
    raise ValueError('Notify: the url (not shown, it may hold a secret) must be like "https://host/path"')


@atexit.register
def _wait() -> None:
    """Gives messages under way their time, when everything else is over."""
    for thread, until in list(_under_way.items()):
        thread.join(max(0.0, until - time.monotonic()))
