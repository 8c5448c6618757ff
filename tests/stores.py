"""Makes the tables of new sqlite stores as copies of those that MLflow has made once: it takes a second for each store.

MLflow itself makes the first ones of each process of pytest, and those of tests marked `cold`.
"""

import contextlib
import os
import sqlite3
import tempfile
from pathlib import Path

from mlflow.store.db import utils

_make = utils._initialize_tables
_tables = b""


def initialize(engine):
    """Takes the place of MLflow's function of this name."""
    global _tables
    if engine.dialect.name != "sqlite" or not utils._is_empty_database(engine):
        _make(engine)
        return
    if not _tables:
        _make(engine)
        with contextlib.closing(engine.raw_connection()) as made:
            _tables = made.driver_connection.serialize()
        return
    with contextlib.closing(sqlite3.connect(":memory:")) as source, contextlib.closing(engine.raw_connection()) as new:
        source.deserialize(_tables)
        source.backup(new.driver_connection)


def install():
    utils._initialize_tables = initialize


def prepare():
    """Has another process make the tables: migrations change the logging of theirs."""
    global _tables
    import sqlalchemy

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "store.db")
        maker = os.fork()
        if maker == 0:
            try:
                _make(sqlalchemy.create_engine(f"sqlite:///{path}"))
            finally:
                os._exit(0)
        os.waitpid(maker, 0)
        with contextlib.closing(sqlite3.connect(path)) as made:
            if made.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                _tables = made.serialize()
