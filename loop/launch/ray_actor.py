"""The actor of a worker on a Ray cluster: it starts an agent, and passes on what agent and launcher write."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING

from loop.launch.hosts import AGENT

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.util.scheduling_strategies import SchedulingStrategyT

# Threads of an actor, one for each kind of call: no kind waits for another, and calls of a kind keep their order.
_THREADS = {"write": 1, "end": 1, "stdout": 1, "stderr": 1}


def start_actor(ray: ModuleType, cpus: float, gpus: float, strategy: SchedulingStrategyT) -> ActorHandle:
    """Has Ray start an actor. Returns its handle at once, even if there is no room for the actor yet.

    Args:
        ray: the module `ray`, connected.
        cpus: how many CPUs Ray reserves for it.
        gpus: how many GPUs Ray reserves for it.
        strategy: where Ray starts it: Ray's `scheduling_strategy`.
    """
    kind = ray.remote(num_cpus=cpus, num_gpus=gpus, concurrency_groups=_THREADS, scheduling_strategy=strategy)
    variables = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    return kind(_actor_class()).remote(AGENT, variables)


def _actor_class() -> type:
    """The class of the actors."""
    # Within a function: Ray then sends the class by value, and no node has to import this module to load it.

    class Agent:
        """Starts an agent on its node. Passes data to the agent's stdin, and what the agent prints to the launcher."""

        def __init__(self, module: str, variables: dict[str, str]) -> None:
            environment = os.environ | variables
            # Ray limits the threads of an actor by this variable. Workers compute with as many as without Ray.
            environment.pop("OMP_NUM_THREADS", None)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module], env=environment, start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip

        def node(self) -> str:
            import ray

            return str(ray.get_runtime_context().get_node_id())

        def write(self, data: bytes) -> None:
            assert self._process.stdin is not None
            self._process.stdin.write(data)
            self._process.stdin.flush()

        def close(self) -> None:
            assert self._process.stdin is not None
            self._process.stdin.close()

        def read(self, stream: str) -> bytes:
            return os.read(getattr(self._process, stream).fileno(), 1 << 16)

        def wait(self) -> int:
            return self._process.wait()

    return Agent


class _Stdin:
    """The stdin of an agent behind an actor, for the launcher to write to."""

    def __init__(self, actor: ActorHandle) -> None:
        self._actor = actor

    def write(self, data: bytes) -> None:
        self._actor.write.options(concurrency_group="write").remote(data)

    def flush(self) -> None:
        """Does nothing: each call of `write` is sent at once."""

    def close(self) -> None:
        self._actor.close.options(concurrency_group="write").remote()


class ActorConnection:
    """The connection to an agent behind an actor; see `agent_protocol.Connection`.

    Attributes:
        lost: whether Ray has lost the actor. False: the agent has ended by itself, or hasn't ended.
    """

    def __init__(self, ray: ModuleType, actor: ActorHandle) -> None:
        self._ray = ray
        self._actor = actor
        self.lost = False
        self._end = actor.wait.options(concurrency_group="end").remote()
        self.stdin = _Stdin(actor)
        self.stdout = self._lines("stdout")
        self.stderr = self._lines("stderr")

    def wait(self, timeout: float | None = None) -> int:
        try:
            return int(self._ray.get(self._end, timeout=timeout))
        except self._ray.exceptions.GetTimeoutError:
            raise subprocess.TimeoutExpired("agent", timeout or 0.0) from None
        except Exception:  # the actor is lost, or the session with Ray has ended
            return 255

    def kill(self) -> None:
        with contextlib.suppress(Exception):  # the session with Ray has ended, and with it the actor
            self._ray.kill(self._actor)

    def _lines(self, stream: str) -> Iterator[bytes]:
        """The lines that the agent prints. If its actor is lost, stderr ends with a line that gives the reason."""
        rest = b""
        try:
            while piece := self._ray.get(self._actor.read.options(concurrency_group=stream).remote(stream)):
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    yield line + b"\n"
        except self._ray.exceptions.RayError as error:
            self.lost = True
            if stream == "stderr":
                yield in_a_line(error).encode()


def in_a_line(error: BaseException) -> str:
    """The last line of Ray's message that isn't empty: the reason. Ray puts a remote traceback before it."""
    lines = list(filter(None, map(str.strip, str(error).splitlines())))
    return lines[-1] if lines else type(error).__name__
