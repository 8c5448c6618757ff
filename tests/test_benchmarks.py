"""The benchmark suite, without measuring anything: statistics, merging, what is written, and who is named where."""

import json

from benchmarks import measure, more, report
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
    named = {name: workload.contenders for name, workload in WORKLOADS.items()} | {"callbacks": more.CALLBACKS}
    for goal in report.GOALS:
        if isinstance(goal, report.Goal):
            assert {goal.ours, goal.other} <= set(named[goal.workload]), goal
    for contender in CONTENDERS.values():
        assert (ROOT / "benchmarks" / "contenders" / f"{contender.module}.py").exists()
        assert contender.peer in ("", *PEERS)


def test_a_ratio_is_taken_within_a_round():
    contenders = entry(ours=[10.0, 200.0, 3.0], other=[10.0, 100.0, 2.0])["contenders"]
    assert report.ratio(contenders, "ours", "other") == (1.5, 1.0, 2.0)


def test_results_are_merged_by_workload_and_judged(tmp_path, monkeypatch):
    goal = report.Goal("mlp", "other", 1.5)
    limit = report.Limit("first-step", "slowness", 1.2)
    goals = goal, report.Goal("cnn", "other", 2.0), report.Goal("charlm", "other", 1), limit
    monkeypatch.setattr(report, "GOALS", goals)
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
    assert "| first-step | slowness | 1.100 (1.00 to 1.30) | at most 1.2 | met |" in text
    assert "| ours | 20.0 | 10.0 to 30.0 | 1.00 |  | 1 MB |" in text
    assert "| ours | 1.5 |" in text
    assert (tmp_path / "mlp.png").stat().st_size > 1000


def test_a_contender_that_is_not_there_is_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.environments.HOME", tmp_path)
    with measure.working(["PyTorch"], "mlp") as workers:
        assert not workers
    assert "python -m benchmarks setup torch" in capsys.readouterr().err
