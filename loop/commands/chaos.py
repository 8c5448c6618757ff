"""`tfloop chaos`: trains a task undisturbed, and again through many kill -9, and compares what has come of it.

Imports no TensorFlow: all training is done in processes, which can be killed.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from callbacks.example_log import differences, used
from callbacks.formats import plural
from callbacks.types import JsonObject
from loop.checkpoint import checkpoint_files
from loop.checkpoint.store import address, copies
from loop.checkpoint.store.bucket import Bucket
from loop.commands.chaos_aim import Aim, Reference
from loop.commands.killed_run import KINDS, Machine, Run
from loop.errors import UsageError
from loop.launch.machine import horovod_missing

MOST_KILLS = 1000
"""The most kills that can be asked for: each takes at least one start of TensorFlow."""
ROUNDING = 1e-3
"""How far weights may be apart that were trained by other numbers of replicas, relative to the largest of a variable.

Each step rounds differently, and an optimizer such as Adam makes steps of full size out of a gradient that is 0 except
for rounding. That no step is lost or made twice is shown by the examples, which must be the same.
"""
_GONE = 30.0  # seconds in which a job must be gone when one of its processes was killed
_FEW = 5  # the most problems of one kind that are listed


@dataclasses.dataclass(frozen=True)
class Plan:
    """How runs are killed."""

    kills: int  # how many kills, over as many runs as they take
    seed: int = 0  # of the moments of the kills
    checkpoint_every: str | None = None  # how often to save, as typed; None: about ten times in the run
    # The URL of a folder in object storage for the runs with kills; None: they are on this disk. They are removed from
    # it when nothing is wrong.
    store: str | None = None
    # Whether a run goes on on another machine after each kill, with nothing but its URL: on two workers, on three of
    # another backend, and at last on one. The machines are directories. Without `store`, the runs are in a directory
    # that all machines share.
    migrate: bool = False


@dataclasses.dataclass
class Report:
    """What `chaos` found."""

    target: str  # the task
    backend: str  # the name of the backend
    replicas: int  # the number of replicas
    steps: int  # the steps of the undisturbed run
    # The number of kills by what they have hit, as the files showed afterwards.
    kills: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    attempts: int = 0  # processes, or jobs, that were started for the runs with kills
    runs: int = 0  # the runs that came to their end in spite of kills
    # Whether all of them ended with the weights of the undisturbed one: to the bit, or to rounding if they have moved.
    same_weights: bool = True
    distance: float = 0.0  # how far their weights are from those of the undisturbed one, at most; see `ROUNDING`
    # For runs that move: the backend and the workers of each machine, in turn.
    machines: list[str] = dataclasses.field(default_factory=list)
    same_examples: bool = True  # whether all of them used the same examples in the same order, each once in an epoch
    problems: list[str] = dataclasses.field(default_factory=list)  # what went wrong, in order
    seconds: float = 0.0  # how long it took

    @property
    def exact(self) -> bool:
        """Whether nothing was lost."""
        return not self.problems


def chaos(
    arguments: Sequence[str], plan: Plan, directory: Path, progress: Callable[[str], None] = lambda text: None
) -> Report:
    """Trains once undisturbed, then with kills until there were enough of them, and compares the results.

    The arguments are those of `tfloop train`, without the run directory and how often to save. All runs are in the
    directory, which is empty. `progress` is called with a text that says what is being done.

    Raises:
        UsageError: the task can't be trained at all; or there is no /proc here.
        TrainingError: the undisturbed run fails.
        StoreError: the store doesn't answer.
    """
    if not Path("/proc/self/environ").exists():
        raise UsageError("chaos needs /proc, to find the processes that it kills: run it on Linux")
    begun = time.monotonic()
    directory = directory.resolve()
    machines = _machines(plan)
    folder = _folder(plan, directory)
    progress("undisturbed")
    whole = Run(directory / "whole", arguments, plan.checkpoint_every)
    whole.move(machines[-1])  # a run that moves ends there, too
    reference = _undisturbed(whole)
    report = _report(arguments[0], reference)
    for machine in machines:
        if machine.options:  # a run that stays where it is has none
            report.machines.append(" ".join(machine.options))
    every = _steps_between(plan, report.steps)
    aim = Aim(plan.kills, plan.seed, reference, every)
    # An attempt may take longer than the undisturbed run: it reads a checkpoint, and the machine may be busier.
    patience = 120 + 10 * (time.monotonic() - begun)
    while aim.left and not report.problems:
        report.runs += 1
        name = f"killed-{report.runs}"
        url = f"{folder}/{name}" if folder else None
        run = Run(directory / name, arguments, plan.checkpoint_every or str(every), url)
        _until_it_ends(run, machines, aim, report, patience, progress)
        if run.finished:
            _compare(report, run, reference)
        # Without `plan.store`, the folder lies in `directory`, and is removed or kept with it.
        if plan.store and run.url:
            _remove(run.url, report)
    report.seconds = time.monotonic() - begun
    return report


def _remove(url: str, report: Report) -> None:
    """Removes a run from the store, if nothing is wrong with it."""
    if report.problems:
        report.problems.append(f"the run is still at {url}: `tfloop runs rm` removes it")
    else:
        copies.remove(url)


def _steps_between(plan: Plan, steps: int) -> int:
    """The number of steps between two checkpoints, or about that."""
    typed = plan.checkpoint_every or ""
    return int(typed) if typed.isdecimal() else max(1, steps // 10)


def _folder(plan: Plan, directory: Path) -> str | None:
    """The URL of a folder for the runs with kills; None: they are on this disk."""
    folder = plan.store or (f"file://{address.quoted(str(directory))}/store" if plan.migrate else None)
    if folder is None:
        return None
    Bucket(folder, make=True).keys("")  # so that an error of the store shows now, and not after an hour of training
    # A name of its own: the folder of the user may have runs of an earlier `chaos`.
    return f"{folder}/chaos-{secrets.token_hex(4)}"


def _machines(plan: Plan) -> list[Machine]:
    """The machines on which the attempts are made in turn: two workers, three of another backend, and one."""
    if not plan.migrate:
        return [Machine()]
    first = "multiworker" if horovod_missing() else "horovod"
    return [
        Machine("machine-1", [f"--backend={first}", "--workers=2"]),
        Machine("machine-2", ["--backend=multiworker", "--workers=3"]),
        Machine("machine-3", ["--backend=single"]),
    ]


def _undisturbed(run: Run) -> Reference:
    """Trains without kills."""
    with run.attempt() as attempt:
        attempt.wait_for(lambda: attempt.trained() > 0)
        starting = time.monotonic() - attempt.begun
        attempt.wait_for(lambda: False)  # until it ends
        trained = attempt.trained()
    return Reference(run.result(), _variables(run), used(run.examples), starting, trained)


def _variables(run: Run) -> list[np.ndarray]:
    """The variables of a run's last checkpoint, in order."""
    path = checkpoint_files.complete(run.checkpoints)[-1]
    return list(checkpoint_files.read(path, checkpoint_files.verify(path)).values())


def _report(target: str, reference: Reference) -> Report:
    """The report before the first kill, with what is wrong with the undisturbed run itself."""
    result = reference.result
    examples = reference.examples
    # Compared with itself: that finds an example that is used twice in an epoch.
    problems = _few(differences(examples, examples))
    seen = sum(map(len, examples.values()))
    if seen != result["examples"]:
        problems.append(f"{result['examples']} examples were used, but {seen} were seen")
    problems = [f"undisturbed: {problem}" for problem in problems]
    return Report(target, result["backend"], result["replicas"], result["steps"], problems=problems)


def _until_it_ends(
    run: Run, machines: Sequence[Machine], aim: Aim, report: Report, patience: float, progress: Callable[[str], None]
) -> None:
    """Makes attempts of a run until it has ended, or something went wrong."""
    for machine in itertools.cycle(machines):
        # The last attempt, which isn't killed, runs on the machine of the undisturbed run.
        next_machine = machine if aim.left else machines[-1]
        run.move(next_machine)
        report.attempts += 1
        goal = f"a kill {aim.left[0]}" if aim.left else "to its end"
        progress(f"run {report.runs}, attempt {report.attempts}: {goal}")
        _attempt(run, aim, report, patience)
        if run.finished or report.problems:
            return


def _attempt(run: Run, aim: Aim, report: Report, patience: float) -> None:
    """Starts a run (again), and kills it at the next moment; or lets it end, where all kills have been made."""
    with run.attempt() as attempt:
        killed = bool(aim.left) and aim.strike(attempt, patience)
        seconds = _GONE if killed else patience
        if not attempt.gone(seconds):
            report.problems.append(f"attempt {report.attempts}: did not end within {seconds:.0f} s")
    # A kill may come too late: the run has ended all the same, and the kill counts as a miss.
    hit = attempt.hit() if killed and not run.finished else ""
    aim.done(hit)
    if hit:
        report.kills[hit] += 1
    elif not run.finished and not report.problems:
        report.problems.append(
            f"attempt {report.attempts} failed without a kill, with code {run.code}: {run.last_line()}"
        )


def _compare(report: Report, run: Run, reference: Reference) -> None:
    """Notes in the report how a run has come out, compared with the undisturbed one."""
    expected = reference.result["weights_sha256"]
    weights = run.result()["weights_sha256"]
    distances = map(_distance, reference.variables, _variables(run))
    distance = 0.0 if weights == expected else max(distances, default=0.0)
    report.distance = max(report.distance, distance)
    # Only a run that has moved may differ, and by rounding alone.
    is_rounding = bool(report.machines) and distance <= ROUNDING
    if weights != expected and not is_rounding:
        report.same_weights = False
        difference = f"weights {weights[:12]}..., without kills {expected[:12]}...; {distance:.1e} apart"
        report.problems.append(f"run {report.runs}: {difference}")
    if run.url is not None and (objects := copies.leftovers(run.url)):
        report.problems.append(
            f"run {report.runs}: its store has {len(objects)} objects too many, such as {objects[0]}"
        )
    if others := _few(differences(reference.examples, used(run.examples))):
        report.same_examples = False
        report.problems += [f"run {report.runs}: {text}" for text in others]


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference of two variables, relative to the largest number of the first one, or to 1."""
    scale = float(np.abs(one).max(initial=1.0))
    return float(np.abs(one.astype("float64") - other.astype("float64")).max(initial=0.0)) / scale


def _few(texts: Iterator[str]) -> list[str]:
    """The first texts, and how many more there are."""
    first = list(itertools.islice(texts, _FEW))
    more = sum(1 for _ in texts)  # those that `islice` has left
    return [*first, f"and {more} more"] if more else first


def as_json(report: Report) -> JsonObject:
    """The report for programs."""
    fields = dataclasses.asdict(report) | {"exact": report.exact}
    fields["lives"] = fields.pop("attempts")  # the key of the first versions
    return fields


def lines(report: Report) -> Iterator[tuple[str, bool | None]]:
    """The report for people, line by line: its text, and whether it is good (True) or bad (False) news."""
    replicas = plural(report.replicas, "replica")
    yield f"{report.target}: {report.steps} steps on {report.backend}, {replicas}; {report.seconds:.0f} s", None
    yield "", None
    yield f"{'kill -9':26}{sum(report.kills.values()):>5}", None
    for kind, number in report.kills.items():
        yield f"  {kind:24}{number:>5}", None
    yield f"{'attempts':26}{report.attempts:>5}", None
    yield f"{'runs that ended':26}{report.runs:>5}", None
    for number, options in enumerate(report.machines, 1):
        yield f"{f'machine {number}':26}{options}", None
    same = f"the same to rounding, {report.distance:.1e} apart" if report.distance else "the same bits"
    yield f"{'weights':26}{same if report.same_weights else 'OTHERS'}", report.same_weights
    order = "each once in an epoch, in the same order" if report.same_examples else "OTHERS"
    yield f"{'examples used':26}{order}", report.same_examples
    yield "", None
    for problem in report.problems:
        yield problem, False
    if report.exact:
        yield "nothing is lost", True
    else:
        yield "not the same as without kills", False
