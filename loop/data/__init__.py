"""Data: which examples are in global batch s of epoch e, and which of them a replica gets.

A source is read in two moves, both inside the compiled step. `read_batch` runs once per worker and step; `replica_rows`
runs in each replica and returns its rows. Array data is a pure function of (seed, epoch, step), so that its order
depends neither on the number of replicas nor on what was read before; a stream has an iterator, and an empty batch
after each epoch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# For type checkers and editors, which don't see what `__getattr__` loads.
if TYPE_CHECKING:
    from loop.data.array_source import ArraySource
    from loop.data.arrays import ArrayData
    from loop.data.batch import (
        EVALUATION_EPOCH,
        SKIPPED,
        BatchOptions,
        DataIterator,
        Feed,
        ReadBatch,
        RowCounts,
        Rows,
        count,
        likely_rows,
        part_bounds,
    )
    from loop.data.indexed import IndexedData
    from loop.data.indexed_source import IndexedSource
    from loop.data.joined import sequences
    from loop.data.mixture import mix
    from loop.data.padded_arrays import PaddedArraySource
    from loop.data.padding import Padding
    from loop.data.parts import contents, fixed_head, head, in_float64
    from loop.data.pipelines import shard_files, stacking_problem
    from loop.data.sources import Change, Data, Source, open_data, source, unchanged
    from loop.data.streams import StreamData, StreamSource, no_rows
    from loop.data.tfrecords import records

__all__ = [
    "EVALUATION_EPOCH",
    "SKIPPED",
    "ArrayData",
    "ArraySource",
    "BatchOptions",
    "Change",
    "Data",
    "DataIterator",
    "Feed",
    "IndexedData",
    "IndexedSource",
    "PaddedArraySource",
    "Padding",
    "ReadBatch",
    "RowCounts",
    "Rows",
    "Source",
    "StreamData",
    "StreamSource",
    "contents",
    "count",
    "fixed_head",
    "head",
    "in_float64",
    "likely_rows",
    "mix",
    "no_rows",
    "open_data",
    "part_bounds",
    "records",
    "sequences",
    "shard_files",
    "source",
    "stacking_problem",
    "unchanged",
]

_NAMES = {
    "array_source": "ArraySource",
    "arrays": "ArrayData",
    "batch": "BatchOptions DataIterator EVALUATION_EPOCH Feed ReadBatch RowCounts Rows SKIPPED count likely_rows "
    "part_bounds",
    "indexed": "IndexedData",
    "indexed_source": "IndexedSource",
    "joined": "sequences",
    "mixture": "mix",
    "padded_arrays": "PaddedArraySource",
    "padding": "Padding",
    "parts": "contents fixed_head head in_float64",
    "pipelines": "shard_files stacking_problem",
    "sources": "Change Data Source open_data source unchanged",
    "streams": "StreamData StreamSource no_rows",
    "tfrecords": "records",
}
"""The names of `__all__`, by the module that has them."""


def __getattr__(name: str) -> Any:
    """Loads a name when it is used: a process that reads examples needs no TensorFlow."""
    for module, names in _NAMES.items():
        if name in names.split():
            value = getattr(importlib.import_module(f"loop.data.{module}"), name)
            globals()[name] = value  # from now on it is found without `__getattr__`
            return value
    raise AttributeError(f"module 'loop.data' has no attribute {name!r}")
