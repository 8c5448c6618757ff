"""The benchmark suite, without measuring anything: statistics, merging, what is written, and who is named where."""

import argparse
import json
import re

import pytest
import tensorflow as tf

from benchmarks import __main__ as benchmarks_
from benchmarks import measure, more, operations, report
from benchmarks.contenders import CONTENDERS
from benchmarks.environments import PEERS
from benchmarks.workloads import WORKLOADS
from tests.conftest import ROOT


def entry(**rates):
    return {"contenders": {name: {"rates": each, "note": "", "peak_mb": 1} for name, each in rates.items()}}


def test_whoever_is_named_exists():
    for name, workload in WORKLOADS.items():
        assert set(workload.contenders) <= set(CONTENDERS), name
    assert set(more.CALLBACKS + more.METRICS + more.STARTS) <= set(CONTENDERS)
    for workload, other in operations.COMPARED:
        assert workload in WORKLOADS
        assert {operations.OURS, other} <= set(CONTENDERS)
    named = {name: workload.contenders for name, workload in WORKLOADS.items()} | {"callbacks": more.CALLBACKS}
    for goal in report.GOALS:
        if isinstance(goal, report.Goal):
            assert {goal.ours, goal.other} <= set(named[goal.workload]), goal
    assert set(report.OBSTACLES) <= {
        (goal.workload, goal.other) for goal in report.GOALS if isinstance(goal, report.Goal)
    }
    for contender in CONTENDERS.values():
        assert (ROOT / "benchmarks" / "contenders" / f"{contender.module}.py").exists()
        assert contender.peer in ("", *PEERS)


def test_a_name_that_is_none_is_told_with_those_there_are():
    with pytest.raises(argparse.ArgumentTypeError, match="'WRONG': give callbacks, metrics, first-step"):
        benchmarks_.one_of(more.MORE)("WRONG")


def test_a_ratio_is_taken_within_a_round():
    contenders = entry(ours=[10.0, 200.0, 3.0], other=[10.0, 100.0, 2.0])["contenders"]
    assert report.ratio(contenders, "ours", "other") == (1.5, 1.0, 2.0)


def test_results_are_merged_by_workload_and_judged(tmp_path, monkeypatch):
    goal = report.Goal("mlp", "other", 1.5)
    limit = report.Limit("first-step", "slowness", 1.2)
    goals = goal, report.Goal("cnn", "other", 2.0), report.Goal("charlm", "other", 1), limit
    monkeypatch.setattr(report, "GOALS", goals)
    monkeypatch.setattr(report, "OBSTACLES", {(name, "other"): f"Why {name}." for name in ("mlp", "cnn", "charlm")})
    results = report.load(tmp_path)
    results = report.merged(results, "workloads", "mlp", entry(ours=[1.0], other=[9.0]))
    results = report.merged(results, "workloads", "cnn", entry(ours=[30.0, 10.0], other=[20.0, 8.0]))
    results = report.merged(results, "workloads", "mlp", entry(ours=[30.0, 10.0], other=[20.0, 5.0]))
    starts = {"about": "Starts.", "rows": [{"": "ours", "s": "1.5"}], "figures": {"slowness": (1.1, 1.0, 1.3)}}
    results = report.merged(results, "more", "first-step", starts)
    report.write(results, tmp_path)
    assert report.load(tmp_path) == json.loads(json.dumps(results))
    assert [reached and reached[0] for _, reached in report.judged(results)] == [1.75, 1.375, None, 1.1]
    text = (tmp_path / "README.md").read_text()
    assert "1.750 (1.50 to 2.00) | at least 1.5 | met" in text
    assert "1.375 (1.25 to 1.50) | at least 2 | **not met**" in text
    assert "not measured" in text
    # Of goals that aren't met alone.
    assert re.findall("^- .*Why.*$", text, re.MULTILINE) == ["- cnn, against other: Why cnn."]
    assert "| first-step | slowness | 1.100 (1.00 to 1.30) | at most 1.2 | met |" in text
    assert "| ours | 20.0 | 10.0 to 30.0 | 1.00 |  | 1 MB |" in text
    assert "| ours | 1.5 |" in text
    assert (tmp_path / "mlp.png").stat().st_size > 1000


def test_a_contender_that_is_not_there_is_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.environments.HOME", tmp_path)
    with measure.working(["PyTorch"], "mlp") as workers:
        assert not workers
    assert "python -m benchmarks setup torch" in capsys.readouterr().err


def test_operations_of_a_trace_are_added_up_by_type(tmp_path):
    multiply = tf.function(lambda x: tf.linalg.matmul(x, x))
    matrix = tf.ones([300, 300])
    multiply(matrix)
    tf.profiler.experimental.start(str(tmp_path))
    for _ in range(3):
        multiply(matrix)
    tf.profiler.experimental.stop()
    [path] = tmp_path.rglob("*.xplane.pb")
    times, counts = operations.operations(path)
    [kind] = counts
    assert "MatMul" in kind
    assert counts[kind] == 3
    assert times[kind] > 0


def test_operations_that_differ_have_rows():
    ours = operations.Traced(
        150.0, 200.0, {"Mul": 50.0, "Add": 30.2, "Check": 20.0}, {"Mul": 1.0, "Add": 2.0, "Check": 1.0}
    )
    hand = operations.Traced(90.0, 100.0, {"Mul": 60.0, "Add": 30.0}, {"Mul": 1.0, "Add": 2.0})
    rows = operations.compared("mlp", ours, hand)
    assert [tuple(row.values()) for row in rows] == [
        ("mlp", "a step, without the profiler", "150", "90", "+60"),
        ("", "a step", "200", "100", "+100"),
        ("", "Check, 1 and 0 a step", "20", "0", "+20"),
        ("", "Mul, 1 and 1 a step", "50", "60", "-10"),
        ("", "the other operations", "30", "30", "+0"),
        ("", "between operations", "100", "10", "+90"),
    ]
