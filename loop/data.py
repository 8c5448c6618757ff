"""Data: which examples are in global batch s of epoch e, and which of them a replica gets.

A source is read in two moves, both inside the compiled step. `take` runs once per worker and step; `share` runs in
each replica and returns its rows. Addressed data is a pure function of (seed, epoch, step), so that its order depends
neither on the number of replicas nor on what was read before; a stream has an iterator, and an empty batch after each
epoch.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from loop.backends.base import Backend
from loop.errors import UsageError
from loop.seeds import random_state, set_random_state
from loop.task import TrainTask

_MOST_IN_GRAPH = 1 << 26  # bytes of a data set's tensors that are copied to look at its graph


class ArrayData:
    """Examples in memory: arrays with an equal first axis.

    One array gives bare examples, several give tuples, a dict of arrays gives dicts.

    Args:
        *arrays: NumPy arrays of shape [examples, ...] and of any dtype, or what NumPy can make one of; or a dict of
            them.

    Raises:
        UsageError: no array, an array without a first axis, or first axes of unequal length.
    """

    def __init__(self, *arrays: Any) -> None:
        if not arrays:
            raise UsageError("ArrayData() without arrays: give at least one")
        named = len(arrays) == 1 and isinstance(arrays[0], dict)
        if any(isinstance(each, dict) for each in (arrays[0].values() if named else arrays)):
            raise UsageError("ArrayData: a dict within a dict, or beside other arrays: put all arrays into one dict")
        if named:
            self.arrays: Any = {name: np.asarray(array) for name, array in arrays[0].items()}
        else:
            self.arrays = tuple(map(np.asarray, arrays)) if len(arrays) > 1 else np.asarray(arrays[0])
        shapes = [array.shape for array in tf.nest.flatten(self.arrays)]
        if any(not shape for shape in shapes):
            raise UsageError("ArrayData: a scalar has no examples: give arrays of shape [n, ...]")
        if len({shape[0] for shape in shapes}) != 1:
            raise UsageError(
                f"ArrayData: arrays of unequal length ({', '.join(str(shape[0]) for shape in shapes)} examples; shapes "
                f"{', '.join(map(str, shapes))}): cut them to the same first axis"
            )
        self.size = int(shapes[0][0])


@dataclasses.dataclass(frozen=True)
class Order:
    """How a source is cut into global batches.

    Attributes:
        batch_size: examples in a global batch, over all replicas.
        seed: of the permutations.
        shuffle: whether addressed data is permuted anew each epoch; a stream has its own order.
        drop_remainder: whether a short last batch is left out.
        prefetch: how many batches a stream reads ahead, or "auto": changes no number.
    """

    batch_size: int
    seed: int = 0
    shuffle: bool = False
    drop_remainder: bool = False
    prefetch: int | str = 2


class Rows(NamedTuple):
    """A replica's rows of a (micro-)batch.

    Attributes:
        batch: the examples, stacked along a first axis n; n may be 0.
        first: the place of the first of them among the rows of all replicas; int64.
        epoch: the epoch, from 0; int64.
        number: that of the (micro-)batch in the epoch, from 0; int64.
        index: what tells each example from all others of the epoch: its index in addressed data, its position in a
            stream; int64 [n].
    """

    batch: Any
    first: tf.Tensor
    epoch: tf.Tensor
    number: tf.Tensor
    index: tf.Tensor


class Addressed:
    """`ArrayData` in a certain order: global batch s of epoch e holds examples perm(seed, e)[s*B : (s+1)*B].

    Attributes:
        steps_per_epoch: the number of global batches in an epoch.
        endless: False: it has an end.
        layout: None: a position means the same with any number of workers.
        reads_ahead: True: a batch can be read while the one before it is computed on.
        batch_bytes: how much memory a global batch needs.
    """

    layout: list[Any] | None = None
    reads_ahead = True

    def __init__(self, data: ArrayData, order: Order) -> None:
        size, batch = data.size, order.batch_size
        self.data, self.order, self.size, self.endless = data, order, size, False
        self.steps_per_epoch: int | None = size // batch if order.drop_remainder else -(-size // batch)
        self._replicas, self._first, self._local, self._device = 1, 0, 1, ""
        # Host memory, captured by reference: never copied into a graph.
        with tf.device("CPU:0"):
            self._tensors = tf.nest.map_structure(_constant, data.arrays)
        self.example = tf.nest.map_structure(lambda tensor: tensor[:3], self._tensors)
        self.batch_bytes = max(1, sum(array.nbytes for array in tf.nest.flatten(data.arrays)) * batch // size)

    def head(self, count: int) -> Any:
        """The first examples, as a batch."""
        return tf.nest.map_structure(lambda tensor: tensor[:count], self._tensors)

    def sharded(self, backend: Backend, policy: str) -> Addressed:
        """Each replica gets its rows of each global batch, whatever the policy."""
        shared = copy.copy(self)  # the same tensors, not others
        shared._replicas, shared._local = backend.replicas, backend.local_replicas
        shared._first, shared._device = backend.rank * backend.local_replicas, backend.device
        return shared

    def start(self, epoch: int, step_in_epoch: int, state: np.ndarray | None = None) -> tuple[()]:
        """Nothing to do: every position can be read at once."""
        return ()

    def next_epoch(self, handle: tuple[()]) -> tuple[()]:
        """Nothing to do."""
        return ()

    def state(self, handle: tuple[()]) -> np.ndarray | None:
        """None: the position is all there is."""
        return None

    def unsaved(self, handle: tuple[()]) -> str:
        """Nothing stands in the way of going on from where it was."""
        return ""

    def take(self, handle: tuple[()], epoch: tf.Tensor, step: tf.Tensor, parts: int = 1) -> Any:
        """The worker's rows of the global batch at `step` of `epoch` (int64), one of its `parts` after the other.

        What it gives behind the end of the data is nobody's.
        """
        with tf.device("CPU:0"):
            start, n = self._extent(step)
            low, high = self._own(n, parts)
            if self._replicas == 1:
                places = tf.range(start, start + n)
            else:
                places = tf.ragged.range(start + low, start + high).flat_values
            taken = self._read(epoch, places)
        return self._copied(taken)

    def take_many(self, handle: tuple[()], epoch: tf.Tensor, step: tf.Tensor, steps: int) -> Any:
        """The rows of `steps` whole batches from `step` on, on one replica: shapes [steps, batch size, ...].

        Behind the end of the data they are filled up with whatever there is.
        """
        batch = self.order.batch_size
        with tf.device("CPU:0"):
            places = tf.minimum(step * batch + tf.range(steps * batch, dtype=tf.int64), self.size - 1)
            taken = tf.nest.map_structure(
                lambda tensor: tf.reshape(tensor, [steps, batch, *tensor.shape[1:]]), self._read(epoch, places)
            )
        return self._copied(taken)

    def _copied(self, taken: Any) -> Any:
        """What was taken, on the device that computes; text stays where it is."""
        if not self._device:
            return taken
        with tf.device(self._device):
            return tf.nest.map_structure(
                lambda tensor: tensor if tensor.dtype == tf.string else tf.identity(tensor), taken
            )

    def _extent(self, step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Where the global batch at `step` begins in the order of the epoch, and how many rows it has."""
        start = tf.minimum(step * self.order.batch_size, self.size - 1)
        return start, tf.minimum(tf.constant(self.order.batch_size, tf.int64), self.size - start)

    def _own(self, n: tf.Tensor, parts: int) -> tuple[tf.Tensor, tf.Tensor]:
        """From where and up to where the worker's rows go in each micro-batch of n rows: int64 [parts]."""
        low, high = rows(n, tf.range(parts, dtype=tf.int64), parts)
        first, _ = rows(high - low, self._first, self._replicas)
        _, last = rows(high - low, self._first + self._local - 1, self._replicas)
        return low + first, low + last

    def _read(self, epoch: tf.Tensor, places: tf.Tensor) -> Any:
        """The examples at some places of the order of an epoch: their indices, and themselves."""
        index = places
        if self.order.shuffle:
            # A permutation that can be read from any position, in constant memory. It can't be asked for no position
            # at all: where a worker may have none, one more is asked for, and dropped.
            seed = tf.stack([tf.constant(self.order.seed, tf.int64), epoch])
            asked = tf.concat([places, [0]], 0) if self._replicas > 1 else places
            index = tf.random.experimental.index_shuffle(asked, seed=seed, max_index=self.size - 1)
            index = index[:-1] if self._replicas > 1 else index
        return index, tf.nest.map_structure(lambda tensor: tf.gather(tensor, index), self._tensors)

    def more(self, taken: Any) -> Any:
        """Whether there is anything: the number of steps is known, so yes."""
        return tf.constant(True)

    def whole(self, epoch: tf.Tensor, step: tf.Tensor) -> Rows:
        """The whole global batch at `step` of `epoch`."""
        alone = copy.copy(self)
        alone._replicas, alone._first, alone._local = 1, 0, 1
        return alone.share((epoch, step, alone.take((), epoch, step)), 0)

    def leaves_some_without(self, parts: int) -> bool:
        """Whether one of so many parts of some batch is empty."""
        smallest = self.size % self.order.batch_size or self.order.batch_size
        return parts > (self.order.batch_size if self.order.drop_remainder else smallest)

    def most(self, parts: int) -> int:
        """How many rows one of so many parts of a batch has at most, over all replicas."""
        return -(-self.order.batch_size // parts)

    def share(self, feed: Any, replica: Any, part: Any = 0, parts: int = 1) -> Rows:
        """The replica's rows of micro-batch `part` of `parts` of what `take` gave."""
        epoch, step, (index, batch) = feed
        number, first = step * parts + part, tf.constant(0, tf.int64)
        if parts == 1 and self._replicas == 1:
            index, batch = self._of_known_size((index, batch), parts)
            return Rows(batch, first, epoch, number, index)
        _, n = self._extent(step)
        low, high = rows(n, part, parts)
        first, last = rows(high - low, tf.cast(replica, tf.int64), self._replicas)
        own_low, own_high = self._own(n, parts)
        # What the worker has of the micro-batches before; of the rows of this one, those of workers before it are away.
        ahead = tf.reduce_sum((own_high - own_low)[: tf.cast(part, tf.int32)]) - (own_low[part] - low)
        begin, end = ahead + first, ahead + last
        own = tf.nest.map_structure(lambda tensor: tensor[begin:end], batch)
        index, own = self._of_known_size((index[begin:end], own), parts)
        return Rows(own, first, epoch, number, index)

    def _of_known_size(self, tensors: Any, parts: int) -> Any:
        """Tells the graph how many rows these are, where each (micro-)batch of one replica has as many.

        TensorFlow then works out once, and not in each step, what follows from it: over how much a mean is taken, and
        what is to be broadcast. On several replicas a known shape would be taken for one without rows: see `random`.
        """
        batch, whole = self.order.batch_size, self.order.drop_remainder or self.size % self.order.batch_size == 0
        if self._replicas > 1 or not whole or batch % parts:
            return tensors
        return tf.nest.map_structure(
            lambda tensor: tf.ensure_shape(tensor, [batch // parts, *tensor.shape[1:]]), tensors
        )


def _constant(array: np.ndarray) -> tf.Tensor:
    try:
        return tf.constant(array)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"ArrayData: an array of dtype {array.dtype}, shape {list(array.shape)}, is no tensor ({error}): give "
            "numbers or text, all examples of one shape"
        ) from None


class Stream:
    """A `tf.data.Dataset` of examples, batched, with an iterator for each epoch; behind its end, batches are empty.

    Attributes:
        steps_per_epoch: None: nobody knows before the stream has been read.
        endless: whether the stream is known to have no end.
        layout: how the stream is split, where a position means something else when it is split otherwise; else None.
    """

    steps_per_epoch: int | None = None
    layout: list[Any] | None = None
    reads_ahead = False  # a batch that was read and not used would be lost; the pipeline reads ahead by itself

    def __init__(
        self,
        dataset: tf.data.Dataset,
        order: Order,
        first: int = 0,
        replicas: int = 1,
        workers: int = 1,
        again: Callable[[], Stream | None] | None = None,
    ) -> None:
        check_spec(dataset)
        self.dataset, self.order = dataset, order
        self.endless = dataset.cardinality() == tf.data.INFINITE_CARDINALITY
        self._first, self._replicas = first, replicas
        self._batch_size = order.batch_size * workers
        # One for all epochs: a data set that reshuffles each iteration does so here too.
        ahead = tf.data.AUTOTUNE if order.prefetch == "auto" else order.prefetch
        self._batches = dataset.batch(order.batch_size, drop_remainder=order.drop_remainder).prefetch(ahead)
        self._following = self._batches
        self._again = again
        self._unsaved = ""

    @functools.cached_property
    def example(self) -> Any:
        """The first few examples, as a batch; a batch of none if the stream is empty."""
        with tf.init_scope():  # values, also when a graph that is being traced asks for them
            options = tf.data.Options()
            # Nothing is read ahead: how far that would come, and which seeds would be drawn, nobody knows.
            options.experimental_optimization.inject_prefetch = False
            return next(iter(self.dataset.batch(3).with_options(options)), self.nothing())

    def head(self, count: int) -> Any:
        """The first examples, as a batch: those of `example`, since nothing else may be read beside the training."""
        return tf.nest.map_structure(lambda tensor: tensor[:count], self.example)

    def sharded(self, backend: Backend, policy: str) -> Stream:
        """Shares the stream out over the workers by `policy`, and over the replicas of each by rows."""
        dataset, order = self.dataset, self.order
        by_example = policy == "example"
        if backend.member and not by_example:
            raise UsageError(
                f"ShardData({policy!r}) in an elastic job: a position in such a stream means something else with other "
                'workers; use ShardData("example"), or ArrayData'
            )
        if by_example and backend.workers > 1 and not one_order(dataset):
            raise UsageError(
                "the data set is told that its order doesn't matter (deterministic=False): each of "
                f"{backend.workers} workers would read another one, so that some examples are used twice and others "
                'not at all; leave that out, or use ShardData("file")'
            )
        if not by_example and backend.workers > 1:
            if order.batch_size % backend.workers:
                raise UsageError(
                    f"ShardData({policy!r}): batch_size={order.batch_size} can't be divided over {backend.workers} "
                    f"workers: give a multiple of {backend.workers}"
                )
            order = dataclasses.replace(order, batch_size=order.batch_size // backend.workers)
        if policy == "file" and backend.workers > 1:
            dataset = shard_files(dataset, backend.workers, backend.rank)
        if by_example:
            split = Stream(dataset, order, 0, backend.replicas)
        else:
            first = backend.rank * backend.local_replicas
            split = Stream(dataset, order, first, backend.local_replicas, backend.workers)
            split.layout = [policy, backend.workers]
        # Read once: another iterator would draw from the seeds of a data set that shuffles.
        split.__dict__["example"] = self.example
        if (again := self._again) is not None:
            split._again = lambda: (made := again()) and made.sharded(backend, policy)
        return split

    def most(self, parts: int) -> int:
        """How many rows one of so many parts of a batch has at most, over all replicas."""
        workers = self._batch_size // self.order.batch_size
        return workers * -(-self.order.batch_size // parts)

    def start(self, epoch: int, step_in_epoch: int, state: np.ndarray | None = None) -> Any:
        """Opens the stream at a position: by its iterator's state there, or by reading up to it.

        Raises:
            tf.errors.OpError: the state is that of an iterator of another pipeline.
        """
        again = self._again() if self._again is not None and state is not None else None
        if again is not None:
            return self._restored(again, epoch, step_in_epoch, state)
        for _ in range(epoch):
            for _ in iter(self._batches):
                pass
        iterator = iter(self._batches)
        for _ in range(step_in_epoch):
            next(iterator, None)
        return iterator

    def _restored(self, again: Stream, epoch: int, step_in_epoch: int, state: Any) -> Any:
        """The iterator of a position, by its state.

        An iterator's state tells the rest of its epoch, but not always the seeds of the order of the next: those are
        drawn anew, from the same pipeline, made again.
        """
        self._following = again._batches
        for _ in range(epoch + (step_in_epoch > 0)):
            next(iter(self._following), None)
        if not step_in_epoch:
            return iter(self._following)
        iterator = iter(self._batches)
        variant = tf.io.parse_tensor(state.tobytes(), tf.variant)
        tf.raw_ops.DeserializeIterator(resource_handle=iterator._iterator_resource, serialized=variant)
        return iterator

    def next_epoch(self, handle: Any) -> Any:
        """The handle of the epoch behind that of `handle`."""
        return iter(self._following)

    def state(self, handle: Any) -> np.ndarray | None:
        """The iterator's state, buffers of shuffling included: uint8 [n]; None where it can't tell what follows."""
        if self._again is None or not one_order_an_epoch(self.dataset):
            self._unsaved = "it shuffles within a repeat, or within one of several parts, or can't be made again"
            return None
        policy = self.dataset.options().experimental_external_state_policy
        try:
            variant = tf.raw_ops.SerializeIterator(
                resource_handle=handle._iterator_resource,
                external_state_policy=2 if policy is None else policy.value,  # 2: fail where something has state
            )
            return np.frombuffer(tf.io.serialize_tensor(variant).numpy(), np.uint8)
        except tf.errors.OpError as error:
            self._unsaved = str(error.message).split(" [Op:")[0].split("}} ")[-1]
            return None

    def unsaved(self, handle: Any) -> str:
        """Why `state` is None; "" if it isn't."""
        return self._unsaved if self.state(handle) is None else ""

    def take(self, handle: Any, epoch: tf.Tensor, step: tf.Tensor, parts: int = 1) -> Any:
        """The worker's next batch; an empty one at the end of its epoch, and then until all workers are there."""
        found = handle.get_next_as_optional()
        return tf.cond(found.has_value(), found.get_value, self.nothing)

    def more(self, taken: Any) -> Any:
        """Whether the worker's batch holds examples."""
        return count(taken) > 0

    def whole(self, epoch: tf.Tensor, step: tf.Tensor, batch: Any) -> Rows:
        """The worker's whole batch, which was `batch`."""
        alone = copy.copy(self)
        alone._replicas, alone._first = 1, 0
        rows = alone.share((epoch, step, batch), 0)
        ahead = self._first // self._replicas * self.order.batch_size
        return rows._replace(first=rows.first + ahead, index=rows.index + ahead)

    def leaves_some_without(self, parts: int) -> bool:
        """Whether one of so many parts of some batch is empty: that behind each epoch is."""
        return True

    def share(self, feed: Any, replica: Any, part: Any = 0, parts: int = 1) -> Rows:
        """The replica's rows of micro-batch `part` of `parts` of its worker's batch."""
        epoch, step, batch = feed
        start, stop = tf.constant(0, tf.int64), count(batch)
        if parts > 1:
            start, stop = rows(stop, part, parts)
        first, end = rows(stop - start, tf.cast(replica, tf.int64) - self._first, self._replicas)
        low, high = start + first, start + end
        # A worker that reads a share of its own has its places behind those of the workers before it.
        ahead = self._first // self._replicas * self.order.batch_size
        index = step * self._batch_size + ahead + tf.range(low, high)
        own = tf.nest.map_structure(lambda tensor: tensor[low:high], batch)
        return Rows(own, first + ahead, epoch, step * parts + part, index)

    def nothing(self) -> Any:
        """A batch without rows."""

        def empty(spec: tf.TensorSpec) -> tf.Tensor:
            return tf.zeros([0, *(size or 0 for size in spec.shape)], spec.dtype)

        return tf.nest.map_structure(empty, self.dataset.element_spec)


@dataclasses.dataclass
class Data:
    """The sources of a run.

    Attributes:
        train: the training data.
        eval: the evaluation data, or None.
    """

    train: Addressed | Stream
    eval: Addressed | Stream | None

    def sharded(self, backend: Backend, policy: str) -> Data:
        """The same sources, shared out over the replicas of `backend`; see `callbacks.ShardData`."""
        return Data(self.train.sharded(backend, policy), self.eval and self.eval.sharded(backend, policy))


def open_data(task: TrainTask, options: dict[str, Any]) -> Data:
    """Opens the data of a task, in the order that the options say; not yet shared out.

    Raises:
        UsageError: something that is no data; no examples, or none left by `drop_remainder`; an endless stream and no
            number of steps, or an endless one for evaluation.
    """
    order = Order(*(options[field.name] for field in dataclasses.fields(Order)))
    data, overfit = task.train_data(), options["overfit"]
    if overfit is not None:
        data = first(data, overfit * options["batch_size"])
    train = source(data, order, "train_data()", lambda: made_again(task, options["seed"]))
    if train.endless and options["steps"] is None:
        raise UsageError("train_data() is endless: say how many steps to make (steps=..., --steps N)")
    held_out = None
    if options["eval_every"] != "never":
        held_out = task.eval_data() if overfit is None else data
    if held_out is None:
        return Data(train, None)
    evaluation = source(held_out, Order(options["batch_size"], prefetch=options["prefetch"]), "eval_data()")
    if evaluation.endless:
        raise UsageError("eval_data() is endless: an evaluation needs an end; .take(n) gives it one")
    return Data(train, evaluation)


def first(data: Any, size: int) -> Any:
    """The first examples of what a task returned, in memory: the same ones each time that they are read."""
    if isinstance(data, tf.data.Dataset):
        check_spec(data)
        batch = next(iter(data.take(size).batch(size)), None)
        arrays = tf.nest.map_structure(lambda tensor: tensor.numpy(), batch)
    elif isinstance(data, ArrayData):
        arrays = tf.nest.map_structure(lambda array: array[:size], data.arrays)
    else:
        return data  # `source` says what is wrong with it
    if arrays is None:
        raise no_examples("train_data()")
    some = ArrayData(*tf.nest.flatten(arrays))
    some.arrays = arrays
    return some


def made_again(task: TrainTask, seed: int) -> Any:
    """What `train_data` returned, once more, from the same seeds."""
    before = random_state()
    keras.utils.set_random_seed(seed)
    try:
        return task.train_data()
    finally:
        set_random_state(before)


def source(data: Any, order: Order, what: str, make: Callable[[], Any] | None = None) -> Addressed | Stream:
    """Makes a source of what the method `what` of a task returned; `make` does so again; see `open_data`."""
    if isinstance(data, ArrayData):
        if not data.size:
            raise no_examples(what)
        if order.drop_remainder and data.size < order.batch_size:
            raise UsageError(
                f"{what}: drop_remainder with batch_size={order.batch_size} leaves nothing of {data.size} examples: "
                "make the batch smaller, or keep the remainder"
            )
        return Addressed(data, order)
    if isinstance(data, tf.data.Dataset):
        stream = Stream(data, order)
        if not count(stream.example):
            raise no_examples(what)
        if make is not None and one_order_an_epoch(data):

            def again() -> Any:
                made = make()
                return None if made is data else source(made, order, what)

            stream._again = again
        return stream
    raise UsageError(f"{what} returned {type(data).__name__}: return ArrayData(...) or an unbatched tf.data.Dataset")


def no_examples(what: str) -> UsageError:
    """The error for a source without examples."""
    return UsageError(f"{what} has no examples: nothing can be trained or evaluated on it")


def check_spec(dataset: tf.data.Dataset) -> None:
    """Refuses a stream whose examples can't be stacked."""
    for spec in tf.nest.flatten(dataset.element_spec):
        if not isinstance(spec, tf.TensorSpec):
            raise UsageError(f"the data set yields {type(spec).__name__}: only dense tensors can be shared out by rows")
        if spec.shape.rank is None:
            raise UsageError(
                "the data set yields tensors of unknown rank: tell it, with tf.ensure_shape(x, [None, ...])"
            )


def rows(n: Any, part: Any, parts: int) -> tuple[Any, Any]:
    """The rows `part*n//parts .. (part+1)*n//parts`: contiguous, even to one, possibly none."""
    return part * n // parts, (part + 1) * n // parts


def count(batch: Any) -> Any:
    """The number of rows of a batch, as an int64 tensor."""
    return tf.shape(tf.nest.flatten(batch)[0], out_type=tf.int64)[0]


def one_order(dataset: tf.data.Dataset) -> bool:
    """Whether a pipeline yields its examples in the same order each time, as far as its parts tell."""
    parts: list[Any] = [dataset]
    tensors: list[Any] = []
    for part in parts:  # which grows
        if part.options().deterministic is False:
            return False
        parts += part._inputs()
        tensors += getattr(part, "_tensors", [])
        tensors += [each for function in part._functions() for each in function.function.captured_inputs]
    if sum(each.dtype.size * (each.shape.num_elements() or 0) for each in tensors) > _MOST_IN_GRAPH:
        return all(getattr(part, "_deterministic", "") != "false" for part in parts)
    # Interleaving doesn't keep what it was told, nor do data sets within functions: the graph has it.
    policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    try:
        graph = tf.compat.v1.GraphDef.FromString(dataset._as_serialized_graph(external_state_policy=policy).numpy())
    except tf.errors.OpError:
        return True
    nodes = itertools.chain(graph.node, *(function.node_def for function in graph.library.function))
    return all(node.attr["deterministic"].s != b"false" for node in nodes)


def one_order_an_epoch(dataset: tf.data.Dataset, within: bool = False) -> bool:
    """Whether each shuffling part of a pipeline starts once in an epoch, at its beginning.

    Args:
        dataset: the pipeline.
        within: whether it is a part that may start later, or more often: of a repeat, or of one of several inputs.
    """
    inputs, kind = dataset._inputs(), type(dataset).__name__
    if within and ("Shuffle" in kind or "Random" in kind):
        return False
    within = within or len(inputs) > 1 or "Repeat" in kind
    return all(one_order_an_epoch(each, within) for each in inputs)


def shard_files(dataset: tf.data.Dataset, workers: int, rank: int) -> tf.data.Dataset:
    """The part of a data set that comes from every `workers`-th file, from file `rank` on.

    Raises:
        UsageError: the data set doesn't start from files, or from fewer files than workers.
    """
    file_policy = 1  # tf.data.experimental.AutoShardPolicy.FILE
    try:
        variant = tf.raw_ops.AutoShardDataset(
            input_dataset=tf.data.experimental.to_variant(dataset), num_workers=workers, index=rank,
            auto_shard_policy=file_policy, num_replicas=workers, **dataset._flat_structure,
        )  # fmt: skip
        sharded = tf.data.experimental.from_variant(variant, dataset.element_spec)
        next(iter(sharded.take(1)), None)
    except (tf.errors.OpError, ValueError) as error:
        raise UsageError(
            f'ShardData("file"): the data set can\'t be split by files over {workers} workers ({error}): it must read '
            'at least as many files as there are workers; or use ShardData("example")'
        ) from None
    return sharded
