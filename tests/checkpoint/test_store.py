"""Runs in object storage: the lease, the mirror, and what is brought back, against a server and its failures."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import obstore
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore.store import MemoryStore

from callbacks import Checkpoint
from loop import fit
from loop.checkpoint import checkpoint_files, lock
from loop.checkpoint.store import address, copies, mirror
from loop.checkpoint.store.bucket import Bucket, DamagedError, StoreError
from loop.checkpoint.store.lease import Lease, LeaseLostError, believed
from loop.commands.evaluate import evaluate
from loop.errors import UsageError
from tests import s3
from tests.conftest import ROOT
from tests.tasks import Weighted


@pytest.fixture(scope="module")
def server():
    server = s3.Server()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def store(server, monkeypatch, tmp_path):
    """A proxy, as the endpoint of `s3://`, and a machine of its own."""
    proxy = s3.Proxy(server)
    for name, value in {**s3.ENVIRONMENT, "AWS_ENDPOINT_URL": proxy.endpoint, "AWS_ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "machine"))
    monkeypatch.setenv(mirror.WAIT, "2")
    yield proxy
    proxy.close()


@pytest.fixture
def url(tmp_path):
    return f"s3://{s3.BUCKET}/{tmp_path.name}/run"


def tensors(step):
    return {"weights": np.random.default_rng(step).normal(size=(200, 50))}


def write(directory, *steps):
    """Writes a run's files as training does."""
    for step in steps:
        with (directory / "journal.jsonl").open("a") as file:
            file.write(json.dumps({"time": 1.0, "event": "steps_end", "step": step}) + "\n")
        checkpoint_files.write(directory / "checkpoints", step, tensors(step), {})
    (directory / "run.json").write_text(json.dumps({"task": "Task", "status": "running", "step": max(steps)}))


def steps_in(directory):
    paths = checkpoint_files.complete(directory / "checkpoints")
    for path in paths:
        found = checkpoint_files.read(path, checkpoint_files.verify(path))
        np.testing.assert_array_equal(found["weights"], tensors(int(path.name[5:]))["weights"])
    return [int(path.name[5:]) for path in paths]


def other_machine(monkeypatch, tmp_path, name="other"):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / name))
    monkeypatch.setattr(lock, "is_dead", lambda owner: False)


def is_tidy(url):
    """Whether the store has what is believed of a run, and nothing else."""
    bucket = Bucket(url)
    state = believed(bucket)
    kept = {about["key"] for about in [*state.files.values(), *state.journal]}
    return set(bucket.keys("")) == {*kept, state.key}


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
    digest = bucket.upload("data/large", path)
    about = obstore.head(bucket._store, "data/large")
    assert about["e_tag"].strip('"') == digest.etags[1]
    bucket.download("data/large", tmp_path / "back", digest.bytes, digest.sha256)
    assert (tmp_path / "back").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("s3://bucket", "path of its own"), ("s3://me:secret@bucket/run", "credentials come from"),
        ("https://host/bucket", "bucket/path"), ("file://host/run", "absolute"), ("s3://bucket/a/../b", "without ."),
        ("s3://bucket/run?key=secret", "without user, query"),
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


def test_a_shared_disk_has_the_same_lease(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "machine"))
    url = f"file://{tmp_path}/disk/run"
    with copies.mirrored(url) as directory:
        write(directory, 1)
    other_machine(monkeypatch, tmp_path)
    with copies.mirrored(url) as moved:
        assert steps_in(moved) == [1]
    assert is_tidy(url)


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


class Process:
    """A run in a process of its own, which writes a checkpoint each 0.1 s."""

    def __init__(self, url, steps, machine, **environment):
        variables = {**os.environ, "XDG_STATE_HOME": str(machine), **environment}
        command = [sys.executable, "-m", "tests.checkpoint.store_worker", url, str(steps)]
        self.process = subprocess.Popen(command, env=variables, cwd=ROOT, stderr=subprocess.PIPE, text=True)

    def ended(self):
        _, errors = self.process.communicate(timeout=90)
        return self.process.returncode, errors


def wait_for_state(url, steps):
    bucket = Bucket(url)
    for _ in range(300):
        state = believed(bucket)
        if state is not None and sum(name.endswith("manifest.json") for name in state.files) >= steps:
            return state
        time.sleep(0.1)
    raise AssertionError("nothing was delivered")


def test_two_processes_and_a_paused_owner(store, url, tmp_path, monkeypatch):
    """The second starter refuses; after SIGSTOP it takes over, and the first one writes nothing more."""
    monkeypatch.setenv(copies.LEASE, "3")
    first = Process(url, 10_000, tmp_path / "first")
    wait_for_state(url, 1)
    # The clock of a whole machine can't be set here; no time of another machine is compared, so none matters.
    code, errors = Process(url, 5, tmp_path / "second", TFLOOP_TEST_HOST="second").ended()
    assert code == 2, errors
    assert f"in use by process {first.process.pid}" in errors
    first.process.send_signal(signal.SIGSTOP)
    code, errors = Process(url, 5, tmp_path / "third", TFLOOP_TEST_HOST="third").ended()
    assert code == 0, errors
    after = believed(Bucket(url))
    first.process.send_signal(signal.SIGCONT)
    code, errors = first.ended()
    assert code == 1, errors
    assert "was taken over" in errors
    assert believed(Bucket(url)) == after
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "last"))
    steps = steps_in(copies.copy(url))
    with copies.mirrored(url):
        pass
    assert is_tidy(url)
    assert steps == steps_in(copies.copy(url))


def until(is_so):
    for _ in range(900):
        if found := is_so():
            return found
        time.sleep(0.1)
    raise AssertionError("it has waited 90 s in vain")


def test_of_two_starts_at_the_same_instant_one_trains(store, url, tmp_path, monkeypatch):
    """A new run first; then twice the run of a process that was killed, whose lease both wait for."""
    monkeypatch.setenv(copies.LEASE, "3")
    newest = 0
    for attempt in range(3):
        gate = tmp_path / f"gate{attempt}"
        places = [tmp_path / f"machine{attempt}{number}" for number in range(2)]
        hosts = {"TFLOOP_TEST_HOST": "another", "TFLOOP_TEST_GATE": str(gate)}
        both = [Process(url, 10_000, place, **hosts) for place in places]
        try:
            until(lambda gate=gate: len(list(gate.parent.glob(f"{gate.name}.*"))) == 2)
            gate.touch()
            until(lambda both=both: any(process.process.poll() is not None for process in both))
            loser = 0 if both[0].process.poll() is not None else 1
            winner = both[1 - loser].process
            code, errors = both[loser].ended()
            assert code == 2, errors
            assert f"in use by process {winner.pid}" in errors
            assert not list(places[loser].rglob("step-*"))  # it has neither brought nor written a checkpoint
            # What is confirmed is of the other one, and goes on behind what was there.
            until(lambda newest=newest: max(steps_in(copies.copy(url)), default=0) > newest)
            assert winner.poll() is None
            assert believed(Bucket(url)).owner["pid"] == winner.pid
        finally:
            for process in both:
                process.process.kill()
                with process.process:  # waits, and closes the pipe
                    pass
        newest = max(steps_in(copies.copy(url)))
        lines = (copies.copy(url) / "journal.jsonl").read_text().splitlines()
        made = [json.loads(line)["step"] for line in lines]
        assert set(made) >= set(range(1, newest + 1))
        again = sum(step <= before for before, step in itertools.pairwise(made))
        assert again <= attempt  # only where a killed one's last steps were made again


@pytest.mark.parametrize("seed", range(1))
def test_a_killed_process_loses_nothing_that_was_confirmed(store, url, tmp_path, seed):
    random = np.random.default_rng(seed)
    confirmed = 0
    for attempt in range(3):
        process = Process(url, 10_000, tmp_path / f"machine-{attempt % 2}")
        if attempt == 0:
            wait_for_state(url, 1)
        time.sleep(random.uniform(1.0, 3.0))
        process.process.kill()
        process.ended()
        state = believed(Bucket(url))
        newest = max(int(name.split("-")[1][:8]) for name in state.files if name.startswith("checkpoints/"))
        assert newest >= confirmed
        confirmed = newest
    code, errors = Process(url, 0, tmp_path / "last").ended()
    assert code == 0, errors
    assert max(steps_in(copies.copy(url))) >= confirmed
    assert is_tidy(url)


class Clock:
    def __init__(self, now):
        self.now = now

    def __call__(self):
        return self.now


EVENTS = st.lists(
    st.tuples(st.sampled_from(["take", "publish", "check", "wait", "late"]), st.integers(0, 2), st.floats(0.1, 40)),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(EVENTS, st.tuples(st.just(0.0), st.just(3600.0), st.floats(-1e6, 1e6)))
def test_no_interleaving_loses_a_confirmed_state(events, starts):
    """Three processes, clocks far apart: what one was told is confirmed, every later owner goes on from."""
    bucket = Bucket("memory://", MemoryStore())
    clocks = [Clock(start) for start in starts]
    leases = [None] * 3
    confirmed = -1
    value = 0
    for event, who, seconds in events:
        lease = leases[who]
        if event == "wait":
            for clock in clocks:
                clock.now += seconds
        elif event == "take" and (lease is None or lease.state is None):
            lease = leases[who] = lease or Lease(bucket, {"pid": who, "nonce": f"{who}-{value}"}, clock=clocks[who])
            if lease.try_take() is None:
                assert lease.state.files.get("value", -1) == confirmed
        elif event in ("publish", "check", "late") and lease is not None and lease.state is not None:
            owner = max(position[0] for position in _positions(bucket)) == lease.counter
            value += 1
            try:
                if event == "check":
                    lease.check()
                    continue
                lease.publish({"value": value}, [])
                assert owner
                confirmed = value
            except LeaseLostError:
                assert not owner
                leases[who] = None
            assert believed(bucket).files.get("value", -1) == confirmed


def _positions(bucket):
    return [tuple(map(int, key.removesuffix(".json").split("/")[1:])) for key in bucket.keys("state")]
