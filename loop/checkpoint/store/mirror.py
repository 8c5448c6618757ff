"""Mirror: what a run writes on this machine is delivered to the store, by a thread, while the run goes on."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from io import BufferedReader
from pathlib import Path
from typing import ParamSpec

from callbacks.files import is_same, read, read_json, reading, write_json
from callbacks.run_record.journal import NAME as JOURNAL
from callbacks.run_record.redaction import mask, tell
from callbacks.types import JsonObject
from loop.checkpoint import checkpoint_files
from loop.checkpoint.background import lower_priority
from loop.checkpoint.lock import NAME as LOCK
from loop.checkpoint.store.address import ABOUT
from loop.checkpoint.store.bucket import Bucket, Digest, StoreError, digest_of_file
from loop.checkpoint.store.lease import Lease, LeaseLostError, object_keys

WAIT = "TFLOOP_STORE_WAIT"
"""Environment variable: for how many seconds the end of a run may wait for the store; 60."""
_PAUSE = 1.0
"""Seconds between two looks at the run directory."""
_OTHERS_EVERY = 30.0
"""Seconds between two looks at files that are neither checkpoints nor the journal."""
_MOST_SEGMENTS = 40
"""How many segments the journal may have before they are written as one."""
_OUTAGE_PAUSE = 5.0
"""Seconds between two tries, while the store doesn't answer."""

P = ParamSpec("P")

# By run directory: a run asks whether it still has its lease, and doesn't know its mirror.
_active: dict[Path, Mirror] = {}


class Mirror:
    """Delivers the files of one run directory.

    Checkpoints first, their manifests last; then the journal, in segments; then the other files. After each checkpoint,
    a state of the lease says what is there. What isn't in that state is removed after it is written.

    Args:
        bucket: the store.
        lease: which this process has.
        directory: the run directory on this machine.
    """

    def __init__(self, bucket: Bucket, lease: Lease, directory: Path) -> None:
        assert lease.state is not None
        self._bucket = bucket
        self._lease = lease
        self._directory = directory
        self._files: JsonObject = dict(lease.state.files)
        self._journal = list(lease.state.journal)
        self._believed = (lease.state.files, lease.state.journal)  # what the last state says
        self._seen: dict[str, tuple[int, int]] = {}  # time and size of what was delivered, to skip what hasn't changed
        self._others_at = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        # The reason why the store can't be reached. The user sees it once. While the store can be reached, it is "".
        self._outage = ""
        self.lost: LeaseLostError | None = None

    def start(self) -> None:
        """Begins to deliver."""
        _active[self._directory] = self
        self._thread.start()

    def _run(self) -> None:
        lower_priority()
        pause = _PAUSE
        while not self._stop.wait(pause):
            pause = _PAUSE if self._try() else _OUTAGE_PAUSE
            if self.lost is not None:
                return

    def _try(self, last: bool = False) -> bool:
        """Delivers what is new; returns whether the store took all of it."""
        try:
            self.deliver(last)
        except LeaseLostError as error:
            self.lost = error
            tell(f"warning: {error}")
            return False
        except Exception as error:  # whatever it is: the run goes on
            if not self._outage:
                tell(f"warning: {mask(str(error))}: what isn't delivered is kept on this machine, and tried again")
            self._outage = mask(str(error)) or type(error).__name__
            return False
        if self._outage:
            tell(f"note: {self._bucket.url} takes what it is sent again")
        self._outage = ""
        return True

    def deliver(self, last: bool = False) -> None:
        """Delivers what is new.

        Args:
            last: whether the run has ended: all its files are looked at, and the lease is given back.

        Raises:
            StoreError: the store did not take it.
            LeaseLostError: another process has the run now.
        """
        self._lease.check()
        if last:
            self._forget_lost()
        # Before the checkpoints are listed: what has taken the place of one that is gone is then among them.
        gone = [name for name in self._files if not (self._directory / name).exists()]
        self._deliver_checkpoints()
        self._deliver_journal()
        self._deliver_others(at_once=last or self._has_news)
        self._forget(gone)
        if self._has_news or last or self._lease.is_due:
            self._publish(released=last)
        if last:
            self.sweep()
            self.note(delivered=True)

    @property
    def _has_news(self) -> bool:
        """Whether there is something that no state has yet."""
        return (self._files, self._journal) != self._believed

    def _publish(self, released: bool = False) -> None:
        """Writes the state, and removes what it no longer has."""
        self._lease.publish(self._files, self._journal, released)
        files, journal = self._believed
        self._believed = (dict(self._files), list(self._journal))

        # Removed only now: until the new state was written, the old one named these objects.
        unnamed = object_keys(files, journal) - object_keys(self._files, self._journal)
        self._bucket.delete(sorted(unnamed))

    def _forget_lost(self) -> None:
        """Forgets what others have removed from the store, as a rule of the bucket may: it is delivered again."""
        lost = object_keys(self._files, self._journal) - set(self._bucket.keys("data"))
        # All files of a checkpoint are delivered again: its manifest stands for the rest.
        folders = {name.rpartition("/")[0] for name, about in self._files.items() if about["key"] in lost}
        for name in list(self._files):
            in_folder = name.startswith("checkpoints/") and name.rpartition("/")[0] in folders
            if in_folder or self._files[name]["key"] in lost:
                del self._files[name]
                self._seen.pop(name, None)
        if any(segment["key"] in lost for segment in self._journal):
            self._journal = []

    def _deliver_checkpoints(self) -> None:
        """Delivers each complete checkpoint that the store hasn't, the newest first."""
        for path in reversed(checkpoint_files.complete(self._directory / "checkpoints")):
            manifest = path / checkpoint_files.MANIFEST
            name = self._name(manifest)
            with contextlib.suppress(FileNotFoundError):  # the run has removed it in the meantime
                stamp = _stamp(manifest)
                if self._seen.get(name) == stamp:
                    continue
                if self._files.get(name, {}).get("sha256") != digest_of_file(manifest).sha256:
                    self._deliver_checkpoint(path)
                self._seen[name] = stamp

    def _deliver_checkpoint(self, path: Path) -> None:
        """Delivers one checkpoint, and publishes it."""
        delivered = {}
        with _opened(path) as files:
            for name, file in files.items():
                delivered[self._name(path / name)] = self._upload(path / name, file)
        self._deliver_journal()  # a checkpoint relies on it
        # All at once, at the end. What was here under this name may have had more files: parts of more workers.
        for name in list(self._files):
            if name.startswith(f"{self._name(path)}/"):
                del self._files[name]
        self._files |= delivered
        self._publish()

    def _deliver_journal(self) -> None:
        """Delivers the lines of the journal that the store hasn't, as a new segment."""
        path = self._directory / JOURNAL
        delivered = sum(segment["bytes"] for segment in self._journal)
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            return
        if size < delivered:
            raise StoreError(f"{path} is shorter than what was delivered of it: it was changed by hand")

        # The new lines alone; or all lines, as one segment in place of many.
        earlier = self._journal
        start = delivered
        if len(self._journal) >= _MOST_SEGMENTS:
            earlier = []
            start = 0
        with path.open("rb") as file:
            file.seek(start)
            content = file.read(size - start)
        content = content[: content.rfind(b"\n") + 1]  # whole lines: the last one may be being written
        end = start + len(content)
        if end <= delivered:
            return
        key = f"data/{self._lease.counter:08d}/{JOURNAL}.{start:012d}-{end:012d}"
        digest = _sent(self._lease, self._bucket.put, key, content)
        self._journal = [*earlier, _about(key, digest)]

    def _deliver_others(self, at_once: bool) -> None:
        """Delivers the other files that have changed."""
        now = time.monotonic()
        if not at_once and now - self._others_at < _OTHERS_EVERY:
            return
        self._others_at = now
        for path in others(self._directory):
            name = self._name(path)
            with contextlib.suppress(FileNotFoundError):  # the run has removed it in the meantime
                stamp = _stamp(path)
                if self._seen.get(name) == stamp:
                    continue
                content = read(path, most=stamp[1] + (1 << 20), shared=True)  # it may grow while it is sent
                digest = _sent(self._lease, self._bucket.put, self._key(name, content), content)
                self._files[name] = _about(self._key(name, content), digest)
                self._seen[name] = stamp

    def _forget(self, gone: list[str]) -> None:
        """Forgets files that the run has removed; checkpoints only if the store has one that the run has, too."""
        if not self._directory.is_dir():  # it was deleted or moved under the run, which has removed none of them
            return
        # A file may have come back. And a file that isn't in the state any more is no reason to forget its checkpoint.
        gone = [name for name in gone if name in self._files and not (self._directory / name).exists()]
        paths = checkpoint_files.complete(self._directory / "checkpoints")
        may_forget = any(self._name(path / checkpoint_files.MANIFEST) in self._files for path in paths)
        # A checkpoint that was removed one file after the other is gone as a whole.
        folders = {name.rpartition("/")[0] for name in gone if name.startswith("checkpoints/")}
        for name in list(self._files):
            is_gone = name in gone or name.rpartition("/")[0] in folders
            if is_gone and (may_forget or not name.startswith("checkpoints/")):
                del self._files[name]
                self._seen.pop(name, None)

    def _upload(self, path: Path, file: BufferedReader) -> JsonObject:
        """Puts a file that doesn't change, and is open; its path may be gone."""
        folder = f"data/{self._lease.counter:08d}/{self._name(path)}"
        # A checkpoint of the same step may be written again: each has a name of its own.
        key = f"{folder}.{os.fstat(file.fileno()).st_mtime_ns:x}"
        return _about(key, _sent(self._lease, self._bucket.upload, key, file))

    def _key(self, name: str, content: bytes) -> str:
        # A store takes no control characters, no bytes that aren't UTF-8, and not any length. The state has the name.
        if not name.isprintable() or len(os.fsencode(name)) > 200:
            name = hashlib.sha256(os.fsencode(name)).hexdigest()
        return f"data/{self._lease.counter:08d}/{name}.{hashlib.sha256(content).hexdigest()[:16]}"

    def _name(self, path: Path) -> str:
        return path.relative_to(self._directory).as_posix()

    def sweep(self) -> None:
        """Removes the objects that no state has, of uploads that were cut off: of this owner, and of earlier ones."""
        kept = object_keys(self._files, self._journal)
        leftovers = []
        for key in self._bucket.keys("data"):
            counter = key.split("/")[1]
            if key not in kept and counter.isdigit() and int(counter) <= self._lease.counter:
                leftovers.append(key)
        self._lease.check()
        self._bucket.delete(leftovers)

    def close(self) -> None:
        """Delivers the rest, as far as the store takes it in time."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        # From the end of the thread on, which may be in the middle of a large file.
        deadline = time.monotonic() + wait_at_end()
        try:
            while self.lost is None:
                if self._try(last=True):
                    tell(f"delivered to {self._bucket.url}")
                    return
                if time.monotonic() >= deadline or self.lost is not None:
                    break
                time.sleep(min(_PAUSE, max(0.0, deadline - time.monotonic())))
            self._tell_what_is_left()
            # Its lease is still there: only the store can end it. Without this note, the next start waits for a sign.
            with contextlib.suppress(OSError):
                self.note(delivered=False, ended=True)
        finally:
            _active.pop(self._directory, None)

    def _tell_what_is_left(self) -> None:
        left = []
        for path in checkpoint_files.complete(self._directory / "checkpoints"):
            if self._name(path / checkpoint_files.MANIFEST) not in self._believed[0]:
                left.append(path.name)
        what = f"the checkpoints {', '.join(left)} aren't" if left else "the end of the run isn't"
        why = self.lost or self._outage
        # After another process has taken the run over, nothing is delivered any more.
        fix = "" if self.lost else f"; deliver what is left: tfloop sync {self._bucket.url}"
        tell(f"warning: {what} confirmed by the store ({why}){fix}")

    def note(self, delivered: bool, ended: bool = False) -> None:
        """Records, beside the run directory, what the next start on this machine has to know."""
        assert self._lease.state is not None
        owner = self._lease.state.owner
        about = {"url": self._bucket.url, "nonce": owner["nonce"], "before": owner["author"]}
        write_json(self._directory.parent / ABOUT, {**about, "delivered": delivered, "ended": ended})


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[dict[str, BufferedReader]]:
    """The files of a checkpoint by name, its manifest last: what has a manifest in the store is whole.

    All are open before the first one is sent, since the run may remove the checkpoint meanwhile. On a slow line it
    removes each one before all of it is sent.

    Raises:
        FileNotFoundError: the run has removed or replaced it.
    """
    manifest = path / checkpoint_files.MANIFEST
    with contextlib.ExitStack() as stack:
        last = stack.enter_context(reading(manifest, shared=True))
        files = {}
        for name in sorted(read_json(manifest).get("files", {})):
            files[name] = stack.enter_context(reading(path / name, shared=True))
        if not is_same(manifest, last.fileno()):
            raise FileNotFoundError(errno.ENOENT, "it was replaced", str(path))
        yield {**files, manifest.name: last}


def _sent(lease: Lease, send: Callable[P, Digest], *arguments: P.args, **more: P.kwargs) -> Digest:
    """What `send` returns. The lease is renewed before it, and meanwhile.

    A large file, or many small ones, may take longer than the lease lasts: another process would take a run that is
    alive.
    """
    lease.renew()
    with ThreadPoolExecutor(1, "upload", lower_priority) as pool:
        sent = pool.submit(send, *arguments, **more)
        while not wait([sent], timeout=_PAUSE).done:
            with contextlib.suppress(StoreError):  # of an outage, `send` will tell
                lease.renew()
        return sent.result()


def others(directory: Path) -> Iterator[Path]:
    """The files of a run directory that are neither checkpoints, nor the journal, nor of this machine alone."""
    for folder, folders, names in os.walk(directory):
        is_top = Path(folder) == directory
        skipped = ("checkpoints",) if is_top else ()
        # In place: `os.walk` goes into what is left of it.
        folders[:] = [name for name in folders if not name.endswith(".tmp") and name not in skipped]
        for name in names:
            of_machine = is_top and (name in (LOCK, JOURNAL) or name.startswith(".probe"))
            if of_machine or name.endswith(".tmp"):
                continue
            path = Path(folder) / name
            if path.is_file() and not path.is_symlink():
                yield path


def check(directory: Path) -> None:
    """Checks that a run still has its lease, if it has one.

    Raises:
        LeaseLostError: another process has taken it.
    """
    mirror = _active.get(directory)
    if mirror is not None and mirror.lost is not None:
        raise mirror.lost


def wait_at_end() -> float:
    """For how many seconds the end of a run may wait for the store."""
    try:
        return max(0.0, float(os.environ.get(WAIT, "60")))
    except ValueError:
        return 60.0


def _stamp(path: Path) -> tuple[int, int]:
    about = path.stat()
    return about.st_mtime_ns, about.st_size


def _about(key: str, digest: Digest) -> JsonObject:
    return {"key": key, "bytes": digest.bytes, "sha256": digest.sha256}
