"""Profiling: the verdict from the shares of time, a real run, the trace, and no cost without a profile."""

import json
import re
import time

import numpy as np
import pytest
import tensorflow as tf

import callbacks
from callbacks import Callback
from loop import fit
from loop.monitor.stopwatch import PARTS, Stopwatch, summary
from tests.tasks import Plain, Streamed


def rank(**seconds):
    return {"done": {"steps": 100, "examples": 3200}, "seconds": seconds, "callbacks": {"Progress": 0.1, "Slow": 2.0}}


@pytest.mark.parametrize(
    ("ranks", "verdict", "slowest", "words"),
    [
        ([rank(data=3.0, compute=1.0)], "input-bound", 0, "data: 75% of the time, 30 ms a step"),
        ([rank(data=0.5, compute=4.0, other=0.5)], "compute-bound", 0, "compute: 80% of the time"),
        ([rank(compute=2.0, callbacks=1.8, saving=0.2, other=0.5)], "host-bound", 0, r"callbacks, 40% \(.* Slow"),
        ([rank(compute=2.0, saving=3.0)], "host-bound", 0, "most of it saving, 60%\n-> save less often"),
        ([rank(compute=1.0, evaluation=3.0)], "evaluation-bound", 0, "evaluation: 75% .*\n-> .*--eval-every"),
        ([rank(compute=1.0, all_reduce=3.0), rank(compute=2.0, all_reduce=2.5)], "communication-bound", 1, "on rank 1"),
        # Ranks that wait for a slow rank, in the all-reduce or between calls, are not communication-bound.
        (
            [rank(compute=1.0, all_reduce=8.0), rank(compute=1.0, data=7.5, all_reduce=0.5)],
            "input-bound", 1, "slowest: rank 1, with 75 ms a step more than rank 0\ninput-bound on rank 1: data: 83%",
        ),
        ([rank(compute=1.0, callbacks=8.0), rank(compute=1.1, waiting=7.9)], "host-bound", 1, "host-bound on rank 0"),
        ([rank() | {"done": {}}], "unknown", 0, "no step after the first call"),
    ],
)  # fmt: skip
def test_verdict(ranks, verdict, slowest, words):
    found = summary(ranks)
    assert (found["verdict"], found["slowest"]) == (verdict, slowest)
    assert re.search(words, "\n".join(found["text"]))


def test_parts_within_each_other_add_up_to_all_the_time():
    begun = time.perf_counter()
    watch = Stopwatch()
    with watch.at("callbacks", "Mine"):
        assert watch.split() is None  # no step has been made
        with watch.at("waiting"):
            time.sleep(0.01)
    watch.count(1, 32)
    watch.give({"compute": 0.5})
    first, elapsed = watch.split(), time.perf_counter() - begun
    assert (first["steps"], first["examples"], first["first"]) == (1, 32, True)
    assert first["seconds"]["waiting"] >= 0.01
    assert first["seconds"]["compute"] == 0.5
    assert 0.01 <= first["callbacks"]["Mine"] <= sum(first["seconds"].values()) <= elapsed
    assert not watch.total["seconds"]
    assert watch.split()["first"] is False
    assert watch.total["seconds"]["other"] > 0


class SlowData(Streamed):
    """Its examples take a hundredth of a second each."""

    def train_data(self):
        def examples():
            for pair in zip(*self.arrays(), strict=True):
                time.sleep(0.01)
                yield pair

        spec = tf.TensorSpec([5], tf.float32), tf.TensorSpec([1], tf.float32)
        return tf.data.Dataset.from_generator(examples, output_signature=spec)

    def arrays(self):
        return np.zeros([100, 5], np.float32), np.ones([100, 1], np.float32)


class SlowCallback(Callback):
    every = 5

    def on_steps_end(self, run, metrics):
        self.step = run.step
        time.sleep(0.2)


def entries(result, event):
    lines = map(json.loads, (result.run_dir / "journal.jsonl").read_text().splitlines())
    return [entry for entry in lines if entry["event"] == event]


def traces(result):
    return [path.stat().st_size for path in result.run_dir.glob("profile/rank-0/plugins/profile/*/*.xplane.pb")]


def test_slow_data_is_told_call_by_call_and_some_steps_are_traced(quiet, capfd):
    light = quiet(checkpoint=None, sentinel=None)
    result = fit(SlowData(), batch_size=5, steps_per_call=8, eval_every="never", profile="4:6", callbacks=light)
    calls = entries(result, "call")
    assert [(each["steps"], each["examples"], each["first"]) for each in calls] == [
        (3, 15, True), (3, 15, False), (8, 40, False), (6, 30, False)
    ]  # fmt: skip
    for each in calls[1:]:
        assert set(each["seconds"]) <= set(PARTS)
        assert each["seconds"]["data"] > 0.01 * each["examples"] / 2
    assert "compiling" in calls[0]["seconds"]
    [found] = entries(result, "summary")
    assert found["verdict"] == "input-bound"
    assert len(traces(result)) == 1
    assert traces(result)[0] > 0
    err = capfd.readouterr().err
    assert "input-bound: data: " in err
    assert f"profile: steps 4 to 6: tensorboard --logdir {result.run_dir / 'profile'}" in err


def operations(step):
    """The types of all operations in the compiled training step."""
    [traced] = step._train._list_all_concrete_functions()
    graph = traced.graph.as_graph_def()
    return {node.op for nodes in (graph.node, *(each.node_def for each in graph.library.function)) for node in nodes}


@pytest.mark.parametrize("profile", [None, "4:6"])
def test_a_slow_callback_is_named_and_nothing_is_timed_unless_asked_for(profile, quiet, capfd):
    slow = SlowCallback()
    light = quiet(checkpoint=None, sentinel=None) + [slow]
    result = fit(Plain(), batch_size=5, eval_every="never", profile=profile, callbacks=light)
    assert ("Timestamp" in operations(slow.step)) == bool(profile)
    assert "While" in operations(slow.step)
    assert bool(entries(result, "call")) == bool(entries(result, "summary")) == bool(profile)
    assert ("(above all SlowCallback)" in capfd.readouterr().err) == bool(profile)
    if profile:
        assert entries(result, "summary")[0]["verdict"] == "host-bound"


def test_a_trace_ends_with_the_run_and_a_run_beyond_it_has_none(quiet, capfd):
    def train(steps, profile):
        result = fit(
            Plain(), steps=steps, batch_size=10, eval_every="never", profile=profile, callbacks=quiet(), run_dir="run"
        )
        return result, capfd.readouterr().err

    result, err = train(6, "4:100")
    assert "profile: steps 4 to 6: tensorboard" in err
    assert len(traces(result)) == 1
    result, err = train(8, "2:4")
    assert "profile: the run goes on from step 6, past 4: nothing is traced" in err
    assert "tensorboard" not in err
    result, err = train(9, "20:21")
    assert "profile: the run ends at step 9, before 20: nothing will be traced" in err
    assert "profile: no step after the first call" in err
    assert len(traces(result)) == 1
    # Also of a run that fails; and the next run can be traced.
    with pytest.raises(KeyError, match="planted"):
        fit(Plain(), steps=20, profile="2:30", callbacks=quiet() + [Failing()], run_dir="failed")
    tf.profiler.experimental.start("another")
    tf.profiler.experimental.stop()


def test_one_profiler_serves_several_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    profiler = callbacks.Profiler(2, 8)
    fit(Plain(), steps=10, callbacks=[profiler], run_dir="whole")
    fit(Plain(), steps=5, callbacks=[profiler], run_dir="short")
    assert "profile: steps 2 to 5: " in capsys.readouterr().err
    fit(Plain(), steps=1, callbacks=[profiler], run_dir="before")
    assert "profile: steps" not in capsys.readouterr().err
    fit(Plain(), steps=10, callbacks=[profiler], run_dir="again")
    assert "profile: steps 2 to 8: " in capsys.readouterr().err


class Failing(Callback):
    every = 5

    def on_steps_end(self, run, metrics):
        raise KeyError("planted")


def test_a_callback_asks_for_single_steps():
    schedule = callbacks.Schedule((3, 7))
    assert [schedule.steps_left(step) for step in (0, 3, 7)] == [3, 4, None]
    assert [step for step in range(9) if schedule.due(step, 0.0, False)] == [3, 7]
    with pytest.raises(ValueError, match="isn't a schedule"):
        callbacks.Schedule(())
    with pytest.raises(ValueError, match=r"Profiler\(first=5, last=2\): give"):
        callbacks.Profiler(5, 2)
