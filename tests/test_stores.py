"""The stores of tests are those of MLflow."""

import contextlib
import sqlite3

import sqlalchemy
from mlflow.store.db import utils

from tests import stores
from tests.conftest import tfloop


def tables_of(path):
    """The columns of each table and index by name: MLflow writes its constraints in an order that changes."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        names = database.execute("SELECT name FROM sqlite_master").fetchall()
        return {name: database.execute(f"PRAGMA table_xinfo('{name}')").fetchall() for (name,) in names}


def test_a_copied_store_is_the_one_that_mlflow_makes(tmp_path):
    stores._make(sqlalchemy.create_engine("sqlite:///made.db"))
    for name in ("first.db", "copied.db"):
        stores.initialize(sqlalchemy.create_engine(f"sqlite:///{name}"))
    assert stores._tables
    assert len(tables_of("made.db")) > 30
    assert tables_of("copied.db") == tables_of("made.db")
    version = utils._get_schema_version(sqlalchemy.create_engine("sqlite:///copied.db"))
    assert version == utils._get_latest_schema_revision()


def test_a_process_of_tfloop_tracks_in_a_new_store(tmp_path):
    done = tfloop("train", "digits", "--steps", 2, "--eval-every", "never", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with contextlib.closing(sqlite3.connect(tmp_path / "runs" / "mlflow.db")) as database:
        assert database.execute("SELECT status FROM runs").fetchall() == [("FINISHED",)]
