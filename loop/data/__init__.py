"""Data: which examples are in global batch s of epoch e, and which of them a replica gets.

A source is read in two moves, both inside the compiled step. `read_batch` runs once per worker and step; `replica_rows`
runs in each replica and returns its rows. Array data is a pure function of (seed, epoch, step), so that its order
depends neither on the number of replicas nor on what was read before; a stream has an iterator, and an empty batch
after each epoch.
"""

from loop.data.arrays import ArrayData, ArraySource
from loop.data.batch import EVALUATION_EPOCH, BatchOptions, RowCounts, Rows, count, likely_rows, rows
from loop.data.indexed import IndexedData
from loop.data.indexed_source import IndexedSource
from loop.data.padding import Padding
from loop.data.parts import contents, first, in_float64, part
from loop.data.pipelines import one_order, shard_files, stacking_problem
from loop.data.records import records
from loop.data.sources import Change, Data, Source, open_data, source, unchanged
from loop.data.streams import StreamData, StreamSource

__all__ = [
    "EVALUATION_EPOCH",
    "ArrayData",
    "ArraySource",
    "BatchOptions",
    "Change",
    "Data",
    "IndexedData",
    "IndexedSource",
    "Padding",
    "RowCounts",
    "Rows",
    "Source",
    "StreamData",
    "StreamSource",
    "contents",
    "count",
    "first",
    "in_float64",
    "likely_rows",
    "one_order",
    "open_data",
    "part",
    "records",
    "rows",
    "shard_files",
    "source",
    "stacking_problem",
    "unchanged",
]
