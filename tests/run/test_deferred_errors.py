"""Errors of one worker, of which the others hear."""

import json
from types import SimpleNamespace

import pytest

from loop import TrainingError, UsageError
from loop.launch import worker
from loop.launch.environment import JOB, OWNER
from loop.run.deferred_errors import DeferredErrors


@pytest.mark.parametrize(("is_usage", "kind", "code"), [(True, UsageError, 2), (False, TrainingError, 1)])
def test_what_another_worker_has_found_is_marked_as_an_echo(is_usage, kind, code, tmp_path, monkeypatch):
    """Of bad input, the launcher showed `rank 1: rank 0 failed: UsageError: ...` where rank 1 was faster."""
    monkeypatch.setenv(JOB, str(tmp_path))
    monkeypatch.setenv(
        "TF_CONFIG", json.dumps({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}})
    )
    monkeypatch.setenv(OWNER, "")
    monkeypatch.setattr(worker.signal, "signal", lambda *handler: None)
    monkeypatch.setattr(worker, "die_with_parent", lambda: None)
    others = SimpleNamespace(gather_json=lambda own: [own, ["Wrong: 1", is_usage]])
    with pytest.raises(kind, match=r"^rank 1 failed: Wrong: 1$"), worker.reporting():
        DeferredErrors(others).raise_on_all()
    report = json.loads((tmp_path / "rank-0.json").read_text())
    assert (report["code"], report["echo"]) == (code, True)
