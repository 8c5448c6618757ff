"""Threads that write or deliver while training goes on."""

from __future__ import annotations

import contextlib
import os
import sys
import threading


def lower_priority() -> None:
    """Lets the threads that train go before this one, where the system has priorities of threads."""
    with contextlib.suppress(OSError, AttributeError):
        if sys.platform == "linux":  # elsewhere it would be the priority of the whole process
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)
