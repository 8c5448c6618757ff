"""Shows on stderr what the workers of a job print, and their progress."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from typing import IO

from callbacks.progress import MARK, Display
from loop.launch import stderr
from loop.launch.process import WorkerProcess, printed_lines


class Output:
    """What the workers print, on stderr, each line with its rank in front; their progress as a bar."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self._display = Display()
        self._lock = threading.Lock()  # each stream of each worker has a thread, and the launcher prints, too

    def line(self, text: str) -> None:
        """Prints a line."""
        with self._lock, contextlib.suppress(OSError):  # a terminal that was closed must not end the launcher
            self._display.line(text)

    def follow(self, process: WorkerProcess, label: str) -> None:
        """Follows both streams of a process; each line has the label in front."""
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            # A daemon: a launcher that fails must not wait for the output of its workers.
            thread = threading.Thread(target=self._copy, args=(process, stream, label), daemon=True)
            thread.start()
            self.threads.append(thread)

    def join(self) -> None:
        """Waits until all output of the workers has been shown."""
        for thread in self.threads:
            thread.join()

    def _copy(self, process: WorkerProcess, stream: IO[bytes], label: str) -> None:
        for line in printed_lines(process, stream):
            self.take(line, label)

    def take(self, line: str, source: str) -> None:
        """Shows a line that a worker, or its host, has printed; `source` says which."""
        text = line.rstrip("\r\n")
        if re.match(stderr.CHATTER, text):
            return
        # A task may have printed a part of a line before it.
        before, _, relayed = text.partition(MARK)
        try:
            state = json.loads(relayed) if relayed else None
        except ValueError:  # the task has printed into it
            before, state = text, None
        with self._lock, contextlib.suppress(OSError):
            if before:
                self._display.line(f"[{source}] {before}")
            if state is not None:
                self._display.update(state)
