"""The files of a prediction: `.npy`, `.npz`, `.parquet`, `.jsonl`, written block by block."""

from __future__ import annotations

import contextlib
import json
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from callbacks import files
from callbacks.run_record.journal import jsonable
from loop.commands.prediction_parts import Parts, StoredRows
from loop.errors import UsageError
from loop.step.prediction import Columns

# Of a row group in a Parquet file, at most.
_GROUP_BYTES = 32 << 20
_GROUP_ROWS = 1 << 16


def check_names(out: Path, names: Sequence[str]) -> None:
    """Refuses several arrays for a format that holds one."""
    if out.suffix == ".npy" and len(names) > 1:
        raise UsageError(
            f"--out {out} holds one array, but predict() returned {len(names)} ({', '.join(names)}): give a name that "
            "ends in .npz, .parquet or .jsonl"
        )


def write(parts: Parts, rows: StoredRows) -> None:
    """Writes all rows, in the format that the name asks for. The file is complete, or as it was before."""
    # Written beside the parts: what a kill leaves there is removed with them.
    with files.replacing(parts.out, durable=True, aside=parts.directory / "whole.tmp") as file:
        _WRITERS[parts.out.suffix](file, rows)


def _write_npy(file: IO[bytes], rows: StoredRows) -> None:
    [name] = rows.specs
    _write_array(file, rows, name)


def _write_npz(file: IO[bytes], rows: StoredRows) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        for name in rows.specs:
            # With a fixed time in it: the same rows are the same bytes.
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                _write_array(member, rows, name)


def _write_array(file: IO[bytes], rows: StoredRows, name: str) -> None:
    # The format of `np.save`, written block by block: the whole array need not fit into memory.
    dtype, shape = rows.specs[name]
    header = {"descr": dtype, "fortran_order": False, "shape": (rows.rows, *shape)}
    np.lib.format.write_array_header_1_0(file, header)
    for columns in rows.blocks():
        file.write(columns[name].tobytes())


def _write_jsonl(file: IO[bytes], rows: StoredRows) -> None:
    for columns in rows.blocks():
        values = {name: array.tolist() for name, array in columns.items()}
        for row in zip(*values.values(), strict=True):
            line = jsonable(dict(zip(values, row, strict=True)))  # JSON has no nan
            file.write(json.dumps(line, allow_nan=False).encode() + b"\n")


def _write_parquet(file: IO[bytes], rows: StoredRows) -> None:
    import pyarrow
    import pyarrow.parquet

    writer = None
    with contextlib.ExitStack() as stack:
        for columns in _grouped(rows):
            table = pyarrow.table({name: _column(pyarrow, array) for name, array in columns.items()})
            if writer is None:  # only the first group shows the schema
                writer = stack.enter_context(pyarrow.parquet.ParquetWriter(file, table.schema))
            writer.write_table(table, row_group_size=len(table))


def _grouped(rows: StoredRows) -> Iterator[Columns]:
    """The rows in the groups of a Parquet file: many blocks each, but no more than memory holds well."""
    most = max(1, min(_GROUP_ROWS, _GROUP_BYTES // max(1, rows.row_bytes)))
    held: list[Columns] = []
    count = 0
    for columns in rows.blocks():
        held.append(columns)
        count += len(next(iter(columns.values())))
        if count >= most:
            yield joined(held)
            held = []
            count = 0
    if held:
        yield joined(held)


def joined(blocks: Sequence[Columns]) -> Columns:
    """Blocks as one."""
    arrays: Columns = {}
    for name in blocks[0]:
        arrays[name] = np.concatenate([columns[name] for columns in blocks])
    return arrays


def _column(pyarrow: Any, array: np.ndarray) -> Any:
    """A column; rows that are arrays become lists of fixed size, also within each other."""
    # From the innermost axis outwards.
    column = pyarrow.array(array.reshape(-1))
    for size in reversed(array.shape[1:]):
        column = pyarrow.FixedSizeListArray.from_arrays(column, size)
    return column


_WRITERS: dict[str, Callable[[IO[bytes], StoredRows], None]] = {
    ".parquet": _write_parquet,
    ".npy": _write_npy,
    ".npz": _write_npz,
    ".jsonl": _write_jsonl,
}
"""By the end of the file's name: see `prediction_output.OUT_ENDINGS`."""
