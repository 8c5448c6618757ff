"""`tfloop train --dry-run`: two steps and an evaluation of a task, and what they show; nothing is left behind.

The launcher imports this module, so TensorFlow is imported only within functions.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import callbacks
from callbacks import Callback, Metrics, Run
from callbacks.epoch_lines import numbers
from callbacks.formats import plural, size
from callbacks.learning_rate import optimizers_of, own_rate, rate_of
from callbacks.throughput_probe import peak_memory
from callbacks.types import Data, JsonObject, Tensors, Variable
from loop.launch import signals
from loop.options import Options, with_defaults

if TYPE_CHECKING:
    from loop.backends.base import Backend
    from loop.task import Batch, TrainTask

About: TypeAlias = Mapping[str, Any]
"""A JSON object with what is known of the task, or of a part of it."""

STEPS = 2
"""The number of steps that are made."""


def dry_run(task: TrainTask, backend: Backend, options: Options) -> JsonObject:
    """Builds all that `fit` builds, makes two steps from step 0 on, and evaluates. All workers must call it.

    Of the options of `fit`, those about the run directory and checkpoints don't count. For the result, see `lines`.
    """
    from loop.fit import fit

    look = _Look()
    # What is evaluated at all is evaluated after the last step that is made.
    every = with_defaults(task, options)["eval_every"]
    if isinstance(every, dict):
        every = {name: _at_end(pace) for name, pace in every.items()}
    else:
        every = _at_end(every)
    # Without checkpoints there are no best weights to keep.
    changes = {"eval_every": every, "resume": None, "profile": None, "keep": "last"}
    chosen = callbacks.standard(checkpoint=None, journal=None, mlflow=None, progress=None) + [look]
    with signals.temporary_directory("tfloop-dry-run-") as directory:
        result = fit(task, **{**options, **changes, "backend": backend}, run_dir=directory, callbacks=chosen)
    # After the run, which has reached its peak: of each worker, on the host and on a GPU.
    hosts, gpus = zip(*backend.gather_json(peak_memory()), strict=True)
    look.about["memory"] |= {"peak": list(hosts), "gpu_peak": list(gpus)}
    return look.about | {"status": result.status, "steps": result.steps}


def _at_end(pace: object) -> object:
    return pace if pace == "never" else STEPS


class _Look(Callback):
    """Notes what is known of the task, and ends the run after two steps and the evaluation that is due then."""

    runs_on: ClassVar[Literal["chief", "all"]] = "all"
    every = tuple(range(1, STEPS + 1))
    alone = True  # nothing of a dry run is kept, neither here nor in MLflow

    def __init__(self) -> None:
        self.about: JsonObject = {}

    def on_data(self, run: Run, data: Data) -> Data:
        size = run.options["batch_size"]
        example = data.train.example  # type: ignore[attr-defined]
        self.about |= {"task": type(run.task).__name__, "batch": _shapes(example, example, size)}
        self.about["outputs"] = _shapes(_outputs(run, example), example, size)
        return data

    def on_fit_start(self, run: Run) -> None:
        from loop.model.variables import as_tf, bytes_of, model_variables, optimizer_variables, trainable_variables

        batch_size = run.options["batch_size"]
        micro_batches = run.options["accumulate"]
        micro_batch = math.ceil(batch_size / micro_batches)
        replicas = run.backend.replicas
        trained = as_tf(trainable_variables(run.model))
        variables = model_variables(run.model)
        self.about |= {
            "parameters": {"trained": _elements(trained), "all": _elements(variables)},
            "memory": {
                "parameters": bytes_of(variables),
                "gradients": bytes_of(trained),
                "optimizer": bytes_of(optimizer_variables(run.optimizer) + run.step.averages.variables),  # type: ignore[attr-defined]
            },
            "learning_rates": _learning_rates(run),
            "batch_size": {
                "global": batch_size,
                "replica": math.ceil(batch_size / replicas),
                "micro_batches": micro_batches,
                "micro_batch": micro_batch,
                "micro_batch_replica": math.ceil(micro_batch / replicas),
            },
            "steps_per_epoch": run.step.data.train.steps_per_epoch,  # type: ignore[attr-defined]
            "total_steps": run.total_steps,
            "precision": run.options["precision"],
            "backend": run.backend.name,
            "workers": run.backend.workers,
            "replicas": replicas,
            "metrics": {},
        }

    def on_steps_end(self, run: Run, metrics: Metrics) -> None:
        self.about["metrics"] = dict(metrics)
        if run.progress.step >= STEPS:
            run.stop("dry run")

    def on_eval_end(self, run: Run, metrics: Metrics) -> None:
        self.about["metrics"] |= metrics


def _outputs(run: Run, example: Batch) -> list[Tensors]:
    """The model's outputs for a few examples; [] if `compute` calls only parts of it."""
    from loop.model.precision import keras_precision
    from loop.step.replica import probing
    from loop.task import ModelCalls

    calls = ModelCalls(run.model)
    probe = probing(example)
    # Only the shapes are wanted: a mistake of `compute` itself comes again in the first step, with its own message.
    with contextlib.suppress(Exception), calls, run.backend.scope(), keras_precision(run.options["precision"]), probe:
        run.task.compute(run.model, example, training=False)
    return calls.results


def _shapes(value: Tensors, example: Batch, size: int, name: str = "") -> list[JsonObject]:
    """The name, dtype and shape of each tensor in a structure, for a batch of `size`; the name may be ""."""
    from loop.data import count

    if isinstance(value, Mapping):
        parts = [(f"{name}/{key}".lstrip("/"), part) for key, part in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(name, part) for part in value]
    elif not hasattr(value, "dtype"):  # a model may return None beside tensors, or an object of its own
        return []
    else:
        # The length of a ragged axis is None.
        shape = [length if length is None else int(length) for length in getattr(value, "shape", ())]
        # The example has a few rows alone. An axis that is as long is taken for the batch.
        if shape and shape[0] == int(count(example)):
            shape[0] = size
        return [{"name": name, "dtype": getattr(value.dtype, "name", str(value.dtype)), "shape": shape}]
    shapes: list[JsonObject] = []
    for part_name, part in parts:
        shapes += _shapes(part, example, size, part_name)
    return shapes


def _learning_rates(run: Run) -> list[JsonObject]:
    """The learning rate of each optimizer: its name, the class, the rate of the first step, and the schedule."""
    rates: list[JsonObject] = []
    for name, member in optimizers_of(run).items():
        own = own_rate(member)
        schedule = type(own).__name__ if callable(own) else None
        rates.append({
            "name": name, "optimizer": type(member).__name__, "rate": rate_of(member), "schedule": schedule,
        })  # fmt: skip
    return rates


def _elements(variables: list[Variable]) -> int:
    return sum(int(variable.shape.num_elements()) for variable in variables)


def lines(about: About) -> Iterator[str]:
    """What `dry_run` returned, for people; `about["why"]` is the reason for the backend."""
    rows = {
        "batch": _tensors(about["batch"]),
        "model's output": _tensors(about["outputs"]) or "not called as a whole",
        "parameters": f"{about['parameters']['trained']:,} trained, {about['parameters']['all']:,} in all",
        "memory": _memory(about["memory"], about["workers"], about["replicas"]),
        "learning rate": ", ".join(map(_rate, about["learning_rates"])),
        "batch size": _batch_size(about["batch_size"], about["replicas"]),
        "steps": _steps(about["steps_per_epoch"], about["total_steps"]),
        "precision": about["precision"],
        "backend": f"{about['backend']} ({about['why']}), {_topology(about['workers'], about['replicas'])}",
        f"after step {about['steps']}": numbers(about["metrics"]),
    }
    yield f"{about['task']}: a dry run; nothing of it is kept"
    for name, text in rows.items():
        yield f"  {name:16}{text}"


def _tensors(shapes: list[JsonObject]) -> str:
    return ", ".join(f"{tensor['name']} {tensor['dtype']} {tensor['shape']}".strip() for tensor in shapes)


def _memory(memory: About, workers: int, replicas: int) -> str:
    parts = [f"{name} {size(memory[name])}" for name in ("parameters", "gradients", "optimizer")]
    text = ", ".join(parts)
    if replicas > 1:
        text += " on each replica"
    text += f"; peak {size(max(memory['peak']))}"
    if workers > 1:
        text += f" in a worker, {size(sum(memory['peak']))} in all {workers}"
    if any(memory["gpu_peak"]):
        text += f", {size(max(memory['gpu_peak']))} on a GPU"
    return text


def _rate(rate: About) -> str:
    classes = rate["optimizer"]
    if rate["schedule"]:
        classes += f", {rate['schedule']}"
    return f"{rate['name']} {rate['rate']:.6g} ({classes})".strip()


def _batch_size(batch: Mapping[str, int], replicas: int) -> str:
    text = f"{batch['global']:,}"
    if replicas > 1:
        text += f", {batch['replica']:,} on each of {replicas} replicas"
    if batch["micro_batches"] > 1:
        text += f", in {batch['micro_batches']} micro-batches of {batch['micro_batch']:,}"
        if replicas > 1:
            text += f" ({batch['micro_batch_replica']:,} on each replica)"
    return text


def _steps(per_epoch: int | None, total: int | None) -> str:
    text = f"{per_epoch:,} in an epoch" if per_epoch else "as many in an epoch as the stream has"
    return f"{text}, {total:,} in all" if total else text


def _topology(workers: int, replicas: int) -> str:
    text = plural(replicas, "replica")
    return f"{text} in {workers} workers" if workers > 1 else text
