"""`tfloop train --dry-run`: two steps and an evaluation of a task, and what they tell; nothing is left behind.

What the launcher needs of it loads no TensorFlow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import callbacks
from callbacks import Callback, Metrics, Run
from callbacks.epoch_lines import numbers
from callbacks.formats import size
from callbacks.throughput_probe import peak_memory
from loop.launch import signals
from loop.options import with_defaults

if TYPE_CHECKING:
    from loop.backends.base import Backend
    from loop.task import TrainTask

STEPS = 2
"""So many steps are made."""


def dry_run(task: TrainTask, backend: Backend, options: Mapping[str, Any]) -> dict[str, Any]:
    """Builds all that `fit` builds, makes two steps from step 0 on, and evaluates.

    Args:
        task: the task.
        backend: the engine. All workers must call it.
        options: those of `fit`. What is asked of the run directory, or of a checkpoint, doesn't count.

    Returns:
        What there is to tell, as JSON values; see `lines`.
    """
    from loop.fit import fit

    look = _Look()
    evaluates = with_defaults(task, options)["eval_every"] != "never"
    changes = {"eval_every": STEPS if evaluates else "never", "resume": None, "profile": None, "keep": "last"}
    chosen = callbacks.standard(checkpoint=None, journal=None, mlflow=None, progress=None) + [look]
    with signals.temporary_directory("tfloop-dry-run-") as directory:
        result = fit(task, **{**options, **changes, "backend": backend}, run_dir=directory, callbacks=chosen)
    memory = backend.gather_json(peak_memory())
    look.about["memory"] |= {"peak": [host for host, _ in memory], "gpu_peak": [gpu for _, gpu in memory]}
    return look.about | {"status": result.status, "steps": result.steps}


class _Look(Callback):
    """Looks at a run, and ends it after two steps and the evaluation that is due then."""

    runs_on: ClassVar[Literal["chief", "all"]] = "all"
    every = tuple(range(1, STEPS + 1))

    def __init__(self) -> None:
        self.about: dict[str, Any] = {}

    def on_data(self, run: Run, data: Any) -> Any:
        size, example = run.options["batch_size"], data.train.example
        self.about |= {"task": type(run.task).__name__, "batch": _shapes(example, example, size)}
        self.about["outputs"] = _shapes(_outputs(run, example), example, size)
        return data

    def on_fit_start(self, run: Run) -> None:
        from loop.model.variables import as_tf, model_variables, optimizer_variables, trainable_variables

        size, parts = run.options["batch_size"], run.options["accumulate"]
        replicas, micro = run.backend.replicas, -(-size // parts)
        trained, all_ = as_tf(trainable_variables(run.model)), model_variables(run.model)
        self.about |= {
            "parameters": {"trained": _elements(trained), "all": _elements(all_)},
            "memory": {"parameters": _bytes(all_), "optimizer": _bytes(optimizer_variables(run.optimizer))},
            "learning_rates": _learning_rates(run.optimizer),
            "batch_size": {
                "global": size, "replica": -(-size // replicas), "micro_batches": parts, "micro_batch": micro,
                "micro_batch_replica": -(-micro // replicas),
            },
            "steps_per_epoch": run.step.data.train.steps_per_epoch,  # type: ignore[attr-defined]
            "total_steps": run.total_steps,
            "precision": run.options["precision"],
            "backend": run.backend.name,
            "workers": run.backend.workers,
            "replicas": replicas,
            "metrics": {},
        }  # fmt: skip

    def on_steps_end(self, run: Run, metrics: Metrics) -> None:
        self.about["metrics"] = dict(metrics)
        if run.progress.step >= STEPS:
            run.stop("dry run")

    def on_eval_end(self, run: Run, metrics: Metrics) -> None:
        self.about["metrics"] |= metrics


class _Heard:
    """A model whose outputs are heard, as `compute` calls it."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._outputs: list[Any] = []

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        self._outputs.append(self._model(*inputs, **named))
        return self._outputs[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _outputs(run: Run, example: Any) -> list[Any]:
    """What the model gives for a few examples; nothing where `compute` calls parts of it, or minds who listens."""
    from loop.data import count
    from loop.model.precision import keras_precision
    from loop.step.replica import probing

    heard = _Heard(run.model)
    probe = probing(int(count(example)))
    with contextlib.suppress(Exception), run.backend.scope(), keras_precision(run.options["precision"]), probe:
        run.task.compute(heard, example, training=False)
    return heard._outputs


def _shapes(value: Any, example: Any, size: int, name: str = "") -> list[dict[str, Any]]:
    """Of each tensor in a structure: its name, if it has one; its type; its shape, for a batch of `size`."""
    from loop.data import count

    if isinstance(value, Mapping):
        parts = [_shapes(each, example, size, f"{name}/{key}".lstrip("/")) for key, each in value.items()]
        return [shape for part in parts for shape in part]
    if isinstance(value, list | tuple):
        return [shape for each in value for shape in _shapes(each, example, size, name)]
    shape = [int(length) for length in getattr(value, "shape", ())]
    if shape and shape[0] == int(count(example)):
        shape[0] = size
    return [{"name": name, "dtype": getattr(value.dtype, "name", str(value.dtype)), "shape": shape}]


def _learning_rates(optimizer: Any) -> list[dict[str, Any]]:
    import numpy as np

    rates = []
    for name, each in optimizer.items() if isinstance(optimizer, Mapping) else [("", optimizer)]:
        own, now = getattr(each, "_learning_rate", None), each.learning_rate
        rate = float(np.asarray(now(each.iterations) if callable(now) else now))
        schedule = type(own).__name__ if callable(own) else None
        rates.append({"name": name, "optimizer": type(each).__name__, "rate": rate, "schedule": schedule})
    return rates


def _elements(variables: list[Any]) -> int:
    return sum(int(each.shape.num_elements()) for each in variables)


def _bytes(variables: list[Any]) -> int:
    return sum(int(each.shape.num_elements()) * each.dtype.size for each in variables)


def lines(about: Mapping[str, Any]) -> Iterator[str]:
    """What there is to tell, for people; `about["why"]` is the reason for the engine."""
    batch, memory, replicas = about["batch_size"], about["memory"], about["replicas"]
    each = f", {batch['replica']:,} on each of {replicas} replicas" if replicas > 1 else ""
    if batch["micro_batches"] > 1:
        part = f" ({batch['micro_batch_replica']:,} on each replica)" if replicas > 1 else ""
        each += f", in {batch['micro_batches']} micro-batches of {batch['micro_batch']:,}{part}"
    rates = [
        f"{rate['name']} {rate['rate']:.6g} ({', '.join(filter(None, [rate['optimizer'], rate['schedule']]))})"
        for rate in about["learning_rates"]
    ]
    peak = f"peak {size(max(memory['peak']))}"
    if about["workers"] > 1:
        peak += f" in a worker, {size(sum(memory['peak']))} in all {about['workers']}"
    if any(memory["gpu_peak"]):
        peak += f", {size(max(memory['gpu_peak']))} on a GPU"
    copies = " on each replica" if replicas > 1 else ""
    total, per_epoch = about["total_steps"], about["steps_per_epoch"]
    steps = f"{per_epoch:,} in an epoch" if per_epoch else "as many in an epoch as the stream has"
    of = f"{replicas} replica{'s' * (replicas > 1)}"
    where = f"{of} in {about['workers']} workers" if about["workers"] > 1 else of
    told = {
        "batch": _texts(about["batch"]),
        "model's output": _texts(about["outputs"]) or "not called as a whole",
        "parameters": f"{about['parameters']['trained']:,} trained, {about['parameters']['all']:,} in all",
        "memory": f"parameters {size(memory['parameters'])}, optimizer {size(memory['optimizer'])}{copies}; {peak}",
        "learning rate": ", ".join(rates).strip(),
        "batch size": f"{batch['global']:,}{each}",
        "steps": steps + (f", {total:,} in all" if total else ""),
        "precision": about["precision"],
        "engine": f"{about['backend']} ({about['why']}), {where}",
        f"after step {about['steps']}": numbers(about["metrics"]),
    }
    yield f"{about['task']}: a dry run; nothing of it is kept"
    for name, text in told.items():
        yield f"  {name:16}{text}"


def _texts(shapes: list[dict[str, Any]]) -> str:
    return ", ".join(f"{each['name']} {each['dtype']} {each['shape']}".strip() for each in shapes)
