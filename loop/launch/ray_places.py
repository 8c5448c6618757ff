"""The places of a job's workers on a Ray cluster: a fixed number; for an elastic job, as many as there is room for."""

from __future__ import annotations

import contextlib
import ipaddress
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from callbacks.files import LAUNCH_DIRECTORY
from callbacks.formats import plural
from callbacks.run_record.redaction import tell
from loop.errors import TrainingError, UsageError
from loop.launch.agent_protocol import Hashes, Question
from loop.launch.environment import start_timeout
from loop.launch.hosts import Cluster, Host, Remote, expected_versions
from loop.launch.ray_actor import ActorConnection, in_a_line, start_actor
from loop.launch.ray_options import Request

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup
    from ray.util.scheduling_strategies import SchedulingStrategyT

MARK = ".tfloop-"
"""The first characters of the name of a file that shows which nodes share the disk."""
_INTERVAL = 0.5  # seconds between two checks of what has changed
_PAUSE = 1.0  # seconds before a lost place is asked for again


class NodeLostError(TrainingError):
    """Ray has lost a node of a job before its workers have started. Nothing that was typed is wrong."""


class RayHost(Host):
    """The place of one worker. Its name is the address of a node, and several places may be on the same node."""

    def start(
        self, places: dict[int, dict[str, str]], arguments: Sequence[str], environment: Mapping[str, str],
        directory: Path, show: Callable[[str, str], None],
    ) -> list[Remote]:  # fmt: skip
        own = {
            "TFLOOP_LOCAL_RANK": "0",  # Ray shows each worker its own GPUs alone
            LAUNCH_DIRECTORY: str(Path.cwd()),  # relative paths of runs begin here, not in Ray's copy of the directory
        }
        return super().start(places, arguments, {**environment, **own}, directory, show)

    def missing(self, name: str) -> str:
        if Path(name).name.startswith(MARK):
            return f"doesn't see {Path(name).parent}, where the run is to be: give --run-dir on a disk that all share"
        return f"has no {name}: Ray brings only what is in {Path.cwd()}, without what .gitignore names: put it there"


class RayCluster(Cluster):
    """The places of a job with a fixed number of workers: a placement group reserves all of them at once.

    Args:
        ray: the module `ray`, connected.
        request: what the job asks of the cluster.
        backend: the backend of the job.
        files: the files that each place must have.
    """

    announce_after = 2.0
    """The seconds of waiting for room after which a message says so."""

    def __init__(self, ray: ModuleType, request: Request, backend: str, files: Hashes) -> None:
        super().__init__([])
        self._ray = ray
        self._request = request
        self._backend = backend
        self._files = files
        self._group: PlacementGroup | None = None
        self._connections: list[ActorConnection] = []
        self._bundle = {"CPU": request.cpus}  # what each worker needs, in Ray's form
        if request.gpus and ray.cluster_resources().get("GPU"):
            self._bundle["GPU"] = request.gpus
        self.address = _reached(self._addresses()[ray.get_runtime_context().get_node_id()])

    def connect(self) -> None:
        """Reserves room for all workers, starts an agent for each, and compares the nodes with this machine.

        Raises:
            UsageError: there is no room, or a node differs from this machine; with the reason.
            NodeLostError: there was room, but a node is lost.
        """
        bundles = [self._bundle] * self._request.workers
        self._group = self._ray.util.placement_group(bundles, strategy=self._request.placement.upper())
        self._await_room(self._group.wait, self._request.workers)
        self._start_agents()
        try:
            self.compare([_question(host) for host in self.hosts], self._backend, self._files)
        except UsageError as error:
            if any(connection.lost for connection in self._connections):
                raise NodeLostError(str(error)) from None
            raise
        for host in self.hosts:
            host.answer["address"] = _reached(host.name)

    def close(self) -> None:
        super().close()
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)  # also ends the actors that are left in it

    def _start_agents(self) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        # All actors are started before the first answer is awaited, so that they start at the same time.
        actors = []
        for index in range(self._request.workers):
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            actors.append(self._start_actor(strategy))

        addresses = self._addresses()
        places = []
        for actor in actors:
            try:
                node = self._ray.get(actor.node.remote(), timeout=start_timeout())
            except self._ray.exceptions.GetTimeoutError:
                raise UsageError(
                    f"a Ray actor has not started within {start_timeout():g} s (--start-timeout): look at the logs of "
                    "its node, or give it more time"
                ) from None
            except (self._ray.exceptions.ActorDiedError, self._ray.exceptions.ActorUnavailableError) as error:
                raise NodeLostError(f"a Ray actor has not started: {in_a_line(error)}") from None
            except self._ray.exceptions.RayError as error:
                raise UsageError(f"a Ray actor has not started: {in_a_line(error)}") from None
            places.append((addresses[node], actor))

        # Horovod numbers ranks host by host: the places of an address must follow each other. The sort is stable.
        order = list(dict(places))
        places.sort(key=lambda place: order.index(place[0]))
        for address, actor in places:
            self._connections.append(ActorConnection(self._ray, actor))
            self.hosts.append(RayHost(address, 1, self._connections[-1]))

    def _start_actor(self, strategy: SchedulingStrategyT) -> ActorHandle:
        return start_actor(self._ray, self._bundle["CPU"], self._bundle.get("GPU", 0), strategy)

    def _addresses(self) -> dict[str, str]:
        """The address of each node, by its id."""
        return {node["NodeID"]: node["NodeManagerAddress"] for node in self._ray.nodes()}

    def _await_room(self, wait: Callable[[float], bool], workers: int) -> None:
        """Waits until there is room for this number of workers.

        Args:
            wait: waits for the number of seconds that it is given at most; returns whether there is room.
            workers: how many workers need room.

        Raises:
            UsageError: the cluster is too small for them.
        """
        timeout = start_timeout()
        if wait(min(self.announce_after, timeout)):
            return
        needed = " and ".join(f"{count} {name}" for name, count in self._bundle.items())
        total = self._ray.cluster_resources()
        free = self._ray.available_resources()
        resources = []
        for name in ("CPU", "GPU"):
            resources.append(f"{total.get(name, 0):g} {name} ({free.get(name, 0):g} free)")
        has = ", ".join(resources)
        tell(f"waiting for room on the Ray cluster: {needed} for each worker; it has {has}")

        while not wait(timeout):
            if self._places() >= workers:
                continue  # other jobs use the room now, and release it when they end
            raise UsageError(
                f"--launcher ray: no room for {plural(workers, 'worker')} with {needed} each within "
                f"{timeout:g} s (--start-timeout): the cluster has {has}; start fewer workers, or add nodes"
            )

    def _places(self) -> int:
        """How many workers the nodes would have room for if no other job ran there."""
        places = 0
        for node in self._ray.nodes():
            if node["Alive"]:
                # The scarcest resource decides.
                fits = [node["Resources"].get(name, 0) // count for name, count in self._bundle.items()]
                places += int(min(fits))
        return places


class ElasticRayCluster(RayCluster):
    """The places of an elastic job. Places are lost with their node; Ray gives others when it has room.

    A thread for each place asks Ray for it, and asks again when the place is lost. Each new place is added to `hosts`.
    """

    announce_after = 10.0  # longer than of a fixed job: a place counts only when its agent has answered

    def __init__(self, ray: ModuleType, request: Request, backend: str, files: Hashes) -> None:
        super().__init__(ray, request, backend, files)
        self._fewest = request.fewest or 1
        self._problems: list[str] = []  # one for each place that was found, but can't be used

    def connect(self) -> None:
        """Asks for all places, and waits for the fewest that the job needs.

        Raises:
            UsageError: there is no room, or a node differs from this machine; with the reason.
        """
        threading.Thread(target=self.watch, name="hosts", daemon=True).start()
        for index in range(self._request.workers):
            threading.Thread(target=self._keep_place, name=f"place {index}", daemon=True).start()
        self._await_room(self._has_enough, self._fewest)
        if len(self.hosts) < self._fewest:
            raise UsageError("; ".join(dict.fromkeys(self._problems)))

    def _has_enough(self, timeout: float) -> bool:
        """Waits until there are enough places, or too many of them have problems; False: neither was in time."""
        deadline = time.monotonic() + timeout
        while len(self.hosts) < self._fewest:
            if self._request.workers - len(self._problems) < self._fewest:
                return True  # waiting longer can't help; `connect` raises the problems
            if time.monotonic() > deadline:
                return False
            time.sleep(_INTERVAL / 5)
        return True

    def _keep_place(self) -> None:
        """Keeps one place filled, until the job is over or a node differs from this machine."""
        # Any call fails when the launcher has lost its connection to the cluster. The loss of the hosts reports that.
        with contextlib.suppress(Exception):
            for host in self._found():
                problems = list(host.problems(expected_versions(self._backend), self._files))
                if host.lost:
                    continue
                if problems:
                    self._problems.append(f"{host.name}: {problems[0]}")
                    tell(f"elastic: a place on {host.name} is not used: it {problems[0]}")
                    host.process.kill()
                    return
                # The address first: once the host is in the list, the job starts a worker there.
                host.answer["address"] = _reached(host.name)
                self.hosts.append(host)
                while not host.lost:
                    if self._closed.wait(_INTERVAL):
                        return

    def _found(self) -> Iterator[RayHost]:
        """The places that Ray gives, each as soon as its agent has answered. Asking for the next one loses the last."""
        strategy = "SPREAD" if self._request.placement == "spread" else "DEFAULT"
        while not self._closed.is_set():
            actor = self._start_actor(strategy)
            node = self._node(actor)
            if node is not None:
                host = RayHost(self._addresses()[node], 1, ActorConnection(self._ray, actor))
                host.ask(_question(host), self._files)
                host.answered.wait(start_timeout())
                yield host
            self._closed.wait(_PAUSE)

    def _node(self, actor: ActorHandle) -> str | None:
        """Waits until an actor has started; returns the id of its node. None: it was lost, or the job is over."""
        answer = actor.node.remote()
        while not self._closed.is_set():
            try:
                # In short waits: Ray may have no room for as long as the job runs.
                return str(self._ray.get(answer, timeout=_INTERVAL))
            except self._ray.exceptions.GetTimeoutError:
                continue
            except self._ray.exceptions.RayError:
                return None
        return None


def _question(host: Host) -> Question:
    """What the agent of a place is asked. The directory is the one in which Ray has started its actor."""
    return {"directory": ".", "interface": _reached(host.name)}


def _reached(address: str) -> str:
    """The address at which workers reach a node: 127.0.0.1 for every node of a cluster on loopback."""
    return "127.0.0.1" if ipaddress.ip_address(address).is_loopback else address
