"""Reads examples of indexed data into the rows of a batch."""

from __future__ import annotations

import warnings

import numpy as np

from loop.data.batch import SKIPPED
from loop.data.batch_layout import BatchLayout
from loop.data.examples import Arrays, BadExampleError, arrays_of, checked, example_seeds
from loop.data.indexed import IndexedData
from loop.data.pending_batches import PendingBatches
from loop.data.reader_process import ReaderProcesses, pickled
from loop.errors import TrainingError


class BatchFiller:
    """Reads examples into the rows of batches, for several threads at once.

    Attributes:
        whole_batches: whether what is read is a batch already, so that no empty batch has to be made and filled.
    """

    def __init__(self, data: IndexedData, layout: BatchLayout, seed: int) -> None:
        self._data = data
        self._layout = layout
        self._seed = seed
        # Rows that are read by column are a batch already, unless one of them may have to be left out.
        self.whole_batches = data.reader.by_column and not (data.readers or layout.padded or data.skips)
        self._processes = ReaderProcesses(pickled(data.reader, layout.specs), data.readers) if data.readers else None

    def fill(self, batches: PendingBatches, stretch: slice, thread: int) -> None:
        """Reads a stretch of the rows of some batches, in the thread of this number.

        Raises:
            BadExampleError: an example has other arrays than the first, if it isn't to be skipped.
            TrainingError: an example can't be read, if it isn't to be skipped; a reader process has ended.
        """
        # Seeds are made of the order's indices, ids are the source's numbers: a part of the data has other ids.
        indices = batches.index[stretch]
        epoch = batches.first.epoch
        ids = self._data.resolve(indices, epoch, self._seed)
        seeds = example_seeds(indices, epoch, self._seed)
        if self.whole_batches:
            columns = arrays_of(self._data.reader, self._layout.specs, ids, seeds)
            if not isinstance(columns, tuple):  # one of them can't be read
                raise next(error for error in columns if isinstance(error, Exception))
            batches.leaves = self._layout.leaves_of(columns)
            return

        # From the fastest way to the slowest: filled while they were read, by whole columns, and one by one.
        read = self._read_examples(ids, seeds, thread, batches, stretch)
        if isinstance(read, tuple) and self._layout.fill_columns(batches, stretch, read):
            return
        examples = list(zip(*read, strict=True)) if isinstance(read, tuple) else read
        widths = batches.widths_of(stretch)
        for number, arrays in enumerate(examples):
            row = stretch.start + number
            try:
                self._layout.fill(batches, row, arrays, int(ids[number]), widths[number])
            except (BadExampleError, TrainingError) as error:
                if not self._data.skips:
                    raise
                warnings.warn(f"{error}; it is left out (on_bad_example='skip')", stacklevel=2)
                # The row stays, so that all others stay where they are; the graph takes it out.
                self._layout.clear(batches, row)
                batches.index[row] = SKIPPED

    def close(self) -> None:
        """Ends the processes that read."""
        if self._processes is not None:
            self._processes.close()

    def _read_examples(
        self, ids: np.ndarray, seeds: np.ndarray, thread: int, batches: PendingBatches, stretch: slice
    ) -> Arrays:
        """See `arrays_of`; by the process of this thread, once it is ready. Empty: the rows are filled already."""
        reader = self._data.reader
        process = self._processes and self._processes.of_thread(thread)
        if process:  # else there is none, or it is still starting, and this thread reads
            return process.read(ids, seeds)
        if reader.by_column:
            return arrays_of(reader, self._layout.specs, ids, seeds)
        examples = reader.read(ids, seeds)
        if self._layout.fill_all(batches, stretch, examples):
            return []
        return checked(examples, self._layout.specs, ids)
