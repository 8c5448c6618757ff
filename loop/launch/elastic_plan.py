"""The plan of an elastic job: which workers train together. The launcher writes it, and the workers follow it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from callbacks.files import write_text
from loop.launch.elastic_workers import ElasticWorker
from loop.launch.member import PLAN, PlanFile

if TYPE_CHECKING:
    from loop.launch.hosts import Cluster
    from loop.launch.member import Event


class Plan:
    """The newest generation.

    Attributes:
        generation: its number; -1: there was none.
        broken: the newest generation that has lost a worker or a connection; -1: none.
    """

    def __init__(self, directory: Path, cluster: Cluster | None) -> None:
        self.generation = -1
        self.broken = -1
        self._directory = directory
        self._cluster = cluster
        self._events: list[Event] = []

    @property
    def is_intact(self) -> bool:
        """Whether the newest generation is complete, as far as is known."""
        return self.broken < self.generation

    def note_break(self) -> None:
        """Notes that the newest generation has lost a worker or a connection."""
        self.broken = self.generation

    def note_event(self, event: str, worker: ElasticWorker, **more: str) -> None:
        """Notes that a worker has joined or is gone, for the journal of the run."""
        generation = max(self.generation, 0)
        if event == "worker_gone":
            generation += 1  # a loss is recorded by the generation that goes on after it
        self._events.append({"generation": generation, "event": event, "worker": worker.name, **more})

    def end(self, reason: str, keeper: str) -> None:
        """Ends the job for all workers that wait for a place; the keeper saves the run's state from its memory."""
        self.note_break()
        self.generation += 1  # workers wait for a newer plan than that of their own generation
        self.write({}, (), reason, keeper)

    def write(
        self, places: Mapping[str, dict[str, str]], dropped: Sequence[str], end: str = "", keeper: str = ""
    ) -> None:
        """Writes the plan of the newest generation.

        Args:
            places: the environment variables of each member's place, by the name of the worker.
            dropped: the names of the workers that are to end.
            end: why the job has ended; "": it goes on.
            keeper: the worker that saves the run when the job ends; "": there is none.
        """
        runs = list(self._directory.glob("rank-*.run"))  # all of them name the same directory
        plan: PlanFile = {
            "generation": self.generation, "broken": self.broken, "events": self._events, "places": places,
            "dropped": dropped, "end": end, "keeper": keeper, "run": runs[0].read_text() if runs else "",
        }  # fmt: skip
        text = json.dumps(plan)
        if self._cluster is not None:
            for host in self._cluster.hosts:
                host.send(file=PLAN, text=text)
        write_text(self._directory / PLAN, text)
