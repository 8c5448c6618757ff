"""What `fit` returns."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

from callbacks.base import shown_status
from callbacks.formats import plural
from callbacks.run_record import cell, history, journal
from callbacks.run_record.history import COUNTERS
from callbacks.run_record.redaction import tell
from loop.backends.host_collectives import fingerprint
from loop.checkpoint import checkpoint_files
from loop.checkpoint.array_files import Json
from loop.errors import UsageError
from loop.model.variables import model_variables
from loop.run.run import Run
from loop.run.run_directory import locate_weights
from loop.run.session import index_of
from loop.run.state import Arrays, assign, averaged, numbered
from loop.task import Model


@dataclasses.dataclass
class FitResult:
    """What `fit` returns.

    Attributes:
        status: "finished", "stopped" (by a callback) or "preempted" (by a signal, after saving).
        steps: optimizer steps made, earlier attempts of the run included.
        epochs: epochs completed.
        examples: examples used.
        metrics: means over the last epoch, or over the epoch of the best weights if those are kept; with the prefix
            `eval_`, over the whole evaluation data, with the best weights if those are kept.
        history: the same for each epoch, with `epoch`, `step` and `examples`.
        run_dir: the run directory.
        weights_sha256: SHA-256 over dtype, shape and little-endian bytes of all model variables, in order.
        model: the trained model.
        backend: the backend's name.
        replicas: how many there were.
        examples_per_second: in training, without the first compiled call.
        best_step: the step of the model's weights, if the best are kept and aren't the last ones; else None.
    """

    status: str
    steps: int
    epochs: int
    examples: int
    metrics: dict[str, float]
    history: list[dict[str, float]] = dataclasses.field(repr=False)
    run_dir: Path
    weights_sha256: str
    model: Model = dataclasses.field(repr=False)
    backend: str
    replicas: int
    examples_per_second: float
    best_step: int | None = None

    def _repr_html_(self) -> str:
        """What a notebook shows of it."""
        replicas = plural(self.replicas, "replica")
        facts = [shown_status(self.status), f"{self.steps:,} steps", f"{self.backend}, {replicas}"]
        facts += [f"{self.examples_per_second:,.0f} examples/s", str(self.run_dir)]
        return cell.html(facts, self.history)


def take_best(run: Run) -> None:
    """Gives the model the weights of the best checkpoint, if those are the result of the run. All workers call it.

    The optimizer's variables and others stay as they are: nothing is trained or saved after this.
    """
    # The chief alone knows the best step, by the metrics that its callbacks have seen.
    step = run.backend.broadcast_json(run.best and run.best["step"])
    if step is None or step == run.progress.step:
        return
    # All workers learn whether the chief could read them, before they enter the broadcast below.
    taken = False
    evaluated: history.Row = {}
    with run.defer_errors():
        if run.backend.is_chief:
            taken = _read_best(run)
            evaluated = _evaluated_best(run)
    run.synchronize()
    taken, evaluated = run.backend.broadcast_json([taken, evaluated])
    if not taken:
        return
    run.step.averages.forget()  # else `take` would write the last averages over these weights
    run.backend.broadcast_variables(run.session.model_variables[-1])
    run.run_status.take_best(step, evaluated)
    if run.backend.is_chief and run.best is not None:
        about = f"{run.best['metric']} {run.best['value']:.6g}"
        tell(f"note: the weights are those of step {step:,}, the best ({about})")


def _read_best(run: Run) -> bool:
    """Reads the weights of the best checkpoint into the model; False, with a warning, if they can't be read."""
    assert run.best is not None
    path = run.directory / "checkpoints" / f"step-{run.best['step']:08d}"
    try:
        manifest = checkpoint_files.verify(path)
        tensors = averaged(checkpoint_files.read(path, manifest))
    except checkpoint_files.CheckpointError as error:
        tell(f"warning: the best weights can't be read, these are the last ones: {error}")
        return False
    # Those of the checkpoint's phase: the order of a model's variables may depend on which of them are trained.
    variables = run.session.model_variables[index_of(manifest, run.task)]
    assign(numbered("model", variables), tensors)
    return True


def _evaluated_best(run: Run) -> history.Row:
    """The metrics of the evaluation by which the best weights are the best; {} for a metric of the training."""
    assert run.best is not None
    if not run.best["metric"].startswith("eval_"):
        return {}
    metrics: history.Row = {}
    # Another evaluation of the same epoch may have followed, so that the history doesn't have it.
    for entry, _ in journal.read(run.directory / journal.NAME, events=("eval_end",)):
        if entry.get("step") == run.best["step"]:
            with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError, OverflowError):  # malformed
                metrics = history.as_numbers(entry["metrics"])
    return metrics | {run.best["metric"]: run.best["value"]}


def check_is_path(path: object, call: str, others: str = "") -> None:
    """Refuses what isn't a path of a run, such as the result of `fit` itself, that was given to the function `call`.

    `others` is what else that function takes.

    Raises:
        UsageError: it isn't a path.
    """
    if not isinstance(path, str | Path):
        raise UsageError(
            f"{call}(task, {type(path).__name__}): give the path of a run directory or of a checkpoint, such as "
            f"result.run_dir{others}"
        )


def read_weights(path: Path) -> tuple[Arrays, Json]:
    """The model's variables of a checkpoint, or those that are the result of a run; and the manifest.

    Where the run kept moving averages of its weights, it is those.
    """
    checkpoint, manifest = locate_weights(path)
    return averaged(checkpoint_files.read(checkpoint, manifest)), manifest


def weights_sha256(run: Run) -> str:
    """The hash of the model's variables, in order; see `fingerprint`."""
    # From one replica: all have the same values.
    values = [run.backend.local_values(variable)[0] for variable in model_variables(run.model)]
    return fingerprint(*values)


def result(run: Run) -> FitResult:
    """What the caller gets."""
    best_step = run.run_status.best_step
    metrics = dict(run.history[-1]) if run.history else {}
    if best_step is not None:
        for row in run.history:
            if row["step"] >= best_step:  # the row of its epoch, which may have ended later
                metrics = dict(row)
                break
        metrics |= run.run_status.best_metrics
    # These aren't metrics: the result has fields of its own for the position.
    for name in COUNTERS:
        metrics.pop(name, None)
    return FitResult(
        status=run.run_status.name,
        steps=run.progress.step,
        epochs=run.progress.epoch,
        examples=run.progress.examples,
        metrics=metrics,
        history=run.history,
        run_dir=run.directory,
        weights_sha256=weights_sha256(run),
        model=run.model,
        backend=run.backend.name,
        replicas=run.backend.replicas,
        examples_per_second=run.examples_per_second,
        best_step=best_step,
    )
