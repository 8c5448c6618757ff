"""XLA's programs on disk: used by the next process, unless their bytes have changed."""

import hashlib
import json
import os

from loop.backends import xla_cache
from tests.conftest import tfloop

TASK = """
from tests.tasks import Weighted

class Own(Weighted):
    hidden: int = 5  # a program that no other test compiles
"""


def test_a_user_without_a_home_directory_trains_evaluates_and_removes(tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("HOME", "TFLOOP_CACHE", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    # As in a container that is started with a number as its user.
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    xla_cache.keep_programs.cache_clear()
    assert xla_cache.keep_programs() is None
    code, _, err = command("train", "digits", "--steps", "2", "--run-dir", "mine", "--track", "off")
    assert code == 0, err
    code, _, err = command("evaluate", "mine")
    assert code == 2
    assert "give the task as --target" in err
    code, _, err = command("runs", "--root", "s3://bucket/runs")
    assert code != 0
    assert "~/.local/state: this user has no home directory: set HOME" in err
    code, _, err = command("runs", "rm", "--yes", "mine")
    assert code == 0, err
    assert not (tmp_path / "mine").exists()


def test_the_next_process_compiles_nothing_and_has_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setenv("TFLOOP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "mine.py").write_text(TASK)

    def trained():
        run = tfloop("train", "mine.py:Own", "--compile=xla", "--track=off", "--json", "--resume=never", env=os.environ)
        assert run.returncode == 0, run.stderr
        return json.loads(run.stdout)["weights_sha256"], run.stderr

    first, _ = trained()
    programs = sorted((tmp_path / "cache").rglob("*.pb"))
    assert programs
    assert all(xla_cache._hash_file(program).read_text() == xla_cache._hash(program) for program in programs)
    written = {program: program.stat().st_mtime_ns for program in programs}
    assert trained()[0] == first
    assert {program: program.stat().st_mtime_ns for program in (tmp_path / "cache").rglob("*.pb")} == written

    # A changed program is removed and compiled again; one that was changed with its hash shows that it is read.
    for program in programs:
        program.write_bytes(program.read_bytes()[:-100])
    again, err = trained()
    assert again == first
    assert "XLA can't compile" not in err
    assert all(program.stat().st_mtime_ns != written[program] for program in programs)
    for program in programs:
        program.write_bytes(b"no program")
        xla_cache._hash_file(program).write_text(hashlib.sha256(b"no program").hexdigest())
    assert "XLA can't compile" in trained()[1]


def test_old_and_unknown_programs_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(xla_cache, "_LARGEST", 250)
    for age, name in enumerate("abc"):
        program = tmp_path / f"{name}.pb"
        program.write_bytes(name.encode() * 100)
        os.utime(program, (1e9 - age, 1e9 - age))
    xla_cache._note_hashes(tmp_path)
    (tmp_path / "unknown.pb").write_bytes(b"of a process that was killed")
    xla_cache._remove_unknown(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pb", "a.sha256", "b.pb", "b.sha256"]
