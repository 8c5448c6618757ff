"""Runs in object storage: the lease, the mirror, and what is brought back, against a server and its failures."""

import contextlib
import dataclasses
import io
import re
import shutil
from pathlib import Path
from urllib.parse import quote
from urllib.request import Request, urlopen

import numpy as np
import obstore
import pytest

from callbacks import Callback, Checkpoint, MLflowTracker
from loop import fit
from loop.checkpoint import checkpoint_files, lock
from loop.checkpoint.store import address, copies, mirror
from loop.checkpoint.store.bucket import PART, Bucket, DamagedError, StoreError
from loop.checkpoint.store.lease import Lease, State, believed
from loop.commands import runs
from loop.commands.cli.runs import _confirm_removal
from loop.commands.evaluate import evaluate
from loop.errors import UsageError
from loop.run import trust
from tests import s3
from tests.callback.test_tracking import Server
from tests.checkpoint.stored_runs import Process, is_tidy, other_machine, steps_in, tensors, write
from tests.checkpoint.test_parts import written
from tests.conftest import tfloop, until
from tests.tasks import Weighted
from tests.test_reliability import files_no_longer_than

OBJECT = {"key": "data/x", "bytes": 1, "sha256": ""}


def test_a_run_goes_on_on_another_machine(store, url, tmp_path, monkeypatch):
    with copies.mirrored(url) as directory:
        write(directory, 1, 2)
    assert is_tidy(url)
    other_machine(monkeypatch, tmp_path)
    with copies.mirrored(url) as moved:
        assert moved != directory
        assert steps_in(moved) == [1, 2]
        assert (moved / "journal.jsonl").read_bytes() == (directory / "journal.jsonl").read_bytes()
        write(moved, 3)
        checkpoint_files._remove(moved / "checkpoints" / "step-00000001")
    assert is_tidy(url)
    # The first machine has an older run: it is put aside, and that of the store goes on.
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "machine"))
    with copies.mirrored(url) as back:
        assert steps_in(back) == [2, 3]
    assert [steps_in(path) for path in directory.parent.glob("run.stale-*")] == [[1, 2]]
    assert steps_in(copies.copy(url)) == [2, 3]


def test_a_training_goes_on_on_another_machine_to_the_same_bits(store, url, quiet, tmp_path, monkeypatch):
    whole = fit(Weighted(), epochs=4, callbacks=quiet(), run_dir=tmp_path / "whole")
    first = fit(Weighted(), epochs=2, callbacks=quiet(), run_dir=url)
    other_machine(monkeypatch, tmp_path)
    second = fit(Weighted(), epochs=4, callbacks=quiet(), run_dir=url)
    assert (first.steps, second.steps) == (whole.steps // 2, whole.steps)
    assert second.weights_sha256 == whole.weights_sha256
    assert first.run_dir != second.run_dir
    assert [row["epoch"] for row in second.history] == [1, 2, 3, 4]

    other_machine(monkeypatch, tmp_path, "a third")
    assert evaluate(Weighted(), copies.copy(url)) == evaluate(Weighted(), tmp_path / "whole")
    kept = checkpoint_files.complete(copies.copy(url) / "checkpoints")
    copies.copies_below(url.rpartition("/")[0])  # which wants no checkpoints
    assert checkpoint_files.complete(copies.copy(url, checkpoints=False) / "checkpoints") == kept


def test_a_copy_that_was_interrupted_becomes_what_the_store_has(store, url, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    with copies.mirrored(url) as directory:
        (directory / "run.json").write_text("old")
        write(directory, 1)
    with monkeypatch.context() as patch:
        patch.setattr(copies, "_bring_checkpoint", interrupted)  # the last of what is brought
        with pytest.raises(KeyboardInterrupt):
            copies.copy(url)
    with copies.mirrored(url) as directory:
        (directory / "run.json").write_text("new")
    copied = copies.copy(url, checkpoints=False)
    assert ((copied / "run.json").read_text(), steps_in(copied)) == ("new", [])
    assert steps_in(copies.copy(url)) == [1]


def test_mlflow_can_have_its_artifacts_beside_the_run(store, url, quiet, empty_store, tmp_path):
    folder = url.rpartition("/")[0]
    destination = f"--artifacts-destination={folder}/artifacts"
    server = Server(shutil.copy(empty_store, tmp_path / "mlflow.db"), destination)
    server.start()
    try:
        until(server.answers)
        tracker = MLflowTracker(server.uri, "own")
        run_dir = fit(Weighted(), epochs=1, callbacks=quiet(mlflow=tracker), run_dir=url).run_dir
    finally:
        server.kill()
    bucket = Bucket(folder)
    [key] = [key for key in bucket.keys("artifacts") if key.endswith("/journal.jsonl")]
    content = bucket.get(key)
    assert content
    assert (run_dir / "journal.jsonl").read_bytes().startswith(content)
    assert copies.runs_below(folder) == ["run"]


def test_the_policy_holds_in_the_store_and_on_the_next_machine(store, url, quiet, tmp_path, monkeypatch):
    def train(epochs):
        saving = Checkpoint(every="epoch", keep_last=1, keep_best=9)
        return fit(Weighted(), epochs=epochs, callbacks=quiet(checkpoint=saving), run_dir=url).steps // epochs

    train(3)
    other_machine(monkeypatch, tmp_path)
    epoch = train(5)
    kept = checkpoint_files.complete(copies.copy(url) / "checkpoints")
    # All have a metric, which the second machine knows from the checkpoint.
    assert [int(path.name[5:]) for path in kept] == [epoch * n for n in range(1, 6)]
    assert is_tidy(url)


def test_what_can_not_be_delivered_ends_sync_with_75(store, url, command, monkeypatch):
    with copies.mirrored(url) as directory:
        write(directory, 5)
    monkeypatch.setenv(mirror.WAIT, "0")
    store.down = True
    code, _, err = command("sync", url)
    assert code == 75
    assert err.count("tfloop: error: ") == 1
    store.down = False
    assert command("sync", url)[0] == 0


def test_whatever_the_network_does_the_bytes_are_the_same(store, url, tmp_path, monkeypatch):
    monkeypatch.setenv(mirror.WAIT, "60")
    monkeypatch.setattr(mirror, "_OUTAGE_PAUSE", 0.1)
    store.share = 0.15
    with copies.mirrored(url) as directory:
        write(directory, 1, 2)
    assert address.is_delivered(directory)
    monkeypatch.setattr(lock, "is_dead", lambda owner: False)
    for _ in range(9):  # a start may fail, and then says so; what it begins with is right
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
        try:
            with copies.mirrored(url) as moved:
                assert steps_in(moved) == [1, 2]
            break
        except StoreError:
            continue
    else:
        pytest.fail("nine starts failed")
    store.share = 0.0
    assert sum(store.faults.values()) > 5
    assert steps_in(copies.copy(url)) == [1, 2]


def test_a_store_that_fails_for_a_while_is_waited_for(store, url, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv(mirror.WAIT, "60")
    monkeypatch.setattr("loop.checkpoint.store.bucket._PAUSE", 0.1)
    with copies.mirrored(url) as directory:
        write(directory, 1, 2)
    other_machine(monkeypatch, tmp_path)
    store.cuts = 40  # more than an object is asked for
    with copies.mirrored(url) as moved:
        assert steps_in(moved) == [1, 2]
    assert store.cuts == 0
    assert capfd.readouterr().err.count("trying again for 60 s") == 1


def test_a_lease_is_renewed_while_a_run_is_brought(store, url, tmp_path, monkeypatch):
    with copies.mirrored(url) as directory:
        write(directory, *range(1, 6))
    monkeypatch.setenv(copies.LEASE, "2")
    store.pause = 0.4  # all files take longer than the lease
    first = Process(url, 0, tmp_path / "first", TFLOOP_TEST_HOST="first")
    until(lambda: believed(Bucket(url)).owner["pid"] == first.process.pid)
    code, errors = Process(url, 0, tmp_path / "second", TFLOOP_TEST_HOST="second").ended()
    assert code == 2, errors
    assert f"in use by process {first.process.pid}" in errors
    code, errors = first.ended()
    assert code == 0, errors


def test_a_lease_is_renewed_while_a_large_file_travels(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "machine"))
    monkeypatch.setenv(copies.LEASE, "1")
    monkeypatch.setattr(mirror, "_PAUSE", 0.05)
    url = f"file://{tmp_path}/disk/run"
    upload = Bucket.upload
    before = []

    def long(bucket, key, file):
        if not before:
            before.append(believed(bucket).position)
            until(lambda: believed(bucket).position > before[0], seconds=30)
        return upload(bucket, key, file)

    monkeypatch.setattr(Bucket, "upload", long)
    with copies.mirrored(url) as directory:
        write(directory, 1)
    assert steps_in(copies.copy(url)) == [1]
    assert is_tidy(url)


def test_a_store_that_creates_an_object_twice_is_refused(store, url):
    store.ignores = "if-none-match"
    with pytest.raises(UsageError, match="ignores If-None-Match"), copies.mirrored(url):
        pass
    assert not Bucket(url).keys("")


def test_a_job_has_delivered_when_its_chief_has(store, url):
    store.pause = 0.4  # the other worker ends long before
    done = tfloop(
        "train", "digits", "--steps=4", "--workers=2", "--backend=multiworker", "--track=off", "--run-dir", url
    )
    assert done.returncode == 0, done.stderr
    assert f"delivered to {url}" in done.stderr


def test_what_an_outage_left_is_delivered_later(store, url, capfd):
    with copies.mirrored(url) as directory:
        write(directory, 1)
        store.down = True
        write(directory, 2)
    assert not address.is_delivered(directory)
    assert f"tfloop sync {url}" in capfd.readouterr().err
    store.down = False
    assert copies.deliver(url)
    # The owner has ended, though its process hasn't: there is no sign of it to wait for.
    assert "is in use by" not in capfd.readouterr().err
    assert address.is_delivered(directory)
    assert steps_in(copies.copy(url)) == [1, 2]
    assert is_tidy(url)


def test_a_state_directory_behind_a_link_is_the_same_one(store, url, quiet, tmp_path, monkeypatch):
    """As a home directory may be: a run has its directory without links."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "link"))
    monkeypatch.setenv(mirror.WAIT, "0")

    class Down(Callback):
        def on_fit_start(self, run):
            assert run.directory in mirror._active  # else the run would not hear that its lease is lost
            store.down = True

    run_dir = fit(Weighted(), epochs=1, callbacks=quiet() + [Down()], run_dir=url).run_dir
    assert address.url_named(run_dir) == url
    assert not address.is_delivered(run_dir)
    store.down = False
    assert copies.deliver(url)
    assert address.is_delivered(run_dir)
    assert address.url_of_copy(copies.copy(url)) == url


def undelivered(store, url):
    """The directory of a run with two checkpoints, of which the store has the first alone."""
    with copies.mirrored(url) as directory:
        write(directory, 1)
    with copies.mirrored(url):
        store.down = True
        write(directory, 2)
    store.down = False
    return directory


def test_a_start_that_fails_costs_nothing_of_what_was_here_or_brought(store, url, tmp_path, monkeypatch, capfd):
    directory = undelivered(store, url)
    checkpoint_files._remove(directory / "checkpoints" / "step-00000001")
    # The store still has step 1, which this machine lacks: it is brought, and that fails.
    monkeypatch.setenv(mirror.WAIT, "0")
    store.cuts = 1000
    with pytest.raises(StoreError), copies.mirrored(url):
        pass
    store.cuts = 0
    monkeypatch.setenv(mirror.WAIT, "60")
    with copies.mirrored(url):
        assert steps_in(directory) == [1, 2]
    told = capfd.readouterr().err
    assert "another machine has gone on" not in told
    assert "is in use by" not in told
    assert [path.name for path in directory.parent.glob("run*")] == ["run"]
    assert steps_in(copies.copy(url)) == [1, 2]
    assert is_tidy(url)


def test_a_try_on_another_machine_costs_nothing_of_what_was_here(store, url, tmp_path, monkeypatch, capfd):
    directory = undelivered(store, url)
    monkeypatch.setenv(copies.LEASE, "1")
    other_machine(monkeypatch, tmp_path)
    with pytest.raises(ZeroDivisionError), copies.mirrored(url):
        raise ZeroDivisionError
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "machine"))
    with copies.mirrored(url):
        assert steps_in(directory) == [1, 2]
    assert "another machine has gone on" not in capfd.readouterr().err
    assert steps_in(copies.copy(url)) == [1, 2]


@pytest.mark.parametrize("moment", ["_prepare_spool", "Mirror"])
def test_a_kill_while_the_lease_is_taken_costs_nothing_of_what_was_here(moment, store, url, monkeypatch, capfd):
    def killed(*args):
        ready(*args)
        raise KeyboardInterrupt

    monkeypatch.setenv(copies.LEASE, "1")
    with copies.mirrored(url) as directory:
        write(directory, 1)
    with copies.mirrored(url):
        store.down = True
        write(directory, 2)
    store.down = False
    ready = getattr(copies, moment)
    with monkeypatch.context() as patch:
        patch.setattr(copies, moment, killed)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt), copies.mirrored(url):
                pass
    with copies.mirrored(url):
        assert steps_in(directory) == [1, 2]
    assert "another machine has gone on" not in capfd.readouterr().err
    assert steps_in(copies.copy(url)) == [1, 2]


def test_what_a_store_says_is_told_and_a_start_without_it_is_no_bad_input(store, url, command, monkeypatch):
    monkeypatch.setenv(mirror.WAIT, "60")
    missing = url.replace("s3://bucket/", "s3://missing/")
    code, _, err = command("runs", "show", missing)
    assert code == 1
    assert f"tfloop: error: {missing}: NoSuchBucket: The specified bucket does not exist (" in err
    assert "<" not in err
    # A queue may try a failed start again; what is bad input, never.
    code, _, err = command("train", "digits", "--steps=1", "--track=off", "--run-dir", missing)
    assert code == 1
    assert "trying again" not in err  # the store has answered
    assert err.endswith(": check the credentials, the bucket's name and its region\n")


def test_a_command_starts_from_a_run_in_a_store_and_goes_on_elsewhere(store, url, command, tmp_path, monkeypatch):
    typed = ["train", "digits", "--track=off", "--batch-size=512"]
    assert command(*typed, "--steps=1", f"--run-dir={tmp_path}/one")[0] == 0
    second = [*typed, "--resume", f"{tmp_path}/one", "--run-dir", url]
    assert command(*second, "--steps=2")[0] == 0
    shutil.rmtree(tmp_path / "one")  # another machine has no such directory
    other_machine(monkeypatch, tmp_path)
    code, _, err = command(*second, "--steps=3")
    assert code == 0, err
    code, _, err = command(*typed, "--steps=4", "--resume", url, f"--run-dir={tmp_path}/third")
    assert code == 0, err
    assert "going on from step 3" in err
    code, _, err = command(*typed, "--steps=4", "--resume", f"{url}/none")
    assert code == 2
    assert f"{url}/none: no run there" in err


def test_a_full_disk_is_no_fault_of_the_store(store, url, tmp_path, monkeypatch, capfd):
    with copies.mirrored(url) as directory:
        write(directory, 1)
    other_machine(monkeypatch, tmp_path)
    for start in (copies.mirrored(url), contextlib.nullcontext()):
        with files_no_longer_than(10_000), pytest.raises(UsageError, match=r"^/.*File too large.*make room"), start:
            copies.copy(url)
    assert "trying again" not in capfd.readouterr().err
    assert steps_in(copies.copy(url)) == [1]


def test_an_object_that_has_changed_is_not_believed(store, url, tmp_path, monkeypatch, capfd):
    with copies.mirrored(url) as directory:
        write(directory, 1, 2)
    bucket = Bucket(url)
    about = believed(bucket).files["checkpoints/step-00000002/tensors.npz"]
    content = bytearray(bucket.get(about["key"]))
    content[len(content) // 2] ^= 1
    bucket.put(about["key"], bytes(content))
    other_machine(monkeypatch, tmp_path)
    assert steps_in(copies.copy(url)) == [1]
    assert "step-00000002" in capfd.readouterr().err
    with pytest.raises(DamagedError, match="has changed since it was written"):
        bucket.download(about["key"], tmp_path / "file", about["bytes"], about["sha256"])
    assert not (tmp_path / "file").exists()


def test_large_files_travel_in_parts(store, url, tmp_path):
    path = tmp_path / "large"
    path.write_bytes(np.random.default_rng(0).bytes((17 << 20) + 5))
    bucket = Bucket(url)
    with path.open("rb") as file:
        digest = bucket.upload("data/large", file)
    about = obstore.head(bucket._store, "data/large")
    assert about["e_tag"].strip('"') == digest.etag
    bucket.download("data/large", tmp_path / "back", digest.bytes, digest.sha256)
    assert (tmp_path / "back").read_bytes() == path.read_bytes()


def test_names_of_other_objects_hide_no_runs(store, url):
    """The library that lists objects refuses them all if one has such a name."""
    with copies.mirrored(url) as directory:
        write(directory, 1)
    folder = url.rpartition("/")[0]
    bad = "an object there has a name that is no path .*: remove it from the store"

    def put(name):
        place = f"{store.endpoint}/{folder.removeprefix('s3://')}/{name}"
        urlopen(Request(place, data=b"x", method="PUT", headers=s3.signed())).close()

    for name in ("other//object", "other/../object"):
        put(name)
        with pytest.raises(StoreError, match=bad):
            Bucket(folder).keys("")
    assert copies.runs_below(folder) == ["run"]
    put("../object")  # a folder of such a name can't be passed over
    with pytest.raises(StoreError, match=bad):
        copies.runs_below(folder)


@pytest.mark.parametrize(
    ("folder", "metadata", "variables"),
    [
        ("s3://bucket/runs", "AWS_METADATA_ENDPOINT", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ("az://bucket/runs", "", "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"),
    ],
)
def test_a_store_without_credentials_is_told_with_the_variables(folder, metadata, variables, command, monkeypatch):
    for name in s3.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(metadata or "UNUSED", "http://127.0.0.1:9")  # there is no machine of a cloud to ask
    code, _, err = command("runs", "--root", folder)
    assert (code, err) == (1, f"tfloop: error: {folder}: no credentials were found: set {variables}\n")


def test_of_an_object_that_is_too_long_the_rest_is_not_brought(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "large").write_bytes(bytes(3 * PART))
    brought = []
    with pytest.raises(DamagedError, match="has changed since it was written"):
        Bucket(f"file://{tmp_path}/store")._write("large", io.BytesIO(), 5, "0", lambda: brought.append(None))
    assert len(brought) == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("s3://bucket", "path of its own"), ("s3://me:secret@bucket/run", "credentials come from"),
        ("https://host/bucket", "bucket/path"), ("file://host/run", "absolute"), ("s3://bucket/a/../b", "without ."),
        ("s3://bucket/run?key=secret", "without user, query"), ("ftp://host/run", "begins with s3://, gs://"),
        ("file:///a/%2e%2e/b", "without ."), ("file:///a\nb/run", "without control characters"),
        ("s3://me:secret@bucket/a%00b", "without control characters"), ("file:///a\udcffb/run", "in UTF-8"),
        ("file:///a%FFb/run", "in UTF-8"), ("s3://bucket/lock", "another name than lock"),
        ("s3://bucket/a/store.json/", "another name"),
    ],
)  # fmt: skip
def test_wrong_urls_are_refused_without_their_secrets(text, problem):
    with pytest.raises(UsageError, match=problem) as error:
        address.read_url(text)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("typed", [["train", "digits", "--run-dir"], ["runs", "--root"]])
def test_a_wrong_url_that_is_typed_has_its_fix(typed, command):
    code, _, err = command(*typed, "s3://bucket/a?b")
    assert code == 2
    assert "give a URL without user, query and fragment" in err


@pytest.mark.parametrize("typed", [["train", "digits", "--run-dir"], ["runs", "--root"], ["export", "--trust"]])
def test_a_machine_that_takes_no_state_is_told_the_fix(typed, tmp_path, monkeypatch, command):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    code, out, err = command(*typed, f"file://{tmp_path}/runs", *(["weights.npz"] if typed[0] == "export" else []))
    assert (code, out) == (2, "")
    assert "can't be made (Not a directory): set XDG_STATE_HOME to a directory that can be written\n" in err


@pytest.mark.parametrize("typed", ["s3://", "s3://bucket/../runs", "http://host/"])
def test_a_wrong_folder_of_runs_is_named_as_it_was_typed(typed, command):
    code, _, err = command("runs", "--root", typed)
    assert code == 2
    assert f" {typed}: give " in err


def test_a_shared_disk_has_the_same_lease(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "machine"))
    url = f"file://{tmp_path}/disk/run"
    with copies.mirrored(url) as directory:
        write(directory, 1)
    other_machine(monkeypatch, tmp_path)
    with copies.mirrored(url) as moved:
        assert steps_in(moved) == [1]
    assert is_tidy(url)


@pytest.mark.parametrize("name", ["a b", "a%20b", "größe#1?", "it's [one]"])
def test_a_url_has_the_names_of_its_path_escaped(name, tmp_path, monkeypatch, command):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "machine"))
    typed = f"file://{tmp_path}/disk/{quote(name)}/{quote(name)}"
    url = address.read_url(typed)
    assert address.read_url(url) == url
    with copies.mirrored(url) as directory:
        write(directory, 1)
    assert directory.name == name
    assert (tmp_path / "disk" / name / name / "state").is_dir()
    folder = url.rpartition("/")[0]
    assert address.url_of_copy(copies.copies_below(folder) / name) == url
    for words in (["runs", "diff", typed, typed], ["tail", typed], ["report", typed], ["runs", "show", typed]):
        code, out, _ = command(*words)
        assert code == 0
        assert not (address.directory_of(url, address.COPIES) / "checkpoints").exists()  # no weights are brought
    assert name in out
    assert "step-00000001" in out
    assert "80.6 kB" in out
    assert "step-00000001" in (address.directory_of(url, address.COPIES) / "report.html").read_text()
    with pytest.raises(UsageError, match=re.escape(f"{url}: you haven't trained there")):
        trust.known_target(address.directory_of(url, address.COPIES), "task.py:Mine", None)


def test_who_removes_a_run_in_a_store_is_asked_about_its_url(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "machine"))
    url = address.read_url(f"file://{tmp_path}/disk/run")
    with copies.mirrored(url) as directory:
        write(directory, 1)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("typer.confirm", lambda text: True)
    copy = runs.locate(runs.ROOT, url, checkpoints=False)
    assert not (copy / "checkpoints").exists()
    assert runs.to_remove(copy.parent, copy.name) == url
    _confirm_removal([url])
    assert capsys.readouterr().out == f"{url}\n"


def test_what_an_interrupted_removal_has_left_in_a_store_can_be_removed(tmp_path, monkeypatch, command):
    """Its state goes last, and the command asked for the objects that were gone."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "machine"))
    url = address.read_url(f"file://{tmp_path}/disk/run")
    with copies.mirrored(url) as directory:
        write(directory, 1)
    shutil.rmtree(tmp_path / "disk/run/data")
    assert command("runs", "rm", "--yes", url)[0] == 0
    assert command("runs", "rm", "--yes", url) == (2, "", f"tfloop: error: {url}: no run there\n")


def test_who_only_looks_leaves_no_directory_at_a_url(tmp_path, command):
    for words in (["runs", "show"], ["runs", "rm", "--yes"], ["tail"], ["runs", "--root"]):
        code, _, err = command(*words, f"file://{tmp_path}/mistyped/run")
        assert code == 2
        assert "there is no such directory" in err
    assert not (tmp_path / "mistyped").exists()


def test_a_directory_that_cannot_be_made_is_bad_input(tmp_path):
    (tmp_path / "file").touch()
    for path, problem in (
        (tmp_path / "file", "it is a file: give a directory"),
        (tmp_path / "file/below", "the directory can't be made (Not a directory): give another one"),
        (Path("/proc/none"), "the directory can't be made (No such file or directory): give another one"),
    ):
        with pytest.raises(UsageError) as raised:
            Bucket(f"file://{path}", make=True)
        assert str(raised.value) == f"file://{path}: {problem}"


def test_a_file_of_any_name_is_delivered(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "machine"))
    url = f"file://{tmp_path}/disk/run"
    names = ["tab\t.txt", "two\nlines", "bad\udcff", "x" * 255, "größe", "a#1", "a%20b"]
    with copies.mirrored(url) as directory:
        write(directory, 1)
        for name in names:
            (directory / name).write_text(name, errors="surrogateescape")
    assert is_tidy(url)
    copied = copies.copy(url)
    assert [(copied / name).read_text(errors="surrogateescape") for name in names] == names


def test_copies_of_runs_with_like_names_are_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "machine"))
    folder = f"file://{tmp_path}/disk"
    for step, name in enumerate(("x", "x.json"), 1):
        with copies.mirrored(f"{folder}/{name}") as directory:
            write(directory, step)
    below = copies.copies_below(folder)
    assert sorted(path.name for path in below.iterdir() if path.is_dir()) == ["x", "x.json"]
    assert steps_in(copies.copy(f"{folder}/x")) == [1]
    assert steps_in(copies.copy(f"{folder}/x.json")) == [2]


def test_a_copy_whose_index_is_lost_is_brought_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "machine"))
    url = f"file://{tmp_path}/disk/run"
    with copies.mirrored(url) as directory:
        write(directory, 1)
    copied = copies.copy(url)
    with copies.mirrored(url) as directory:
        write(directory, 2)
    address.index_of(copied).write_text("")
    copies.copy(url)
    assert (copied / "run.json").read_bytes() == (directory / "run.json").read_bytes()


def test_a_spool_that_is_deleted_under_a_run_costs_nothing_that_was_delivered(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "machine"))
    url = f"file://{tmp_path}/disk/run"
    bucket = Bucket(url, make=True)
    with copies.mirrored(url) as directory:
        write(directory, 1)
        until(lambda: believed(bucket) and "run.json" in believed(bucket).files)
        files = believed(bucket).files
        shutil.rmtree(directory)
    assert believed(bucket).files == files
    assert steps_in(copies.copy(url)) == [1]


def test_what_others_remove_from_the_store_is_delivered_again(store, url, tmp_path, monkeypatch):
    bucket = Bucket(url)
    with copies.mirrored(url) as directory:
        write(directory, 1, 2)
        manifests = {f"checkpoints/step-0000000{step}/manifest.json" for step in (1, 2)}
        until(lambda: believed(bucket) and manifests <= believed(bucket).files.keys())
        files = believed(bucket).files
        bucket.delete(
            [files["checkpoints/step-00000001/tensors.npz"]["key"], *(s["key"] for s in believed(bucket).journal)]
        )
    assert is_tidy(url)
    other_machine(monkeypatch, tmp_path)
    assert steps_in(copies.copy(url)) == [1, 2]

    lost = believed(bucket).files["checkpoints/step-00000002/manifest.json"]["key"]
    bucket.delete([lost])
    other_machine(monkeypatch, tmp_path, "a third")
    with pytest.raises(StoreError, match=f"{lost} isn't there: .*, tfloop sync {url} delivers it"):
        copies.copy(url)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "machine"))
    assert copies.deliver(url)
    assert steps_in(copies.copy(url)) == [1, 2]


@pytest.mark.parametrize("starts", [1, 2])
def test_a_run_that_the_store_has_lost_goes_on_with_what_is_here(starts, store, url, capfd):
    for step in range(1, starts + 1):
        with copies.mirrored(url) as directory:
            write(directory, step)
    bucket = Bucket(url)
    bucket.delete(bucket.keys(""))
    with copies.mirrored(url):
        assert steps_in(directory) == list(range(1, starts + 1))
    assert "the store has no run any more: going on with what this machine has" in capfd.readouterr().err
    assert steps_in(copies.copy(url)) == list(range(1, starts + 1))
    assert is_tidy(url)


def test_a_run_that_cannot_be_read_hides_no_other_of_its_folder(tmp_path, monkeypatch, command):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "machine"))
    for name in ("good", "damaged"):
        with copies.mirrored(f"file://{tmp_path}/disk/{name}") as directory:
            write(directory, 1)
    bucket = Bucket(f"file://{tmp_path}/disk/damaged")
    [key] = bucket.keys("state")
    bucket.put(key, b"{}")
    # Of this one, the store has the lease alone, as of a process that was killed then.
    (tmp_path / "disk" / "begun" / "state" / "00000001").mkdir(parents=True)
    first = State((1, 0), {"nonce": "1"})
    (tmp_path / "disk" / "begun" / first.key).write_bytes(first.encoded())
    code, out, err = command("runs", "--root", f"file://{tmp_path}/disk")
    assert code == 0, err
    assert "good" in out
    assert f"warning: file://{tmp_path}/disk/damaged: {key} has changed" in err


@pytest.mark.parametrize(
    "more",
    [
        {"owner": None}, {"ttl": "1"}, {"ttl": float("inf")}, {"files": []}, {"journal": 1}, {"files": {"x": None}},
        {"journal": [{**OBJECT, "bytes": -1}]}, {"files": {"x": {**OBJECT, "key": 1}}}, {"files": {"a\0b": OBJECT}},
        {"files": {"../x": OBJECT}}, {"files": {"x" * 256: OBJECT}}, {"files": {"x": OBJECT, "x/y": OBJECT}},
        {"files": {"\ud800": OBJECT}}, {"files": {"lock": OBJECT}}, {"files": {"checkpoints/x/y": OBJECT}},
    ],
)  # fmt: skip
def test_a_state_of_a_stranger_is_refused_by_itself(more, tmp_path, monkeypatch, command):
    """Its hash is right, which anyone can compute."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "machine"))
    folder = f"file://{tmp_path}/disk"
    for name in ("good", "strangers"):
        with copies.mirrored(f"{folder}/{name}") as directory:
            write(directory, 1)
    bucket = Bucket(f"{folder}/strangers")
    state = believed(bucket)
    bucket.put(state.key, dataclasses.replace(state, **more).encoded())
    code, out, err = command("runs", "--root", folder)
    assert (code, "good" in out) == (0, True)
    assert f"warning: {folder}/strangers: {state.key} " in err
    with pytest.raises(DamagedError, match=state.key):
        copies.copy(f"{folder}/strangers")
    # It has left nothing behind that keeps the run from being read once it is right.
    bucket.put(state.key, state.encoded())
    assert steps_in(copies.copy(f"{folder}/strangers")) == [1]


def test_runs_of_a_folder_and_their_removal(store, url):
    with copies.mirrored(url) as directory:
        write(directory, 1)
    folder = url.rpartition("/")[0]
    assert copies.runs_below(folder) == ["run"]
    assert address.url_of_copy(copies.copies_below(folder) / "run") == url
    copies.remove(url)
    assert copies.runs_below(folder) == []
    assert not Bucket(url).keys("")
    with pytest.raises(UsageError, match="no run there"):
        copies.copy(url)


def test_a_step_that_is_written_again_with_fewer_files_stays_in_the_store(tmp_path, monkeypatch):
    """As by one worker after two, each of which has written its part."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "machine"))
    url = f"file://{tmp_path}/disk/run"
    with copies.mirrored(url) as directory:
        _, finish = written(directory / "checkpoints", {"weights": tensors(1)["weights"]}, 2, step=1)
        finish()
    assert len(list((copies.copy(url) / "checkpoints" / "step-00000001").iterdir())) == 4
    with copies.mirrored(url) as directory:
        write(directory, 1)
    assert is_tidy(url)
    copied = copies.copy(url)
    assert steps_in(copied) == [1]
    assert len(list((copied / "checkpoints" / "step-00000001").iterdir())) == 2


def test_a_checkpoint_that_lives_shorter_than_it_travels_is_delivered(tmp_path, monkeypatch):
    """As on a slow line. Else the store has none as long as the run goes on."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "machine"))
    url = f"file://{tmp_path}/disk/run"
    upload = Bucket.upload

    def slow(bucket, key, file):
        if "step-00000001" in key and directory.joinpath("checkpoints/step-00000001").exists():
            write(directory, 2)
            checkpoint_files._remove(directory / "checkpoints" / "step-00000001")
        return upload(bucket, key, file)

    def noted(lease, files, *more):
        published.update(files)
        publish(lease, files, *more)

    published = set()
    publish = Lease.publish
    monkeypatch.setattr(Bucket, "upload", slow)
    monkeypatch.setattr(Lease, "publish", noted)
    with copies.mirrored(url) as directory:
        write(directory, 1)
        until(lambda: "checkpoints/step-00000001/manifest.json" in published, seconds=30)
    assert steps_in(copies.copy(url)) == [2]
    assert is_tidy(url)
