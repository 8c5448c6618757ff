"""Measures how many examples a second are read: `python -m benchmarks data [ROUNDS] [--only KIND]`.

Three kinds of data, each shuffled globally and cut into batches: JPEG files that are decoded and augmented, records of
1 kB, and sequences of tokens that are padded. All contenders do the same work on the same machine, in one process and
in turns; nothing is trained. Prints the median of each; how many times as fast the best of ours is, the median
of the rounds and their middle half; and the CPU time of this process for a batch, which other programs disturb less.
PyTorch's `DataLoader` takes part where `torch` is installed.
"""

from __future__ import annotations

import importlib.util
import io
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

BATCH = 64
SECONDS = 3.0  # of a turn: in a short one, a contender would live on what it has read ahead while others had theirs
STEPS = 50
OURS = ("ArrayData", "IndexedData")
LENGTHS = np.random.default_rng(2).integers(10, 200, 20_000)
TOKENS = np.random.default_rng(3).integers(0, 30_000, int(LENGTHS.sum())).astype(np.int32)
FIRSTS = np.cumsum(LENGTHS) - LENGTHS


class Files:
    """JPEG files of 96 x 96 pixels."""

    def __init__(self, directory: Path) -> None:
        from PIL import Image

        self.paths = [str(directory / f"{number}.jpg") for number in range(2000)]
        random = np.random.default_rng(0)
        for path in self.paths:
            coarse = random.integers(0, 255, (12, 12, 3), dtype=np.uint8)
            Image.fromarray(coarse).resize((96, 96)).save(path, quality=90)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> bytes:
        return Path(self.paths[index]).read_bytes()


class Records:
    """Records of 1 kB in a memory map."""

    def __init__(self, directory: Path) -> None:
        path = directory / "records.npy"
        np.save(path, np.random.default_rng(1).integers(0, 255, (100_000, 1024), dtype=np.uint8))
        self.path = str(path)
        self.rows = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> np.ndarray:
        return np.asarray(self.rows[index])


class Sequences:
    """Tokens of 10 to 200."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> np.ndarray:
        return TOKENS[FIRSTS[index] : FIRSTS[index] + LENGTHS[index]]


def decoded(data: bytes, seed: np.ndarray) -> np.ndarray:
    """A JPEG file as an array, cropped and flipped at random: float32 [88, 88, 3]."""
    from PIL import Image

    image = np.asarray(Image.open(io.BytesIO(data)))
    random = np.random.default_rng(seed)
    top, left = random.integers(0, 9, 2)
    cropped = image[top : top + 88, left : left + 88]
    if random.random() < 0.5:
        cropped = cropped[:, ::-1]
    return cropped.astype(np.float32) / 255


def ours(data: Any) -> Iterator[Any]:
    """The batches of `IndexedData`, several in a compiled call, as the loop reads them."""
    import tensorflow as tf

    from loop.data import BatchOptions, source
    from loop.monitor.phase_marker import PhaseMarker
    from loop.step.batches import Batches

    made = source(data, BatchOptions(BATCH, shuffle=True, drop_remainder=True, prefetch=4), "train_data()")

    steps_per_epoch = made.steps_per_epoch
    assert steps_per_epoch is not None
    steps = min(STEPS, steps_per_epoch)

    def sized(step: Any, read: Any, sizes: Any) -> Any:
        return sizes + tf.add_n([tf.size(leaf) for leaf in tf.nest.flatten(read)])

    @tf.function(autograph=False)
    def read(epoch: Any, first: Any) -> Any:
        end = first + steps
        batches = Batches(made, (), epoch, end, PhaseMarker(noted=False, timed=False, replicas=1))
        return batches.each(lambda step, _: step < end, sized, first, batches.first(first), tf.constant(0))[-1]

    for epoch in itertools.count():
        for first in range(0, steps_per_epoch - steps + 1, steps):
            yield from itertools.repeat(read(tf.constant(epoch, tf.int64), tf.constant(first, tf.int64)), steps)


def grains(data: Any, transformations: list[Any], workers: int) -> Iterator[Any]:
    """The batches of Grain's own `DataLoader`."""
    import grain

    sampler = grain.samplers.IndexSampler(len(data), shuffle=True, seed=0, num_epochs=None)
    loader = grain.DataLoader(
        data_source=data, sampler=sampler, operations=transformations, worker_count=workers, worker_buffer_size=4
    )
    return iter(loader)


def tf_datas(data: Any, make: Callable[[Any], Any], padded: bool = False) -> Iterator[Any]:
    """The batches of a tuned `tf.data` pipeline."""
    import tensorflow as tf

    indices = tf.data.Dataset.range(len(data)).shuffle(len(data)).repeat()
    examples = make(indices)
    batched = examples.padded_batch(BATCH) if padded else examples.batch(BATCH, num_parallel_calls=tf.data.AUTOTUNE)
    return iter(batched.prefetch(tf.data.AUTOTUNE))


def keras_batches(data: Any, make: Callable[[int], Any], stack: Callable[[list[Any]], Any]) -> Iterator[Any]:
    """The batches of a Keras `PyDataset`, as `fit` reads them with threads."""
    import keras
    from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return len(data) // BATCH

        def __getitem__(self, number: int) -> Any:
            order = np.random.default_rng(number).integers(0, len(data), BATCH)
            return (stack([make(int(index)) for index in order]),)

    while True:
        adapter = PyDatasetAdapter(Batches(workers=os.cpu_count() or 1, use_multiprocessing=False, max_queue_size=8))
        adapter.on_epoch_begin()
        yield from adapter.get_tf_dataset()


class Decoded:
    """The JPEG files as a map-style data set of PyTorch."""

    def __init__(self, files: Files) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> np.ndarray:
        return decoded(self.files[index], np.array([index, 1]))


def torchs(data: Any, workers: int, collate: Callable[[list[Any]], Any] | None = None) -> Iterator[Any]:
    """The batches of PyTorch's `DataLoader`."""
    from torch.utils.data import DataLoader

    processes = {"multiprocessing_context": "spawn", "persistent_workers": True} if workers else {}
    loader = DataLoader(data, BATCH, shuffle=True, drop_last=True, num_workers=workers, collate_fn=collate, **processes)
    while True:
        yield from loader


def stacked(examples: list[np.ndarray]) -> np.ndarray:
    """Examples of different lengths, with zeros behind them, up to 200: Keras takes one shape alone."""
    batch = np.zeros((len(examples), 200), np.int32)
    for row, example in zip(batch, examples, strict=True):
        row[: len(example)] = example
    return batch


def contenders(directory: Path) -> dict[str, dict[str, Callable[[], Iterator[Any]]]]:
    """What is measured: by kind of data, how each contender's batches are begun."""
    import grain
    import tensorflow as tf

    import loop

    files, records, sequences = Files(directory), Records(directory), Sequences()
    cores = os.cpu_count() or 1

    class Decode(grain.transforms.RandomMap):
        def random_map(self, data: bytes, rng: np.random.Generator) -> np.ndarray:
            return decoded(data, rng.integers(0, 1 << 31, 2))

    class Pad(grain.transforms.Map):
        def map(self, tokens: np.ndarray) -> np.ndarray:
            return np.pad(tokens, (0, 200 - len(tokens)))

    @tf.function
    def tf_decoded(path: Any, seed: Any) -> Any:
        image = tf.image.decode_jpeg(tf.io.read_file(path), channels=3)
        cropped = tf.image.stateless_random_crop(image, [88, 88, 3], seed)
        return tf.cast(tf.image.stateless_random_flip_left_right(cropped, seed), tf.float32) / 255

    def of_index(index: Any) -> Any:
        return tf_decoded(tf.gather(tf.constant(files.paths), index), tf.stack([index, index]))

    parallel = {"num_parallel_calls": tf.data.AUTOTUNE}
    memory, tokens = tf.constant(np.asarray(records.rows)), tf.constant(TOKENS)
    firsts, lengths = tf.constant(FIRSTS), tf.constant(LENGTHS)
    batch = grain.transforms.Batch(BATCH, drop_remainder=True)
    kinds = {
        "JPEG, decoded and augmented": {
            "IndexedData, tf.function": lambda: ours(loop.IndexedData(files.paths, map=tf_decoded)),
            "IndexedData, threads": lambda: ours(loop.IndexedData(files, map=decoded)),
            "IndexedData, processes": lambda: ours(loop.IndexedData(files, map=decoded, readers="auto")),
            "Grain, threads": lambda: grains(files, [Decode(), batch], 0),
            "Grain, processes": lambda: grains(files, [Decode(), batch], cores),
            "tf.data": lambda: tf_datas(files, lambda indices: indices.map(of_index, **parallel)),
            "PyDataset": lambda: keras_batches(files, lambda i: decoded(files[i], np.array([i, 1])), np.stack),
        },
        "records of 1 kB": {
            "IndexedData": lambda: ours(loop.IndexedData(records.path)),
            "Grain": lambda: grains(records, [batch], 0),
            "tf.data, in memory": lambda: tf_datas(
                records, lambda indices: indices.map(lambda index: tf.gather(memory, index), **parallel)
            ),
            "PyDataset": lambda: keras_batches(records, records.__getitem__, np.stack),
        },
        "token sequences, padded": {
            "ArrayData": lambda: ours(loop.ArrayData(list(sequences), padding=loop.Padding(mask=False))),
            "IndexedData, loop.sequences": lambda: ours(
                loop.IndexedData(loop.sequences(TOKENS, LENGTHS), padding=loop.Padding(mask=False))
            ),
            "IndexedData": lambda: ours(loop.IndexedData(sequences, padding=loop.Padding(mask=False), lengths=LENGTHS)),
            "Grain, to 200": lambda: grains(sequences, [Pad(), batch], 0),
            "tf.data": lambda: tf_datas(
                sequences,
                lambda indices: indices.map(lambda i: tokens[firsts[i] : firsts[i] + lengths[i]], **parallel),
                padded=True,
            ),
            "PyDataset, to 200": lambda: keras_batches(sequences, sequences.__getitem__, stacked),
        },
    }
    if importlib.util.find_spec("torch"):
        jpeg, rows, padded = kinds.values()
        jpeg["PyTorch, processes"] = lambda: torchs(Decoded(files), cores)
        rows["PyTorch"] = lambda: torchs(records, 0)
        padded["PyTorch, to 200"] = lambda: torchs(sequences, 0, stacked)
    return kinds


def rate(batches: Iterator[Any]) -> tuple[float, float]:
    """Examples a second, and the microseconds of this process's CPU time for a batch."""
    begun = time.perf_counter()
    begun_cpu = time.process_time()
    read = 0
    while time.perf_counter() - begun < SECONDS:
        next(batches)
        read += 1
    cpu = time.process_time() - begun_cpu
    return read * BATCH / (time.perf_counter() - begun), cpu / read * 1e6


def measure(rounds: int, only: str = "") -> None:
    """Prints the medians of the kinds of data that have `only` in their names."""
    with tempfile.TemporaryDirectory() as directory:
        for kind, starts in contenders(Path(directory)).items():
            if only not in kind:
                continue
            live = {name: start() for name, start in starts.items()}
            for batches in live.values():
                rate(batches)  # processes are started, and pipelines tuned
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in live}
            for _ in range(rounds):
                for name, batches in live.items():
                    found[name].append(rate(batches))
            tell(kind, {name: np.array(rounds_of) for name, rounds_of in found.items()})


def tell(kind: str, found: dict[str, np.ndarray]) -> None:
    """Prints the medians of a kind: of what `rate` returned in each round, [rounds, 2]."""
    medians = {name: np.median(rounds, axis=0) for name, rounds in found.items()}
    best = max((name for name in found if name.startswith(OURS)), key=lambda name: medians[name][0])
    print(f"{kind}: examples a second, our best times as fast, CPU time of a batch in us")
    for name, (median, cpu) in sorted(medians.items(), key=lambda item: -item[1][0]):
        # Within a round, since the machine's speed changes in the course of the rounds.
        low, ratio, high = np.percentile(found[best][:, 0] / found[name][:, 0], [25, 50, 75])
        print(f"  {name:<28} {median:>12,.0f}  {ratio:.2f} ({low:.2f} to {high:.2f})  {cpu:>8,.0f}", flush=True)
