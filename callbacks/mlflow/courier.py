"""Courier: delivers a journal that is still being written, in a process beside the training."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from pathlib import Path

from callbacks.mlflow.delivery import Delivery, is_refusal, load, reason
from callbacks.side_process import give_answer, orders

_LONGEST_PAUSE = 10.0  # seconds between two deliveries, at most

_MOST_REFUSALS = 3  # attempts, a second apart, after which a store that answers no is left alone


class Courier(threading.Thread):
    """Delivers a journal that is still being written, until the end of the run; tries again after every failure.

    While the store can't be used, there are at most so many seconds between two attempts.
    """

    def __init__(self, delivery: Delivery, longest_pause: float = 30.0) -> None:
        super().__init__(name="courier", daemon=True)
        self.delivery = delivery
        self.longest_pause = longest_pause
        self._run_ended = threading.Event()
        self._done = False
        self._given_up = False
        self._error = ""

    def finish(self, wait: float) -> str:
        """Delivers the rest after the end of the run, for at most `wait` seconds. Returns what went wrong, or ""."""
        self._run_ended.set()
        self.join(wait)
        # Only now: set earlier, it would keep the thread from its last delivery.
        self._given_up = True
        if self._done:
            return ""
        return self._error or f"no answer within {wait:.0f} s"

    def run(self) -> None:
        pause = 1.0
        refusals = 0  # in a row, after the end of the run
        while not self._given_up:
            # Asked before the delivery: lines that are written meanwhile need another one.
            is_last = self._run_ended.is_set()
            start = time.thread_time()
            try:
                self.delivery.deliver()
                if is_last:
                    self.delivery.close()
                    self._done = True
                    return
                self._error = ""
                # The training needs the machine: the deliveries take at most a hundredth of a core.
                pause = min(max(1.0, 100 * (time.thread_time() - start)), _LONGEST_PAUSE)
            except Exception as error:  # a store may fail in any way
                self._error = reason(error)
                self.delivery.disconnect()
                pause = min(2 * pause, self.longest_pause)
                refusals = refusals + 1 if is_last and is_refusal(error) else 0
            # A proxy says 404, too, while a server starts behind it: asked a few times, but not until `wait` is over.
            if refusals > _MOST_REFUSALS:
                return
            if is_last:
                time.sleep(min(pause, 1.0))
            else:
                self._run_ended.wait(pause)


def _warm(scheme: str) -> None:
    with contextlib.suppress(Exception):  # the first delivery fails in the same way, and reports it
        load(scheme)


def main() -> None:
    """Runs the process beside the training. Its argument is the scheme of the store's URI; it imports MLflow at once.

    An order says what to deliver, and to which store. The next one says that the run has ended, by the number of
    seconds that the process may still take. The answer is the outcome. Then another run may follow. If the training is
    gone within a run, it was killed, and `tfloop sync` delivers the rest.
    """
    given = orders()
    threading.Thread(target=_warm, args=(sys.argv[1],), daemon=True).start()
    for order in given:
        os.environ["MLFLOW_TRACKING_URI"] = order["uri"]  # there MLflow looks for the artifacts of its own server
        delivery = Delivery(Path(order["directory"]), order["uri"], order["experiment"])
        courier = Courier(delivery)
        courier.start()
        seconds = next(given, None)
        if seconds is None:
            break
        outcome = {"error": courier.finish(seconds), "warnings": delivery.warnings()}
        give_answer(outcome)
        if outcome["error"]:  # the thread may hang
            break
    os._exit(0)  # at once: a thread may hang in MLflow


if __name__ == "__main__":
    main()
