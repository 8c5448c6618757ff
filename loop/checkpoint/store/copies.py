"""Copies: brings a run from the store to this machine, every byte verified."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from callbacks.files import fsync_directory, read_json, replacing, write_json
from callbacks.run_record.journal import NAME as JOURNAL
from callbacks.run_record.redaction import tell
from callbacks.types import JsonObject
from loop.checkpoint import lock
from loop.checkpoint.store import address
from loop.checkpoint.store.bucket import Bucket, DamagedError, MissingError, Patience, StoreError
from loop.checkpoint.store.lease import TTL, Lease, State, believed, object_keys, positions
from loop.checkpoint.store.mirror import Mirror, wait_at_end
from loop.errors import UsageError

LEASE = "TFLOOP_STORE_LEASE"
"""Environment variable: after how many seconds of silence another machine may take a run over; 30."""
_LOOK = 0.5
"""Seconds between two looks at a lease."""


class NoRunError(UsageError):
    """There is no run at a URL."""


@contextlib.contextmanager
def mirrored(url: str) -> Iterator[Path]:
    """Within it, this process alone writes to the run at a URL, and what its spool holds is delivered.

    Yields:
        The run directory on this machine, with the run as the store has it.

    Raises:
        UsageError: another process has the run, and renews its lease.
        StoreError: the store doesn't answer, or has other bytes than were written.
    """
    directory = address.directory_of(url, address.SPOOLS)
    address.make(directory.parent)
    # The lock of the spool, for processes of this machine; then the lease, for those of all.
    with lock.locked(directory.parent):
        bucket = Bucket(url, make=True)
        about = read_json(directory.parent / address.ABOUT)
        ended = about.get("nonce") if about.get("ended") else None
        lease = _taken(bucket, ended, functools.partial(_prepare_spool, url, directory))
        mirror = Mirror(bucket, lease, directory)
        mirror.note(delivered=False)
        directory.mkdir(exist_ok=True)
        try:
            _bring_as_owner(bucket, lease, directory)
        except BaseException:  # Ctrl-C and SIGTERM, too: this process gives the run up, and the next start must know
            with contextlib.suppress(OSError):  # must not hide the error
                mirror.note(delivered=False, ended=True)
            raise
        mirror.start()
        try:
            yield directory
        finally:
            mirror.close()


def _prepare_spool(url: str, directory: Path, nonce: str, before: State | None) -> None:
    """Puts a spool aside that is older than the store, and notes who goes on from whom.

    Args:
        url: of the run.
        directory: its spool.
        nonce: that of this process, which has taken the lease.
        before: the state from which it goes on.
    """
    note = directory.parent / address.ABOUT
    about = read_json(note)
    whose = before.nonces if before else {""}
    if directory.exists() and whose.isdisjoint((about.get("nonce", ""), about.get("before"))):
        if before:
            # Another process had the lease in between: what is here may not be the beginning of what the store has.
            aside = directory.with_name(f"{directory.name}.stale-{secrets.token_hex(4)}")
            directory.rename(aside)
            tell(f"note: another machine has gone on with {url}: what this one had is kept in {aside}")
        else:  # an emptied bucket: a start from step 0 would lose what is here
            tell(f"note: {url}: the store has no run any more: going on with what this machine has")
    # Both, and before the store has the first state of this process: after a kill around that moment, the next start
    # finds one of the two there, and goes on with what is here. It may be more than was delivered.
    taken_from = before.owner.get("nonce") if before else ""
    write_json(note, {"url": url, "nonce": nonce, "before": taken_from, "delivered": False})


def _taken(
    bucket: Bucket,
    ended: str | None = None,
    prepare: Callable[[str, State | None], object] = lambda nonce, before: None,
) -> Lease:
    """The lease of a run, for this process; waits for an owner that doesn't renew it.

    Args:
        bucket: that of the run.
        ended: the nonce of an owner that has ended without the store; its process may be alive, as a notebook's is.
        prepare: called with the nonce of this owner, and the state of the one before; see `Lease.try_take`.

    Raises:
        UsageError: its owner renews it.
    """
    owner = {**lock.about_this_process(), "nonce": secrets.token_hex(8)}
    lease = Lease(bucket, owner, ttl())
    first: State | None = None
    patience = Patience(wait_at_end())

    def is_gone(owner: JsonObject) -> bool:
        return (ended is not None and owner.get("nonce") == ended) or lock.is_dead(owner)

    while True:
        try:
            newest = lease.try_take(is_gone, functools.partial(prepare, owner["nonce"]))
        except StoreError as error:
            patience.wait(error)
            continue
        if newest is None:
            return lease
        if newest.owner:  # else the state has changed while it was read
            who = f"process {newest.owner.get('pid')} on {newest.owner.get('host')}"
            if first is None:
                first = newest
                tell(f"{bucket.url} is in use by {who}: waiting up to {newest.ttl:g} s for a sign of it")
            elif newest.position != first.position:  # a new state since the last look: its owner still runs
                who += f" since {newest.owner.get('time')}"
                raise UsageError(f"the run {bucket.url} is in use by {who}: wait for it, or give another URL")
        time.sleep(_LOOK)


def _bring_as_owner(bucket: Bucket, lease: Lease, directory: Path) -> None:
    """Brings the run of a lease, and renews the lease meanwhile; waits for a store that doesn't answer.

    Raises:
        StoreError: it still doesn't, or has other bytes than were written.
        LeaseLostError: another process has taken the lease.
    """
    assert lease.state is not None
    patience = Patience(wait_at_end())
    while True:
        try:
            bring(bucket, lease.state, directory, lease.renew)
            return
        except (MissingError, DamagedError):  # the store has answered: waiting doesn't help
            raise
        except StoreError as error:
            patience.wait(error)


def ttl() -> float:
    """After how many seconds of silence a run may be taken over."""
    try:
        return max(1.0, float(os.environ.get(LEASE, TTL)))
    except ValueError:
        return TTL


def bring(bucket: Bucket, state: State, directory: Path, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Brings what a directory lacks of a run. What is there stays as it is: it is of the same lease, or newer.

    Args:
        bucket: that of the run.
        state: what the run is.
        directory: the run directory on this machine.
        meanwhile: is called after each part of a file.

    Raises:
        StoreError: the store has other bytes than were written.
    """
    by_checkpoint: dict[str, JsonObject] = {}
    for name, about in state.files.items():
        parts = name.split("/")
        if parts[0] == "checkpoints" and len(parts) == 3:
            by_checkpoint.setdefault(parts[1], {})[parts[2]] = about
        elif not (directory / name).exists():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            bucket.download(about["key"], directory / name, about["bytes"], about["sha256"], meanwhile)
    # Before the checkpoints, which rely on it.
    _bring_journal(bucket, state, directory, meanwhile)
    checkpoints = directory / "checkpoints"
    for step in sorted(by_checkpoint):
        if not (checkpoints / step).exists():
            _bring_checkpoint(bucket, checkpoints / step, by_checkpoint[step], meanwhile)


def _bring_checkpoint(bucket: Bucket, path: Path, files: JsonObject, meanwhile: Callable[[], object]) -> None:
    """Brings a checkpoint, under another name until it is complete."""
    partial = path.with_name(path.name + ".tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for name, about in files.items():
            bucket.download(about["key"], partial / name, about["bytes"], about["sha256"], meanwhile)
    except DamagedError as error:  # an older one may be good
        shutil.rmtree(partial)
        tell(f"warning: checkpoint passed over: {error}")
        return
    partial.rename(path)
    fsync_directory(path.parent)


def _bring_journal(bucket: Bucket, state: State, directory: Path, meanwhile: Callable[[], object]) -> None:
    """Brings the journal, or its end if the directory has the beginning."""
    path = directory / JOURNAL
    have = path.stat().st_size if path.exists() else 0
    total = sum(segment["bytes"] for segment in state.journal)
    if have >= total:
        return
    with replacing(path, durable=True, aside=path.with_name(f"{path.name}.new.tmp")) as out:
        for segment in state.journal:
            part = path.with_name(f"{path.name}.segment.tmp")
            bucket.download(segment["key"], part, segment["bytes"], segment["sha256"], meanwhile)
            out.write(part.read_bytes())
            part.unlink()
    fsync_directory(directory)


def copy(url: str, checkpoints: bool = True) -> Path:
    """A copy of a run for reading, as the store has it now.

    Args:
        url: of the run.
        checkpoints: whether they are wanted, too.

    Raises:
        NoRunError: there is no run.
        StoreError: the store doesn't answer.
    """
    directory = address.directory_of(url, address.COPIES)
    address.make(directory.parent)
    with lock.locked(directory.parent, wait=60):
        bucket = Bucket(url)
        if address.url_of_copy(directory) is None:  # nothing says of which state these files are
            shutil.rmtree(directory, ignore_errors=True)
        before = None
        for _ in range(5):
            state = believed(bucket)
            if state is None:
                raise NoRunError(f"{url}: no run there")
            try:
                _refresh(bucket, state, directory, checkpoints)
                return directory
            except MissingError:
                if state.position == before:  # else it was pruned in the meantime
                    raise
                before = state.position
    raise StoreError(f"{url}: it changes faster than it can be read")


def copies_below(url: str) -> Path:
    """A folder with copies of all runs right below a URL, without their checkpoints.

    Raises:
        StoreError: the store doesn't answer.
    """
    folder = address.place(f"{url}/", address.COPIES)
    address.make(folder)
    names = runs_below(url)
    for name in names:
        try:
            copy(f"{url}/{address.quoted(name)}", checkpoints=False)
        except NoRunError:  # it has only begun, or was removed just now
            continue
        except (DamagedError, MissingError) as error:  # one alone must not hide the others
            tell(f"warning: {error}")
    for path in folder.iterdir():
        if path.is_dir() and path.name not in names:  # it was removed
            shutil.rmtree(path)
    return folder


def _refresh(bucket: Bucket, state: State, directory: Path, checkpoints: bool) -> None:
    """Makes a copy what a state says. Checkpoints that aren't wanted, but are there already, stay."""
    index = address.index_of(directory)
    had = read_json(index).get("files", {})
    directory.mkdir(exist_ok=True)
    files: JsonObject = {}
    # First what has changed since the last copy is removed: `bring` leaves alone what is there.
    for name in had:
        if had[name] == state.files.get(name):
            if (directory / name).exists():  # else an interrupted call has not brought it
                files[name] = had[name]
            continue
        parts = name.split("/")
        if parts[0] == "checkpoints" and len(parts) == 3:  # as a whole
            shutil.rmtree(directory / "checkpoints" / parts[1], ignore_errors=True)
        else:
            (directory / name).unlink(missing_ok=True)
    # What is longer here than in the store isn't the beginning of it.
    if sum(segment["bytes"] for segment in state.journal) < _size(directory / JOURNAL):
        (directory / JOURNAL).unlink()
    sizes: dict[str, int] = {}
    for name in state.files:
        if is_of_checkpoint := name.startswith("checkpoints/"):
            step = name.split("/")[1]
            sizes[step] = sizes.get(step, 0) + state.files[name]["bytes"]
        if checkpoints or not is_of_checkpoint:
            files[name] = state.files[name]
    # Before they are brought: what an interrupted call has brought is then removed once it has changed in the store.
    write_json(index, {"url": bucket.url, "files": files, "checkpoints": sizes})
    bring(bucket, dataclasses.replace(state, files=files), directory)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def runs_below(url: str) -> list[str]:
    """The names of the runs right below a URL."""
    bucket = Bucket(url)
    return [name for name in bucket.folders() if positions(bucket, name)]


def deliver(url: str) -> bool:
    """Delivers what a run of this machine has left to deliver; returns whether the store took all of it.

    Raises:
        UsageError: this machine has nothing of that run, or the run is under way.
    """
    directory = address.directory_of(url, address.SPOOLS)
    if not directory.exists():
        raise UsageError(f"{url}: this machine has trained nothing there, so that there is nothing to deliver")
    with mirrored(url):
        pass
    return bool(read_json(directory.parent / address.ABOUT).get("delivered"))


def bucket_of(url: str) -> Bucket:
    """The bucket of a run.

    Raises:
        NoRunError: there is no run.
        StoreError: the store doesn't answer.
    """
    bucket = Bucket(url)
    if believed(bucket) is None:
        raise NoRunError(f"{url}: no run there")
    return bucket


def remove(url: str) -> None:
    """Removes a run from the store, and what this machine has of it. Files of it may be missing there.

    Raises:
        NoRunError: there is no run.
        UsageError: it is under way.
    """
    bucket = bucket_of(url)
    lease = _taken(bucket)
    assert lease.state is not None
    bucket.delete(bucket.keys("data"))
    # Its states go last: what is left of a run can be removed later.
    bucket.delete(bucket.keys("state"))
    shutil.rmtree(address.place(url, address.SPOOLS), ignore_errors=True)
    shutil.rmtree(address.directory_of(url, address.COPIES), ignore_errors=True)


def leftovers(url: str) -> list[str]:
    """The objects that a run which has ended should not have: its state doesn't name them.

    Raises:
        StoreError: the store doesn't answer.
    """
    bucket = Bucket(url)
    state = believed(bucket)
    named = {state.key, *object_keys(state.files, state.journal)} if state else set()
    return sorted(set(bucket.keys("")) - named)


def is_under_way(url: str) -> bool:
    """Whether a process has the lease of a run, as far as the store says."""
    state = believed(Bucket(url))
    return state is not None and not state.released
