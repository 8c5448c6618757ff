"""Arrow tables that are read by row; and Parquet files as such: kept as an Arrow file, which is mapped into memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from callbacks.files import hidden_name, replacing
from loop.data.data_files import cached
from loop.data.example_parts import Example, Part, by_source, dicts_of
from loop.errors import UsageError

if TYPE_CHECKING:
    import pyarrow


class Table:
    """An Arrow table or record batch, whose rows are dicts."""

    by_column = False

    def __init__(self, table: pyarrow.Table | pyarrow.RecordBatch) -> None:
        self._schema = table.schema
        self._batches = table.to_batches() if hasattr(table, "to_batches") else [table]
        self._ends = np.cumsum([batch.num_rows for batch in self._batches], dtype=np.int64)
        self._length = int(table.num_rows)

    def __len__(self) -> int:
        return self._length

    def read(self, indices: np.ndarray) -> list[Example]:
        import pyarrow  # late, as below

        # From each batch by itself: from a whole table, Arrow would join all batches first, which takes as long as to
        # read all of it, and fails for texts of 2 GiB and more.
        taken = []
        positions: list[int] = []  # in `indices`, of the rows that were taken
        for number, positions_in_batch, own_indices in by_source(self._ends, indices):
            taken.append(self._batches[number].take(pyarrow.array(own_indices)))
            positions += positions_in_batch.tolist()
        rows = pyarrow.Table.from_batches(taken, self._schema)
        columns = {name: _column(rows[name]) for name in rows.column_names}
        # The rows stand batch by batch: back to the order of `indices`.
        examples: list[Example] = [None] * len(indices)
        for position, example in zip(positions, dicts_of(columns, len(indices)), strict=True):
            examples[position] = example
        return examples


class ParquetRows(Table):
    """The rows of a Parquet file, which are kept as an Arrow file that is mapped into memory.

    Parquet is compressed in groups of rows: to read one row, a whole group would be read. Without `arrow_file`, the
    Arrow file is found in the cache, or made.

    Raises:
        UsageError: it isn't a Parquet file; or the cache can't be written.
    """

    def __init__(self, path: Path, arrow_file: Path | None = None) -> None:
        import pyarrow  # late, as below

        self._path = path
        self._arrow_file = arrow_file or _arrow_file_of(path)
        super().__init__(pyarrow.ipc.open_file(pyarrow.memory_map(str(self._arrow_file))).read_all())

    def __reduce__(self) -> tuple[type[ParquetRows], tuple[Path, Path]]:
        """A process that reads maps the same file: it may be larger than memory."""
        return ParquetRows, (self._path, self._arrow_file.absolute())


def _column(column: pyarrow.ChunkedArray) -> Sequence[Part]:
    """The values of an Arrow column, with the dtypes that they have there."""
    import pyarrow  # late, as below

    types = pyarrow.types
    arrow_type = column.type
    if types.is_dictionary(arrow_type):
        # Such as categories of pandas, for which `to_numpy` would turn a null into one of the categories.
        return _column(column.cast(arrow_type.value_type))
    if isinstance(arrow_type, pyarrow.ListType | pyarrow.LargeListType | pyarrow.FixedSizeListType):
        # `to_pylist` would make Python's numbers, which have lost their dtype.
        return list(map(_list_of, column))
    if arrow_type in (pyarrow.string(), pyarrow.large_string(), pyarrow.binary()):
        return column.to_pylist()
    if types.is_integer(arrow_type) and column.null_count:
        # NumPy would make floats of the whole column, but an example must not depend on which others are read with it.
        values: list[Part] = [None] * len(column)
        rows = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
        for row, number in zip(rows, column.drop_null().to_numpy(zero_copy_only=False), strict=True):
            values[row] = number
        return values
    # Bits and nulls are copied. A null among floats becomes NaN: pandas wrote it as NaN.
    return column.to_numpy(zero_copy_only=False)


def _list_of(value: pyarrow.Scalar) -> Part:
    """A list as an array; None if it is null. Integers with a null stay a list: NumPy would make floats of them."""
    import pyarrow  # late, as below

    if not value.is_valid:
        return None
    has_gap = pyarrow.types.is_integer(value.values.type) and value.values.null_count
    return value.values.to_pylist() if has_gap else value.values.to_numpy(zero_copy_only=False)


def _arrow_file_of(path: Path) -> Path:
    """The Arrow file in the cache with the rows of a Parquet file; it is made if it isn't there."""
    import pyarrow  # late: it takes long to import, and only users of Parquet files need it
    import pyarrow.parquet

    target = cached("parquet", path)
    if not _is_whole(target):
        # Several workers may do this at once: each writes a file of its own, and the last one stays.
        try:
            with pyarrow.parquet.ParquetFile(path) as parquet:
                _write(parquet, target)
        except pyarrow.ArrowException as error:
            raise UsageError(f"IndexedData({str(path)!r}): it can't be read as a Parquet file ({error})") from None
    return target


def _is_whole(arrow_file: Path) -> bool:
    """Whether there is an Arrow file, and it isn't cut off."""
    import pyarrow  # late, as above

    try:
        pyarrow.ipc.open_file(pyarrow.memory_map(str(arrow_file)))  # reads its end, which says where its parts are
        return True
    except (OSError, pyarrow.ArrowException):
        return False


def _write(parquet: pyarrow.parquet.ParquetFile, target: Path) -> None:
    """Writes the rows of a Parquet file to an Arrow file in the cache. Refuses a cache that can't be written."""
    import pyarrow

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        schema = _without_categories(parquet.schema_arrow)
        # Durable: after a power failure, nothing would tell zeros from rows.
        aside = hidden_name(target)
        with replacing(target, durable=True, aside=aside) as file, pyarrow.ipc.new_file(file, schema) as writer:
            for batch in parquet.iter_batches():  # the file may be larger than memory
                writer.write_table(pyarrow.Table.from_batches([batch]).cast(schema))
    except OSError as error:
        if error.errno is None:  # Arrow's own, of what it reads
            raise
        raise UsageError(
            f"{target.parent} can't be written ({error.strerror}), and the rows of a Parquet file are kept there: name "
            "a directory with room, by TFLOOP_CACHE=DIRECTORY"
        ) from None


def _without_categories(schema: pyarrow.Schema) -> pyarrow.Schema:
    """The schema with the values themselves in place of categories, as pandas calls them."""
    import pyarrow  # late, as above

    # Each group of rows may have categories of its own, and an Arrow file takes one list of them for all.
    for number, field in enumerate(schema):
        if pyarrow.types.is_dictionary(field.type):
            schema = schema.set(number, field.with_type(field.type.value_type))
    return schema
