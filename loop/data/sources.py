"""The sources of a run: what a task returned, checked, in the order that the options ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from loop.backends.base import Backend
from loop.data import evaluation_sets
from loop.data.array_source import ArraySource
from loop.data.arrays import ArrayData
from loop.data.batch import BatchOptions, count
from loop.data.batched import check_unbatched, warn_of_equal_sizes
from loop.data.host_random import random_state, seed_generators, set_random_state
from loop.data.indexed import IndexedData
from loop.data.indexed_source import IndexedSource
from loop.data.padded_arrays import PaddedArraySource
from loop.data.parts import fixed_head, no_examples
from loop.data.pipelines import check_spec, one_order_an_epoch, warn_of_shuffle_that_goes_on
from loop.data.streams import StreamData, StreamSource
from loop.errors import UsageError
from loop.options import Options
from loop.task import Dataset, TrainTask

Source = ArraySource | StreamSource

Change = Callable[[Dataset, Options], Dataset]
"""Makes other data from what a method of a task returned and the options of `fit`."""


def unchanged(data: Dataset, options: Options) -> Dataset:
    """Returns the data as a task returned it."""
    return data


@dataclasses.dataclass
class Data:
    """The sources of a run."""

    train: Source  # the training data
    eval: Source | None  # the evaluation data, or None; of several sets the first one
    # Several sets of evaluation data by name; empty if there is one set, or none.
    eval_sets: dict[str, Source] = dataclasses.field(default_factory=dict)

    @property
    def evaluated(self) -> dict[str, Source]:
        """All evaluation data by name; a single set has the name ""."""
        if self.eval_sets or self.eval is None:
            return self.eval_sets
        return {"": self.eval}

    @property
    def sources(self) -> list[Source]:
        """The training data, and all evaluation data."""
        return [self.train, *self.evaluated.values()]

    def sharded(self, backend: Backend, policy: str) -> Data:
        """The same sources, shared out over the replicas of `backend`; see `callbacks.ShardData`."""
        train = self.train.sharded(backend, policy)
        evaluated = {name: source.sharded(backend, policy) for name, source in self.evaluated.items()}
        return _data(train, evaluated)

    def close(self) -> None:
        """Ends the threads and processes that read ahead. Sources that are read later start new ones."""
        for opened in self.sources:
            if isinstance(opened, IndexedSource):
                opened.close()


def _data(train: Source, evaluated: dict[str, Source]) -> Data:
    """The sources of a run. A single evaluation set has the name ""."""
    first_set = next(iter(evaluated.values()), None)
    named_sets = {} if "" in evaluated else evaluated
    return Data(train, first_set, named_sets)


def open_data(task: TrainTask, options: Options, change: Change = unchanged) -> Data:
    """Opens what a task returns as its data, changed, in the order that the options say; not yet shared out.

    Raises:
        UsageError: something that isn't data; no examples, or none left by `drop_remainder`; an endless stream and no
            number of steps, or an endless one for evaluation.
    """
    # The fields of `BatchOptions` have the names of the options of `fit`.
    values = [options[field.name] for field in dataclasses.fields(BatchOptions)]
    batching = BatchOptions(*values)
    overfit = options["overfit"]
    data = change(task.train_data(), options)
    if overfit is not None:
        data = fixed_head(data, overfit * options["batch_size"])

    # `made_again` is called only where a stream is resumed by the state of its iterator.
    train = source(data, batching, "train_data()", lambda: made_again(task, options, change))
    if train.endless and options["steps"] is None:
        raise UsageError("train_data() is endless: say how many steps to make (steps=..., --steps N)")

    # With `overfit`, every set is evaluated on the batches that are trained on.
    evaluated = {}
    for name, held_out in _held_out(task, options).items():
        set_data = change(held_out, options) if overfit is None else data
        evaluated[name] = _evaluation_source(set_data, options, name)
    return _data(train, evaluated)


def _held_out(task: TrainTask, options: Options) -> dict[str, Dataset]:
    """The evaluation sets that are evaluated at some time, out of those that `eval_data` returned; by name."""
    if options["eval_every"] == "never":
        return {}
    sets = evaluation_sets.named(task.eval_data())
    if options["overfit"] is not None:
        sets = sets or {"": None}  # the batches that are trained on are evaluated in any case
    evaluation_sets.check_paces(task, options, list(sets))

    evaluated = {}
    for name, held_out in sets.items():
        if evaluation_sets.pace(options, name) != "never":
            evaluated[name] = held_out
    return evaluated


def _evaluation_source(held_out: Dataset, options: Options, name: str) -> Source:
    """Makes a source of an evaluation set."""
    what = evaluation_sets.described(name)
    # The random numbers that the map of indexed data draws depend on the seed of the run. Nothing else of an evaluation
    # depends on it.
    seed = options["seed"] if isinstance(held_out, IndexedData) else 0
    in_order = BatchOptions(options["batch_size"], seed=seed, prefetch=options["prefetch"])
    made = source(held_out, in_order, what)
    if made.endless:
        raise UsageError(f"{what} is endless: an evaluation needs an end; .take(n) gives it one")
    return made


def made_again(task: TrainTask, options: Options, change: Change) -> Dataset:
    """Calls `train_data` once more, with the same seeds; returns the data."""
    # The seeds of a run are set before `train_data` is called first. Afterwards the run's own draws must go on as if
    # nothing had been drawn here.
    before = random_state()
    seed_generators(options["seed"])
    try:
        return change(task.train_data(), options)
    finally:
        set_random_state(before)


def source(data: Dataset, options: BatchOptions, what: str, make: Callable[[], Dataset] | None = None) -> Source:
    """Makes a source from what a method of a task, named `what`, has returned.

    `make` calls the method once more, for later epochs of a stream.

    Raises:
        UsageError: see `open_data`.
    """
    if isinstance(data, ArrayData | IndexedData):
        return _array_source(data, options, what)
    if not isinstance(data, StreamData | tf.data.Dataset):
        raise UsageError(
            f"{what} returned {type(data).__name__}: return ArrayData(...), IndexedData(...) of anything with len() "
            "and [index], StreamData(...) or an unbatched tf.data.Dataset, such as "
            "tf.data.Dataset.from_generator(function, output_signature=...)"
        )
    stream = data if isinstance(data, StreamData) else StreamData(data)
    made = _stream_source(stream, options, what)
    if make is not None:
        warn_of_shuffle_that_goes_on(stream.dataset, what)
    # Only where shuffling restarts at the start of an epoch can a state be restored: see `StreamSource._restored`.
    if make is not None and one_order_an_epoch(stream.dataset):

        def again() -> StreamSource | None:
            once_more = make()
            if once_more is data:
                return None  # this object has drawn seeds already, so it would go on instead of beginning again
            remade = source(once_more, options, what)  # without `make`: what is made again isn't resumed itself
            assert isinstance(remade, StreamSource)
            return remade

        made.again = again
    return made


def _array_source(data: ArrayData | IndexedData, options: BatchOptions, what: str) -> ArraySource:
    if not data.size:
        raise no_examples(what)
    if options.drop_remainder and data.size < options.batch_size:
        raise UsageError(
            f"{what}: drop_remainder with batch_size={options.batch_size} leaves nothing of {data.size} examples: "
            "make the batch smaller, or keep the remainder"
        )
    if isinstance(data, IndexedData):
        return IndexedSource(data, options)
    return ArraySource(data, options) if data.padding is None else PaddedArraySource(data, options)


def _stream_source(data: StreamData, options: BatchOptions, what: str) -> StreamSource:
    check_spec(data.dataset)  # first: what follows takes shapes for granted
    if data.check_batched:
        check_unbatched(data.dataset, what, data.padding is not None)
    stream = StreamSource(data.dataset, options, padding=data.padding)
    if not count(stream.example):
        raise no_examples(what)
    # After the check by the pipeline, since this one reads examples, and knows less.
    if data.check_batched and data.padding is None:
        warn_of_equal_sizes(data.dataset, stream.example, what)
    return stream
