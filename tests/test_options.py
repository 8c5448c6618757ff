"""The options of `fit`: its arguments, the command line and the table of options say the same."""

import inspect

import numpy as np
import pytest

import cli
from loop import TrainTask, UsageError, fit
from loop.options import DEFAULTS, KEPT, OPTIONS, Phase, with_defaults
from loop.run.worker_processes import _typed_options
from tests.tasks import Plain

NO_OPTIONS = {"task", "callbacks", "run_dir", "workers"}
"""Arguments of `fit` that no task has a default for."""


def test_the_arguments_of_fit_are_the_options():
    parameters = inspect.signature(fit).parameters
    names = [name for name in parameters if name not in NO_OPTIONS]
    assert sorted(names) == sorted(DEFAULTS)
    for name in names:
        assert parameters[name].default is None, name  # else a task's own default would never count


def test_the_command_line_has_the_options():
    parameters = {name.rstrip("_"): parameter for name, parameter in inspect.signature(cli.train).parameters.items()}
    assert DEFAULTS.keys() <= parameters.keys()
    for name in DEFAULTS:
        assert parameters[name].default is None, name


@pytest.mark.parametrize("value", [True, False])
def test_what_decides_about_examples_is_handed_to_workers_either_way(value):
    """The task's own default may be the other one."""
    prefix = "--" if value else "--no-"
    given = {"shuffle": value, "drop_remainder": value}
    assert _typed_options(TrainTask(), given) == [f"{prefix}shuffle", f"{prefix}drop-remainder"]


def test_each_option_is_there_once_and_its_default_is_valid():
    assert len(DEFAULTS) == len(OPTIONS)
    for option in OPTIONS:
        option.check(option.default)
    assert with_defaults(None, {}) == DEFAULTS


class Clipped(TrainTask):
    defaults = {"clip_norm": 1.0}


def test_a_clip_that_the_caller_gives_takes_the_place_of_the_other_one_of_the_task():
    options = with_defaults(Clipped(), {"clip_value": 0.5})
    assert (options["clip_norm"], options["clip_value"]) == (None, 0.5)
    assert with_defaults(Clipped(), {})["clip_norm"] == 1.0
    with pytest.raises(UsageError, match="give one of the two"):
        with_defaults(Clipped(), {"clip_norm": 2.0, "clip_value": 0.5})


def test_what_changes_the_result_is_kept():
    kept = {"batch_size", "seed", "shuffle", "drop_remainder", "precision", "accumulate", "clip_norm", "clip_value"}
    kept |= {"on_nonfinite", "sync_batch_norm", "ema", "compression", "reduction", "local_steps", "overfit"}
    assert set(KEPT) == kept


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_a_value_of_no_sense_is_refused_with_a_fix(option):
    with pytest.raises(UsageError, match=rf"^{option.name}=.*give "):
        with_defaults(None, {option.name: object()})


def test_a_size_of_0_is_no_name_of_a_layer():
    with pytest.raises(UsageError, match=r'^remat=.*0MB.*: give "full", a size'):
        with_defaults(None, {"remat": "0MB"})


class Numbered(TrainTask):
    defaults = {"clip_norm": np.float32(0.5), "eval_every": {"val": np.int64(3)}}

    def phases(self):
        return [Phase("one", steps=np.int64(2), batch_size=np.int32(4))]


def test_numbers_of_numpy_are_python_s():
    given = {"batch_size": np.int64(4), "ema": np.float32(0.5), "shuffle": np.False_, "stall_timeout": np.int8(9)}
    options = with_defaults(Numbered(), given)
    expected = {"batch_size": 4, "ema": 0.5, "shuffle": False, "stall_timeout": 9, "clip_norm": 0.5, "steps": 2}
    for name, value in (expected | {"eval_every": {"val": 3}}).items():
        assert (options[name], type(options[name])) == (value, type(value)), name
    assert type(options["eval_every"]["val"]) is int
    for name, value in {"epochs": np.float64(2), "clip_norm": np.array([1.0, 2.0]), "seed": np.True_}.items():
        with pytest.raises(UsageError, match=f"{name}=.*: give"):
            with_defaults(None, {name: value})


@pytest.mark.parametrize("run_dir", [3, b"x", ["a"], "a\0b"])
@pytest.mark.parametrize("workers", [None, 2])
def test_a_run_dir_that_is_no_path_is_one_line(run_dir, workers):
    with pytest.raises(UsageError, match=r"run_dir=.*: give a path, a URL, or None"):
        fit(Plain(), run_dir=run_dir, steps=1, workers=workers)


@pytest.mark.parametrize("defaults", [None, [("epochs", 3)], "epochs=3"])
def test_defaults_that_are_no_dict_are_refused(defaults):
    task = type("Mine", (), {"defaults": defaults})()
    with pytest.raises(UsageError, match=r"^Mine\.defaults is .*: give a dict, such as"):
        with_defaults(task, {})
