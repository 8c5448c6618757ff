"""`tfloop predict`: what a model predicts for each example, in order, the same bytes on any number of workers.

The examples are cut into blocks of `batch_size`, and the blocks into parts. Each worker computes whole blocks on one
device, in one graph: so the numbers of a block don't depend on how many workers there are, nor on the backend.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import uuid
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from callbacks.run_record.redaction import redact
from loop.backends.base import Backend
from loop.backends.host_collectives import fingerprint
from loop.commands.prediction_files import check_names, joined, write
from loop.commands.prediction_output import OWN_DATA, check_data, check_out, is_own, is_set
from loop.commands.prediction_parts import Parts, blocks_in_part, owner
from loop.data import ArrayData, BatchOptions, IndexedData, Source, StreamData, StreamSource, contents, source
from loop.data.examples import example_seeds
from loop.errors import TrainingError, UsageError, message_of
from loop.model.precision import keras_precision
from loop.model.variables import all_variables
from loop.run import run_directory
from loop.run.result import check_is_path, read_weights
from loop.run.serving import Served, plain_outputs, served_by
from loop.run.session import NOT_TRAINED, Session, index_of, options_and_backend
from loop.run.state import assign_model, numbered
from loop.step.prediction import Prediction
from loop.step.tracing import as_written
from loop.target.fields import plain
from loop.task import TrainTask, check_is_task, hyperparameters

_SAMPLED = 64  # of indexed data, how many examples are compared to find out whether it is the same data
# What damaged files of NumPy raise. `RuntimeError`: an encrypted file, or one with an unknown compression.
_UNREADABLE = (OSError, ValueError, EOFError, MemoryError, RuntimeError, zipfile.BadZipFile, zlib.error)
_FORMAT = 1  # of the parts on disk: those of another format belong to another prediction


def predict(
    task: TrainTask,
    run_or_model: Any,
    data: Any = "eval",
    *,
    out: str | Path | None = None,
    batch_size: int | None = None,
    backend: str | Backend | None = None,
    precision: str | None = None,
) -> Any:
    """Predicts for each example once, in the order of the data.

    Args:
        task: the task, with the hyperparameters of the run; its `predict` says what is predicted.
        run_or_model: a checkpoint, or a run directory, whose weights are those that `evaluate` takes; or a model.
        data: "eval", "train" or "test": the data of the task, or one of several evaluation sets by name; or inputs
            alone: an array, a dict of arrays, or the path of a file `.npy`, `.npz` or `.parquet`.
        out: a file `.npy`, `.npz`, `.parquet` or `.jsonl`, written as a whole at the end. What was computed before a
            kill isn't computed again. None: the arrays are returned.
        batch_size: the examples in a block, which are computed at once.
        backend: as for `fit`. Its workers share the blocks; each computes on one device.
        precision: as for `fit`; give that of the run.

    Returns:
        With `out`, a dict of the file, the number of rows, and dtype and shape of the arrays, the same on all workers;
        without it, an array, or a dict of arrays.

    Raises:
        UsageError: the data can't be predicted on, or `out` can't be written.
    """
    # What can be refused without a model is refused before one is made.
    check_is_task(task, "predict")
    if not hasattr(run_or_model, "variables"):  # else a model, of whatever family
        check_is_path(run_or_model, "predict", ", or a model")
    path = None if out is None else Path(out)
    if path is not None:
        check_out(path)
    if isinstance(data, str | Path):
        check_data(str(data))
    options, backend = options_and_backend(task, {"batch_size": batch_size, "backend": backend, "precision": precision})
    if path is None and backend.workers > 1:  # each has its own blocks alone
        raise UsageError(f"predict() on {backend.workers} workers returns no arrays: give out='predictions.npy'")

    # Without the method, an evaluation set may be named test.
    reads_eval = is_own(data) and data != "train" and not (data == "test" and hasattr(task, "test_data"))
    session, weights = _session(task, run_or_model, options, reads_eval)
    examples = _source(session, data)
    function = keras_precision(options["precision"])(_function(session, data))
    prediction = Prediction(session.built, examples, function, session.phase_options["seed"])
    names = _names(prediction, session, data)
    try:
        if path is None:
            return _in_memory(prediction)
        check_names(path, names)
        about = _about(session, data, examples) | {"weights": weights}
        return _to_file(Parts(path), prediction, about, backend)
    finally:
        session.data.close()


def _session(task: TrainTask, run_or_model: Any, options: dict[str, Any], reads_eval: bool) -> tuple[Session, str]:
    """Data and model, with its weights, on one device; and a hash of the weights."""
    manifest: dict[str, Any] = {}
    if isinstance(run_or_model, str | Path):
        weights, manifest = read_weights(Path(run_or_model))
    else:
        weights = {}
        for name, variable in numbered("model", all_variables(run_or_model)).items():
            weights[name] = np.asarray(variable)
    options |= NOT_TRAINED | {"eval_every": "epoch" if reads_eval else "never", "shuffle": False}
    with run_directory.of_a_run(str(run_or_model)):
        index = index_of(manifest, task)  # alone: an error of the task isn't one of the manifest
    # On one device, whatever backend shares the blocks: a block must be computed in the same graph everywhere.
    session = Session(task, Backend(), options, index, trained_on=1, change=_in_order)
    assign_model(session.built.model, weights)
    return session, fingerprint(*weights.values())


def _in_order(data: Any, options: Mapping[str, Any]) -> Any:
    """The data without buckets, which would bring its examples into another order."""
    padding = getattr(data, "padding", None)
    if padding is None or not padding.bucket_by:
        return data
    unsorted = copy.copy(data)  # the task may go on using its own
    unsorted.padding = dataclasses.replace(padding, bucket_by=False)
    return unsorted


def _source(session: Session, data: Any) -> Source:
    """The examples, in order. Refuses data that the task doesn't have, and data without an end."""
    kind = type(session.task).__name__
    batching = BatchOptions(session.phase_options["batch_size"], prefetch=session.phase_options["prefetch"])
    if not is_own(data):
        label = f"DATA {data}" if isinstance(data, str | Path) else "data"
        return source(_inputs(data), batching, label)

    examples: Source | None
    if data == "train":
        examples = session.data.train
    elif data == "test" and hasattr(session.task, "test_data"):
        test_data = _in_order(session.task.test_data(), {})
        examples = None if test_data is None else source(test_data, batching, "test_data()")
    else:
        examples = _evaluated(session, data)
    if examples is None:
        raise UsageError(f"{kind}.{data}_data() returned None, or isn't defined: give other DATA, or define it")
    if examples.endless:
        raise UsageError(f"{kind}.{data}_data() is endless: .take(n) gives it an end")
    return examples


def _evaluated(session: Session, data: str) -> Source | None:
    """The evaluation set of a name; "eval" is the only one. Refuses a name without a set, and "eval" of several."""
    sets = session.data.evaluated
    if data in sets:
        return sets[data]
    if data == "eval" and len(sets) <= 1:
        return session.data.eval
    if session.data.eval_sets:
        raise UsageError(f"DATA {data!r}: eval_data() of {type(session.task).__name__} has the sets {', '.join(sets)}")
    # No data has this name: it was taken for that of a set, because there is no such file.
    if is_set(data):
        raise UsageError(f"DATA {data!r}: give {', '.join(OWN_DATA)}, or a file that is there")
    return None


def _inputs(data: Any) -> Any:
    """Inputs of the model, from a file or from arrays."""
    if not isinstance(data, str | Path):
        return data if isinstance(data, ArrayData | IndexedData | StreamData) else ArrayData(data)
    path = Path(data)
    try:
        if path.suffix != ".npz":
            return IndexedData(str(path))
        with path.open("rb") as file:
            # Before `np.load`, whose message for such a file advises to allow pickle, which would run foreign code.
            if not zipfile.is_zipfile(file):
                raise ValueError("it isn't a zip file, or not a whole one")
            file.seek(0)
            with np.load(file, allow_pickle=False) as arrays:  # pickle could run code that the file brings
                return ArrayData(dict(arrays))
    except UsageError as error:
        # Such an error names the class of the data, which isn't what the user has given.
        message = str(error)
        for kind in (f"IndexedData({str(path)!r}): ", "IndexedData: ", "ArrayData: "):
            message = message.removeprefix(kind)
        raise UsageError(f"DATA {path}: {message}") from None
    except _UNREADABLE as error:
        raise UsageError(
            f"DATA {path}: it can't be read as .npz ({message_of(error)}): write it with np.savez"
        ) from None


def _function(session: Session, data: Any) -> Callable[[Any, Any], Any]:
    """What is called while the forward pass is traced."""
    task = session.task
    own = as_written(task.predict)
    if type(task).predict is not TrainTask.predict:
        return own
    if is_own(data):
        return lambda model, batch: plain_outputs(own(model, batch))
    # Inputs alone aren't a batch of the task: the model is called as `compute` calls it with the task's own data.
    served = served_by(task, session.built, session.data.eval or session.data.train)
    return lambda model, batch: served.call(_named(served, batch))


def _named(served: Served, batch: Any) -> dict[str, tf.Tensor]:
    """Inputs by the names that the model's arguments have. The names don't matter where there is one of each."""
    example = served.example()
    wanted = example if isinstance(example, dict) else {"inputs": example}
    arrays = batch if isinstance(batch, dict) else dict(zip(wanted, tf.nest.flatten(batch), strict=False))
    if len(wanted) == len(arrays) == 1:
        arrays = dict(zip(wanted, arrays.values(), strict=True))
    for name in wanted:
        if name not in arrays:
            raise UsageError(
                f"DATA has no array {name!r}: the model's inputs are {', '.join(wanted)}, the arrays are "
                f"{', '.join(map(str, arrays))}: give them the same names"
            )
    return {name: _as_dtype(arrays[name], array.dtype) for name, array in wanted.items()}


def _as_dtype(tensor: tf.Tensor, dtype: np.dtype) -> tf.Tensor:
    return tensor if tensor.dtype == tf.string else tf.cast(tensor, dtype)


def _names(prediction: Prediction, session: Session, data: Any) -> list[str]:
    """Traces the forward pass; returns the names of what is predicted."""
    try:
        return prediction.names()
    except Exception as error:
        if isinstance(error.__context__, UsageError):  # AutoGraph shows the lines of the task that led to it
            raise error.__context__ from None
        # With data of the task, such an error is a mistake of the task: it is shown as it is.
        is_of_inputs = isinstance(error, ValueError | TypeError | tf.errors.InvalidArgumentError)
        if isinstance(error, UsageError) or not is_of_inputs or is_own(data):
            raise
        raise UsageError(
            f"the model can't be called with these inputs ({message_of(error)}): give arrays of the shape and dtype "
            f"that the model of {type(session.task).__name__} takes"
        ) from error


def _about(session: Session, data: Any, examples: Source) -> dict[str, Any]:
    """What the numbers depend on, as JSON; a prediction that goes on must have the same."""
    size = None if isinstance(examples, StreamSource) else examples.size
    batch_size = examples.options.batch_size
    blocks = None if size is None else math.ceil(size / batch_size)
    in_part = blocks_in_part(blocks, batch_size)
    return {
        "format": _FORMAT,
        "task": type(session.task).__name__,
        "fields": redact(plain(hyperparameters(session.task))),
        "data": _described(data),
        "examples": size,
        "batch_size": batch_size,
        "blocks_in_part": in_part,
        "parts": None if blocks is None else math.ceil(blocks / in_part),
        "precision": session.options["precision"],
        "threads": tf.config.threading.get_intra_op_parallelism_threads(),
    }


def _described(data: Any) -> str:
    """A text that other data doesn't have, as far as that is known without reading all of it."""
    if isinstance(data, str | Path):
        path = Path(data)
        if is_own(data):  # the task's name and fields, which are compared too, stand for its contents
            return str(data)
        # A large file isn't read for a hash: one that is written anew has another time.
        return f"{path.resolve()}, {path.stat().st_size} bytes, of {path.stat().st_mtime_ns}"
    inputs = _inputs(data)  # lists become arrays
    if isinstance(inputs, StreamData):
        return f"stream {uuid.uuid4()}"  # no other one is known to be the same
    if isinstance(inputs, IndexedData):
        return f"examples {fingerprint(*map(np.asarray, tf.nest.flatten(_sampled(inputs))))}"
    return f"arrays {fingerprint(*contents(inputs, inputs.size))}"


def _sampled(data: IndexedData) -> list[object]:
    """A few examples from the first one to the last one: to read all of them may take as long as to predict."""
    indices = np.unique(np.linspace(0, max(0, data.size - 1), _SAMPLED).astype(np.int64))[: data.size]
    examples = data.reader.read(data.resolve(indices, 0, 0), example_seeds(indices, 0, 0))
    # An example that can't be read ends or leaves out its prediction later; here its error stands for it.
    return [str(example) if isinstance(example, Exception) else example for example in examples]


def _in_memory(prediction: Prediction) -> Any:
    """An array of all examples, or a dict of them."""
    arrays = joined([columns for _, columns in prediction.blocks(lambda number: True)])
    return arrays["output"] if list(arrays) == ["output"] else arrays


def _to_file(parts: Parts, prediction: Prediction, about: dict[str, Any], backend: Backend) -> dict[str, Any]:
    """Computes the parts that are missing, on all workers; the chief makes the file of all of them."""
    if not backend.is_chief:
        _compute(parts, prediction, about, backend, [])
        result: dict[str, Any] = backend.broadcast_json(None)
        return result
    with parts.held():
        count = _compute(parts, prediction, about, backend, parts.begin(about))
        rows = parts.read(count)
        write(parts, rows)
        parts.remove()  # last: a kill before this leaves parts with which the same command goes on
    arrays = {}
    for name, (dtype, shape) in rows.specs.items():
        arrays[name] = f"{np.dtype(dtype).name}{shape}"
    return backend.broadcast_json({"out": str(parts.out), "rows": rows.rows, "arrays": arrays})


def _compute(
    parts: Parts, prediction: Prediction, about: Mapping[str, Any], backend: Backend, complete: list[int]
) -> int:
    """Computes this worker's share of the parts that are missing; returns how many parts there are in all."""
    in_part = about["blocks_in_part"]
    # The chief's list counts: a worker that looked by itself might see parts that others have just written.
    complete = backend.broadcast_json(complete)
    done = set(complete)

    def is_mine(block: int) -> bool:
        part = block // in_part
        return part not in done and owner(part, complete, backend.workers) == backend.rank

    for part, blocks in itertools.groupby(prediction.blocks(is_mine), lambda block: block[0] // in_part):
        parts.write(part, (columns for _, columns in blocks))
    # Also waits for all workers: only then is every part on disk.
    read = backend.exchange(prediction.blocks_read)[:, 0].tolist()
    if len(set(read)) > 1:
        raise TrainingError(f"the workers have read {read} blocks of the data: it must be the same on all of them")
    return math.ceil(read[0] / in_part)
