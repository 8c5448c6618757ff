"""Lease: which process may write to a run in object storage. It takes the place of a lock.

A lease has a counter. It is taken by creating the object `state/<counter>/<0>`, which the store lets one process do.
From then on, that process alone writes `state/<counter>/<1>`, `<2>`, ..., each a new object with all that is to be
believed of the run: which objects are its files, with their hashes. Writing one also renews the lease.

The state of the greatest counter counts. So a process that was paused, and wakes up after another has taken the lease,
can write what it likes: its counter is smaller, and its own objects lie below its own counter.

After it has written a state, the owner looks whether there is a greater counter. If there is none, that state was there
before the next owner looks for it, and is what that one goes on from. Only then anything counts as delivered.

Clocks of two machines are never compared. A lease is over when its state hasn't changed for as long as its owner has
said, by the clock of the process that watches it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Callable
from pathlib import PurePosixPath

from callbacks.run_record.journal import NAME as JOURNAL
from callbacks.types import JsonObject
from loop.checkpoint import lock
from loop.checkpoint.store.bucket import Bucket, DamagedError, MissingError, StoreError
from loop.errors import TrainingError, UsageError

TTL = 30.0
"""Seconds without a new state after which another process may take the lease."""
_FOLDER = "state"
_KEY = re.compile(r"state/(\d{8})/(\d{8})\.json")
_OF_CHECKPOINT = re.compile(r"checkpoints/step-[0-9]{8,18}/[^/]+")

Position = tuple[int, int]
"""The counter of a lease, and the number of a state of it."""


class LeaseLostError(TrainingError):
    """Another process has taken the lease."""


@dataclasses.dataclass
class State:
    """A state of a run in the store."""

    position: Position  # where it stands
    owner: JsonObject  # host, pid, and more about the process that wrote it; see `nonces`
    ttl: float = TTL  # for how many seconds the owner is believed to live
    sealed: bool = False  # whether it says what is to be believed. The first state of a lease only takes it.
    released: bool = False  # whether the owner has ended
    # What is in the run directory: key, bytes and sha256 by path.
    files: JsonObject = dataclasses.field(default_factory=dict)
    # The segments of the journal, in order: key, bytes and sha256.
    journal: list[JsonObject] = dataclasses.field(default_factory=list)

    @property
    def key(self) -> str:
        """The name of its object."""
        counter, number = self.position
        return f"{_FOLDER}/{counter:08d}/{number:08d}.json"

    @property
    def nonces(self) -> set[str]:
        """Those of the owner that wrote it, and of the one that last changed what the run is."""
        return {str(self.owner.get("nonce")), str(self.owner.get("author", self.owner.get("nonce")))}

    def encoded(self) -> bytes:
        """As the store has it, with a hash."""
        body = dataclasses.asdict(self)
        return json.dumps({**body, "sha256": _digest(body)}).encode()


def positions(bucket: Bucket, run: str = "") -> list[Position]:
    """The positions of all states, the newest last; of the bucket's own run, or of one below its URL."""
    all_positions = []
    below = f"{run}/" if run else ""
    for key in bucket.keys(f"{below}{_FOLDER}"):
        match = _KEY.fullmatch(key.removeprefix(below))
        if match is not None:
            all_positions.append((int(match[1]), int(match[2])))
    return sorted(all_positions)


def read(bucket: Bucket, position: Position) -> State:
    """A state.

    Raises:
        MissingError: it isn't there any more.
        DamagedError: it isn't what was written, or what no run writes.
    """
    key = State(position, {}).key
    for _ in range(3):  # the answer may have been cut
        try:
            body = json.loads(bucket.get(key))
            digest = body.pop("sha256")
            if digest == _digest(body) and tuple(body["position"]) == position:
                _check(bucket, key, body)
                return State(**{**body, "position": position})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            pass
    raise DamagedError(f"{bucket.url}: {key} has changed since it was written")


def _check(bucket: Bucket, key: str, body: JsonObject) -> None:
    """Refuses what no run writes: anyone can compute the right hash.

    Raises:
        DamagedError: what is wrong.
        Exception: of any type; a part is missing, or is of another type.
    """
    problem = ""
    if not isinstance(body["owner"], dict) or not 0 <= body["ttl"] < math.inf:
        problem = "it names no owner"
    for about in [*body["files"].values(), *body["journal"]]:
        if type(about["bytes"]) is not int or about["bytes"] < 0 or not isinstance(about["key"] + about["sha256"], str):
            problem = f"{about!r:.60} describes no object"
    for name in body["files"]:
        if not _is_of_run(name) or not body["files"].keys().isdisjoint(map(str, PurePosixPath(name).parents)):
            problem = f"{name!r:.60} isn't a file name of a run"
    if problem:
        raise DamagedError(f"{bucket.url}: {key} wasn't written by a run ({problem}): remove that run from the store")


def _is_of_run(name: str) -> bool:
    """Whether a file of a run may have this name; it must not lead out of the run directory."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or "\0" in name or {"..", "."} & set(parts):
        return False
    if parts[0] == "checkpoints" and _OF_CHECKPOINT.fullmatch(name) is None:
        return False
    longest = max(map(len, map(os.fsencode, parts)))  # in bytes; no file system takes more than 255
    return longest <= 255 and parts[0] not in (lock.NAME, JOURNAL)


def believed(bucket: Bucket) -> State | None:
    """The state that says what a run is; None: there is no run."""
    for _ in range(20):
        try:
            # The newest may be of an owner that has only taken the lease: then the one before it is believed.
            for position in reversed(positions(bucket)):
                state = read(bucket, position)
                if state.sealed:
                    return state
            return None
        except MissingError:  # its owner has written another one in the meantime
            continue
    raise StoreError(f"{bucket.url}: its state changes faster than it can be read")


class Lease:
    """The right of this process to write to a run.

    Args:
        bucket: where the run is.
        owner: about this process, with a nonce that no other has.
        ttl: seconds after which another process may take the lease, if nothing is written.
        clock: seconds, only compared with each other.

    Attributes:
        state: what this process has last written; while it has the lease.
    """

    def __init__(
        self, bucket: Bucket, owner: JsonObject, ttl: float = TTL, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bucket = bucket
        self._owner = owner
        self._ttl = ttl
        self._clock = clock
        self._watched: Position | None = None
        self._since = 0.0
        self._renewed = 0.0
        # The nonce of the owner that last changed the files, whose machine may have more of the run than the store. If
        # later owners have changed nothing, that machine may still go on with what it has.
        self._author: object = owner["nonce"]
        self.state: State | None = None

    def try_take(
        self,
        is_dead: Callable[[JsonObject], bool] = lambda owner: False,
        prepare: Callable[[State | None], object] = lambda taken_from: None,
    ) -> State | None:
        """Takes the lease if it is free, or its owner is dead; else returns the state of the owner.

        Args:
            is_dead: whether an owner is a process of this machine that has ended.
            prepare: called with the state that it goes on from, None if there was none; before the store says that it
                does.

        Raises:
            UsageError: the store would let two processes take it.
        """
        there = positions(self._bucket)
        counter = 0
        if there:
            counter = there[-1][0]
            try:
                newest = read(self._bucket, there[-1])
            except MissingError:
                return State(there[-1], {})  # it has just changed
            if not self._is_free(newest, is_dead):
                return newest

        # The store lets one process alone create this object: that one has the lease.
        first = State((counter + 1, 0), self._owner, self._ttl)
        if not self._bucket.create(first.key, first.encoded()):
            return read(self._bucket, first.position)

        # Some stores ignore the condition. Such a one is found out here: it creates the object once more.
        if not self._bucket.creates_once(first.key, first.encoded()):
            self._bucket.delete([first.key])
            there = positions(self._bucket)
            if there and there[-1] > first.position:  # this process was paused for so long
                return State(there[-1], {})
            raise UsageError(
                f"{self._bucket.url}: this store ignores If-None-Match: it creates an object that is there, so that "
                "two starts of a run could both write: use a store with conditional writes"
            )
        self._seal(first, prepare)
        return None

    def _is_free(self, newest: State, is_dead: Callable[[JsonObject], bool]) -> bool:
        """Whether the lease can be taken from the owner of the newest state."""
        # Silence counts from when this process first saw that state, by its own clock.
        if newest.position != self._watched:
            self._watched = newest.position
            self._since = self._clock()
        is_silent = self._clock() - self._since >= newest.ttl
        is_own = newest.owner.get("nonce") == self._owner["nonce"]  # an answer of the store was lost
        return newest.released or is_silent or is_own or is_dead(newest.owner)

    def _seal(self, first: State, prepare: Callable[[State | None], object]) -> None:
        """Writes the first state that is to be believed: what the last owner has written."""
        # The time before the store is asked, here and below: others may count from any moment after it.
        begun = self._clock()
        before = believed(self._bucket)
        prepare(before)
        self._renewed = begun
        if before is None:
            self.state = first
        else:
            self._author = before.owner.get("author", before.owner.get("nonce"))
            self.state = dataclasses.replace(first, files=before.files, journal=before.journal)
        self.publish(self.state.files, self.state.journal)

    @property
    def counter(self) -> int:
        """Greater than that of all owners before."""
        assert self.state is not None
        return self.state.position[0]

    @property
    def is_due(self) -> bool:
        """Whether it is time to renew it."""
        return self._clock() - self._renewed >= self._ttl / 3  # early enough for a second try

    def renew(self) -> None:
        """Renews it if it is time, while there is nothing new to write.

        Raises:
            LeaseLostError: another process has it.
        """
        assert self.state is not None
        if self.is_due:
            self.publish(self.state.files, self.state.journal)

    def check(self) -> None:
        """Looks whether this process still has the lease, if it may have lost it.

        Raises:
            LeaseLostError: another one has it.
        """
        if self._clock() - self._renewed >= self._ttl / 2:  # before that, no other process can have taken it
            self._look(positions(self._bucket))

    def publish(self, files: JsonObject, journal: list[JsonObject], released: bool = False) -> None:
        """Writes what is to be believed of the run, which renews the lease.

        Raises:
            LeaseLostError: another process has the lease, and goes on from an earlier state.
        """
        assert self.state is not None
        begun = self._clock()
        counter, number = self.state.position
        if _content(files, journal) != _content(self.state.files, self.state.journal):
            self._author = self._owner["nonce"]
        owner = {**self._owner, "author": self._author}
        # A number is used once: what a failed call has sent may arrive later.
        self.state = State((counter, number + 1), owner, self._ttl, True, released, dict(files), list(journal))
        self._bucket.put(self.state.key, self.state.encoded())

        # After the write: a greater counter that isn't there now will find this state, and go on from it.
        there = positions(self._bucket)
        self._look(there)
        self._renewed = begun

        older = []
        for position in there:
            if position < self.state.position:
                older.append(State(position, {}).key)
        self._bucket.delete(older)

    def _look(self, there: list[Position]) -> None:
        """Raises a `LeaseLostError` if another process has the lease."""
        if there and there[-1][0] == self.counter:
            return
        who = ": it was removed"
        if there:
            try:
                owner = read(self._bucket, there[-1]).owner
                who = f" by process {owner.get('pid')} on {owner.get('host')}"
            except StoreError:
                who = " by another process"
        raise LeaseLostError(f"{self._bucket.url} was taken over{who}: this process writes no more")


def object_keys(files: JsonObject, journal: list[JsonObject]) -> set[str]:
    """The names of all objects of a state."""
    return {about["key"] for about in [*files.values(), *journal]}


def _content(files: JsonObject, journal: list[JsonObject]) -> list[tuple[str, str]]:
    """What identifies the content of a run: its keys differ with each owner, which delivers some files again."""
    content = []
    for name, about in sorted(files.items()):
        content.append((name, about["sha256"]))
    for segment in journal:
        content.append((JOURNAL, segment["sha256"]))
    return content


def _digest(body: JsonObject) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
