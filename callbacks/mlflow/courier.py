"""Courier: delivers a journal that is still being written, in a process beside the training."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path

from callbacks.mlflow.delivery import Delivery, load, reason

_LONGEST_PAUSE = 10.0  # seconds between two deliveries, at most


class Courier(threading.Thread):
    """Delivers a journal that is still being written, until the run reports its end; tries again after every failure.

    Args:
        delivery: what delivers.
        longest_pause: seconds between two attempts at most, while the store can't be used.
    """

    def __init__(self, delivery: Delivery, longest_pause: float = 30.0) -> None:
        super().__init__(name="courier", daemon=True)
        self.delivery, self.longest_pause = delivery, longest_pause
        self._ended = threading.Event()
        self._done = self._given_up = False
        self._error = ""

    def finish(self, wait: float) -> str:
        """The run has ended: delivers the rest, for at most `wait` seconds. Returns what went wrong, or ""."""
        self._ended.set()
        self.join(wait)
        self._given_up = True
        return "" if self._done else self._error or f"no answer within {wait:.0f} s"

    def run(self) -> None:
        pause = 1.0
        while not self._given_up:
            last, begun = self._ended.is_set(), time.thread_time()
            try:
                self.delivery.deliver()
                if last:
                    self.delivery.close()
                    self._done = True
                    return
                # It shares the machine with the training: a hundredth of a core is its part.
                pause, self._error = min(max(1.0, 100 * (time.thread_time() - begun)), _LONGEST_PAUSE), ""
            except Exception as error:  # whatever the store does
                self._error = reason(error)
                self.delivery.disconnect()
                pause = min(2 * pause, self.longest_pause)
            if last:
                time.sleep(min(pause, 1.0))
            else:
                self._ended.wait(pause)


def _warm(scheme: str) -> None:
    with contextlib.suppress(Exception):  # whatever it is, the first delivery meets it again, and tells it
        load(scheme)


def _told(parent: int) -> str:
    """The next line of stdin; "" if it has ended without one: the training is gone."""
    line = b""
    while not line.endswith(b"\n"):
        if select.select([0], [], [], 1.0)[0]:
            letter = os.read(0, 1)  # of this line alone: what comes behind it is looked for by `select`
            if not letter:
                return ""
            line += letter
        elif os.getppid() != parent:
            return ""
    return line.decode()


def main() -> None:
    """The process beside the training: `SCHEME`, that of the store's URI. It imports MLflow at once.

    A line on stdin says what to deliver, and to where, as JSON; the next one, the seconds that it may still take, that
    the run has ended. The last line on stdout says what became of it, as JSON. If stdin ends before that, or the parent
    is gone, the run has been killed: `tfloop sync` has the rest.
    """
    parent = os.getppid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # meant for the training, which is about to send its last points
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(10)  # the training comes first
    threading.Thread(target=_warm, args=(sys.argv[1],), daemon=True).start()
    begun = _told(parent)
    if begun:
        order = json.loads(begun)
        os.environ["MLFLOW_TRACKING_URI"] = order["uri"]  # where MLflow looks for artifacts of its own server
        delivery = Delivery(Path(order["directory"]), order["uri"], order["experiment"])
        courier = Courier(delivery)
        courier.start()
        ended = _told(parent)
        if ended:
            error = courier.finish(float(ended))
            print("\n" + json.dumps({"error": error, "warnings": delivery.warnings()}), flush=True)
    os._exit(0)  # whatever still hangs


if __name__ == "__main__":
    main()
