"""Parquet files as tables that are read by row: kept beside the cache as an Arrow file, which is mapped into memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from callbacks.files import hidden_name, replacing
from loop.data.data_files import cached
from loop.errors import UsageError

if TYPE_CHECKING:
    import pyarrow


def table_of(path: Path) -> Any:
    """The rows of a Parquet file, as an Arrow table in a file that is mapped into memory.

    Parquet is compressed in groups of rows, of which a whole one would be read for each row.

    Raises:
        UsageError: it is no Parquet file; or the cache can't be written.
    """
    import pyarrow  # late: it takes long to import, and only users of Parquet files need it
    import pyarrow.parquet

    target = cached("parquet", path)
    if not target.exists():
        # Several workers may do this at once: each writes a file of its own, and the last one stays.
        try:
            with pyarrow.parquet.ParquetFile(path) as parquet:
                _write(parquet, target)
        except pyarrow.ArrowException as error:
            raise UsageError(f"IndexedData({str(path)!r}): it can't be read as a Parquet file ({error})") from None
    return pyarrow.ipc.open_file(pyarrow.memory_map(str(target))).read_all()


def _write(parquet: pyarrow.parquet.ParquetFile, target: Path) -> None:
    """Writes the rows of a Parquet file to an Arrow file in the cache.

    Raises:
        UsageError: the cache can't be written.
    """
    import pyarrow

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        schema = _without_categories(parquet.schema_arrow)
        with replacing(target, aside=hidden_name(target)) as file, pyarrow.ipc.new_file(file, schema) as writer:
            for batch in parquet.iter_batches():  # the file may be larger than memory
                table = pyarrow.Table.from_batches([batch])
                writer.write_table(table if table.schema.equals(schema) else table.cast(schema))
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
