"""Errors of one worker, which are kept until all workers can be informed of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NoReturn

from loop.backends.host_collectives import HostCollectives
from loop.errors import PeerError, PeerUsageError, UsageError, no_exit


class DeferredErrors:
    """The first error of this worker since the workers last agreed.

    A worker that raised it at once would leave the others waiting in their next collective.
    """

    def __init__(self, workers: HostCollectives) -> None:
        self._workers = workers
        self._error: BaseException | None = None

    @property
    def pending(self) -> bool:
        """Whether this worker has an error that the others don't know of."""
        return self._error is not None

    def add(self, error: BaseException) -> None:
        """Keeps an error; the first one counts."""
        self._error = self._error or error  # those that follow are often caused by it

    @contextlib.contextmanager
    def defer(self) -> Iterator[None]:
        """Within it, an error is kept instead of raised."""
        try:
            with no_exit():
                yield
        except Exception as error:
            self.add(error)

    def raise_on_all(self) -> NoReturn:
        """Ends all workers, once one of them has an error. All workers must call it.

        Raises:
            Exception: this worker's error, or a `PeerError` that names the rank and error of another.
        """
        text = "" if self._error is None else f"{type(self._error).__name__}: {self._error}"
        # As text: the class of an error may not be known to the other workers.
        reports = self._workers.gather_json([text, isinstance(self._error, UsageError)])
        if self._error is not None:
            raise self._error
        # The first rank that has failed. After a `UsageError` all workers end with its exit code.
        rank = min(rank for rank, (text, _) in enumerate(reports) if text)
        text, is_usage = reports[rank]
        kind = PeerUsageError if is_usage else PeerError
        raise kind(f"rank {rank} failed: {text}")
