"""How a task's file is found and run."""

import os

from loop.target import task_loader

TASK = """
from loop import TrainTask


class Short(TrainTask):
    number = 1
"""


def test_a_file_is_run_as_it_is_now(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "short_task.py"
    for number in (1, 2):
        path.write_text(TASK.replace("= 1", f"= {number}"))
        os.utime(path, (1e9, 1e9))  # with the same size: what Python's cache of compiled files can't tell apart
        assert task_loader.find(f"{path}:Short").number == number
