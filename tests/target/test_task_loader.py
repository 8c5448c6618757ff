"""How a task's file is found and run."""

import os
import runpy
import sys

import pytest

from loop.errors import UsageError
from loop.target import task_file, task_loader

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


def test_a_file_whose_path_is_not_utf_8_is_refused(tmp_path):
    """TensorFlow fails as it traces a function of such a file."""
    path = tmp_path / os.fsdecode(b"task\xff.py")
    path.write_text(TASK)
    with pytest.raises(UsageError, match=r"TARGET .*task\\udcff.py: TensorFlow runs no file whose path isn't UTF-8"):
        task_loader.check(f"{path}:Short")


TRAINS = """
from callbacks import standard
from loop import fit
from tests.tasks import Plain


class Mine(Plain):
    pass


fit(Mine(), steps=1, callbacks=standard(mlflow=None))
"""


def test_a_file_that_trains_as_soon_as_it_is_imported_is_warned_of(tmp_path, capfd):
    path = tmp_path / "trains.py"
    path.write_text(TRAINS)
    task_loader.find(f"{path}:Mine")
    assert capfd.readouterr().err.count(f"warning: {path} trains as soon as a command imports it") == 1
    runpy.run_path(str(path), run_name="__main__")
    assert "as soon as" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        ("inner", "from ..numbers_of_it import NUMBER"),
        ("inner", "from whole_package.numbers_of_it import NUMBER"),
        ("", "from .numbers_of_it import NUMBER"),
        ("", "from folder_alone.numbers_of_it import NUMBER"),
    ],
)
def test_a_file_of_a_package_is_run_as_a_module_of_it(tmp_path, monkeypatch, folder, line):
    """A run records the file, so that its task can be found again from any working directory."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    package = tmp_path / ("folder_alone" if "folder_alone" in line else "whole_package")
    place = package / folder
    place.mkdir(parents=True)
    if package.name == "whole_package":
        (package / "__init__.py").touch()
        (place / "__init__.py").touch()
    (package / "numbers_of_it.py").write_text("NUMBER = 7\n")
    (place / "task_of_it.py").write_text(f"{line}\n{TASK.replace('= 1', '= NUMBER')}")
    assert task_loader.find(f"{place}/task_of_it.py:Short").number == 7


def test_a_package_that_is_missing_is_not_taken_from_a_folder_of_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "no_such_package").mkdir()
    path = tmp_path / "no_such_package" / "short_task.py"
    path.write_text(f"import no_such_package\n{TASK}")
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_package'"):
        task_loader.find(f"{path}:Short")


def test_only_classes_that_may_be_tasks_are_offered(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "class Kind(enum.Enum):\n    pass\n\nclass Model(keras.Model):\n    pass\n\nclass Wider(Model):\n    pass\n\n"
        "class Bad(Exception):\n    pass\n\nclass Watch(callbacks.Callback, metaclass=M):\n    pass\n\n"
        "class _Base(TrainTask):\n    pass\n\nclass Net(_Base):\n    pass\n\n"
        "class Mixed(ABC, loop.TrainTask):\n    pass\n\n"
        "class Other(\n    somewhere.Net,\n):\n    pass\n"
    )
    assert task_file.classes(path) == ["Net", "Mixed", "Other"]
