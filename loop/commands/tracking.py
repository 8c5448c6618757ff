"""MLflow as the command line has it: the tracker that `train` asks for, and what `sync` delivers afterwards."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from callbacks import MLflowTracker
from callbacks.files import check, is_plain, opened, read_json
from callbacks.mlflow.tracker import STATE
from callbacks.mlflow.tracker import store as store_of
from callbacks.progress import counted
from callbacks.run_record import journal
from callbacks.run_record.record import printable
from callbacks.run_record.redaction import HIDDEN, redact, tell
from callbacks.run_record.report import NAME as REPORT
from loop.checkpoint import lock
from loop.errors import TrainingError, UsageError
from loop.run import trust

if TYPE_CHECKING:
    from callbacks.mlflow.delivery import Delivery


def tracker(
    track: str | None,
    wait: float | None = None,
    tags: Sequence[str] = (),
    log_model: bool = False,
    register: str | None = None,
    no_uri: str = ", or off",
) -> MLflowTracker | None:
    """The tracker of a run, by what was typed; None: `--track off`. `no_uri`: what an error advises besides a URI.

    Raises:
        UsageError: a value is wrong, or contradicts another one.
    """
    typed = {"--tag": tags, "--log-model": log_model, "--register": register}
    if track == "off":
        for option, value in typed.items():
            if value:
                raise UsageError(f"--track off with {option}: leave one of them out")
    for text in tags:
        if not re.fullmatch(r"[^=]+=.*", text, re.DOTALL):
            raise UsageError(f"--tag {text}: give KEY=VALUE")
    try:
        made = MLflowTracker(
            None if track == "off" else track,
            wait=60.0 if wait is None else wait,
            tags=dict(text.split("=", 1) for text in tags),
            log_model=log_model,
            register=register,
        )
    except ValueError as error:
        # "MLflowTracker(wait=...): give ...": the same text, with the option in place of the argument.
        what, fix = str(error).removeprefix("MLflowTracker(").split("): ", 1)
        names = {"uri": f"track {redact(track)}", "register": f"register {register}", "wait": f"track-wait {wait}"}
        if what.startswith("uri"):
            fix += no_uri
        raise UsageError(f"--{names[what.partition('=')[0]]}: {fix}") from None
    return None if track == "off" else made


def seen(track: str | None, run_dir: str | None) -> str:
    """Where a browser shows a run: by `tfloop ui` if it was tracked in the default store, else its report."""
    if run_dir is None:  # a dry run
        return ""
    if track != "off" and store_of(track) == store_of(None):
        return "tfloop ui"
    report = Path(run_dir) / REPORT
    return printable(str(report)) if report.exists() else ""


def deliver(run_dir: Path, track: str | None, trusted: bool = False) -> None:
    """Delivers what MLflow still lacks of a run that is over, and of the trials of a sweep.

    Without a store, it is the one that the run was delivered to, if this user has made the run here; or, where the
    directory is trusted, the one that it names itself, without asking who wrote it.

    Raises:
        UsageError: it isn't a run, or under way, or there is no such store.
        UnsafeFileError: its mlflow.json isn't a file.
        TrainingError: the store did not take everything.
    """
    if tracker(track, no_uri="") is None:
        raise UsageError("--track off: there is nothing to deliver to: leave it out, or give a URI")
    if not _is_deliverable(run_dir):
        raise UsageError(f"{run_dir} isn't a run directory: it must have run.json and {journal.NAME}")
    store = _deliver_rest(run_dir, track, trusted)
    # The trials of a sweep go where it has gone: their own directories aren't asked.
    if "sweep" in read_json(run_dir / "run.json"):
        for trial in filter(_is_deliverable, sorted(run_dir.glob("trial-*"))):
            try:
                _deliver_rest(trial, store, trusted)
            except UsageError as error:  # a trial that still runs, though the sweep was killed
                tell(f"warning: {error}")


def _is_deliverable(run_dir: Path) -> bool:
    """Whether a directory is a run's, with a journal that can be delivered."""
    return is_plain(run_dir / journal.NAME) and "task" in read_json(run_dir / "run.json")


def _deliver_rest(run_dir: Path, track: str | None, trusted: bool) -> str:
    """Delivers what MLflow still lacks of one run, and returns the store."""
    from callbacks.mlflow import delivery

    check(run_dir / STATE)  # it is written, too
    if not (run_dir / STATE).exists() and not os.access(run_dir, os.W_OK):
        raise UsageError(f"{run_dir} can't be written, and {STATE} must be: make it writable, or deliver a copy of it")
    store = _store(run_dir, track, trusted)
    rest = delivery.Delivery(run_dir.resolve(), store)
    with _sole_deliverer(run_dir):
        tell(f"asking MLflow at {redact(store)} what it has")
        for is_last in (False, True):  # a connection that was closed while idle isn't a reason to fail
            try:
                _send(rest)
                break
            except Exception as error:  # a store may fail in any way
                rest.disconnect()
                if is_last:
                    text = f"MLflow at {redact(store)} did not take everything ({delivery.reason(error)})"
                    if not delivery.is_refusal(error):
                        text += "; try again later"
                    raise TrainingError(text) from None
    for text in rest.warnings():
        tell(f"warning: {text}")
    files = f" and {rest.artifacts:,} artifacts" if rest.artifacts else ""
    print(f"delivered {rest.count:,} points{files} to {redact(store)}, run {rest.run_id}")
    return store


def _send(rest: Delivery) -> None:
    """Delivers what the store doesn't have yet: it is asked anew each time."""
    count = rest.pending()
    tell(f"delivering {count:,} points")
    with counted(count, "point", sys.stderr) as advance:
        rest.deliver(advance)
    rest.close()


def _store(run_dir: Path, track: str | None, trusted: bool) -> str:
    """The store to which a run is delivered; refuses one that only its directory names."""
    from callbacks.mlflow import tracker

    uri = track or read_json(run_dir / tracker.STATE).get("uri")
    # A directory may come from anyone, and a server that it names learns of this machine: who made it must be known.
    is_trusted = track or trusted or uri in (None, redact(tracker.store(None))) or trust.may_contact(run_dir, uri)
    if not is_trusted:
        raise UsageError(
            f"{run_dir}: you haven't trained there on this machine, and the store that it names ({str(uri)!r:.200}) "
            "isn't contacted unasked: give it as --track URI, or --trust if that directory is yours"
        )
    if not track and uri and HIDDEN in uri:  # secrets are not written down, but the environment may have them
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            where = run_dir / tracker.STATE
            raise UsageError(f"{where} has the store's URI without its secrets: give it as --track URI")
    store = tracker.store(uri)
    trust.note_store(run_dir, redact(store))  # what was given once need not be given again
    return store


@contextlib.contextmanager
def _sole_deliverer(run_dir: Path) -> Iterator[None]:
    """Holds the lock of a run directory, if it has one: a run that is under way delivers by itself."""
    path = run_dir / lock.NAME
    if not os.path.lexists(path):  # not `exists`: `opened` refuses a link, wherever it points
        yield
        return
    with os.fdopen(opened(path, os.O_RDWR), "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = read_json(path)
            who = ""
            if {"pid", "host"} <= set(holder):
                who = f" (pid {holder['pid']}, host {holder['host']})"
            raise UsageError(f"{run_dir}: the run is under way{who}: it delivers by itself") from None
        yield
