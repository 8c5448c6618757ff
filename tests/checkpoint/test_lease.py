"""The lease of a run in object storage: real processes, and all interleavings with clocks far apart."""

import itertools
import json
import signal
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore.store import MemoryStore

from loop.checkpoint.store import copies
from loop.checkpoint.store.bucket import Bucket
from loop.checkpoint.store.lease import Lease, LeaseLostError, believed
from tests.checkpoint.stored_runs import Process, is_tidy, steps_in, wait_for_state
from tests.conftest import until


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
                assert _value(lease.state) == confirmed
        elif event in ("publish", "check", "late") and lease is not None and lease.state is not None:
            owner = max(position[0] for position in _positions(bucket)) == lease.counter
            value += 1
            try:
                if event == "check":
                    lease.check()
                    continue
                lease.publish({"file": {"key": "data/file", "bytes": value, "sha256": ""}}, [])
                assert owner
                confirmed = value
            except LeaseLostError:
                assert not owner
                leases[who] = None
            assert _value(believed(bucket)) == confirmed


def _value(state):
    return state.files["file"]["bytes"] if state.files else -1


def _positions(bucket):
    return [tuple(map(int, key.removesuffix(".json").split("/")[1:])) for key in bucket.keys("state")]
