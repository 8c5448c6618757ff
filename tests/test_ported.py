"""Programs from outside, as they were and as they are here: both come to the same weights."""

import functools
import json
import os
import re
import runpy
import subprocess
import sys

import keras
import numpy as np
import pytest

import callbacks
import loop
from tests.campaigns.ported import BOUNDS, TARGETS
from tests.conftest import ROOT, needs_horovod

PORTED = ROOT / "docs" / "ported"
IN_ONE_PROCESS = sorted(set(BOUNDS) - {"horovod"})
IN_FLOAT64 = ("translation",)
"""Programs that are compared in float64. The gradient of a key's bias in attention is 0 but for rounding, and RMSprop
divides it by its own size: in float32 the difference is what rounding makes of it, on some processors 4e-4."""


@pytest.fixture
def program(monkeypatch):
    """Runs a program of the page without MLflow; gives its variables."""
    quiet = functools.partial(callbacks.standard, mlflow=None, progress=None)
    monkeypatch.setattr(callbacks, "standard", quiet)

    def run(name, whose):
        monkeypatch.syspath_prepend(PORTED / name)
        return runpy.run_path(str(PORTED / name / f"{whose}.py"), run_name="__main__")

    return run


def largest_difference(theirs, ours):
    """The largest absolute difference of two lists of arrays of the same shapes."""
    assert [each.shape for each in theirs] == [each.shape for each in ours]
    return max(float(np.max(np.abs(one - other))) for one, other in zip(theirs, ours, strict=True))


@pytest.fixture
def float64(monkeypatch):
    """Makes both programs compute in float64."""
    monkeypatch.setattr(loop, "fit", functools.partial(loop.fit, precision="float64"))
    before = keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")  # an earlier training has set one, which counts more
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy(before)


@pytest.mark.parametrize("name", IN_ONE_PROCESS)
def test_a_ported_program_comes_to_the_same_weights(name, program, request):
    if name in IN_FLOAT64:
        request.getfixturevalue("float64")
    theirs, ours = program(name, "theirs"), program(name, "ours")
    assert largest_difference(theirs["weights"], ours["weights"]) <= BOUNDS[name]
    for value in {"accuracy", "found"} & set(theirs):
        assert ours[value] == pytest.approx(theirs[value], rel=0, abs=1e-6), value


def test_the_stateful_program_goes_on_within_an_epoch_to_the_same_bits(program, tmp_path, monkeypatch):
    """What starts an epoch is called again there, and must keep the state."""
    monkeypatch.chdir(tmp_path)
    names = program("stateful", "ours")

    def stop(run, metrics):
        run.stop("within the second epoch")

    stopped = callbacks.LambdaCallback(every=40, steps_end=stop)
    parts = [loop.fit(names["Wave"](), run_dir="run", callbacks=more) for more in ([stopped], None)]
    assert [part.steps for part in parts] == [40, 81]
    assert parts[-1].weights_sha256 == names["result"].weights_sha256


BOTH = """
import functools, runpy, sys
import numpy as np
import callbacks
callbacks.standard = functools.partial(callbacks.standard, mlflow=None, progress=None)
theirs, ours = (runpy.run_path(path, run_name="__main__") for path in sys.argv[1:])
assert ours["result"].replicas == 2
arrays = [*theirs["weights"], *ours["weights"]]
if ours["result"].run_dir.exists():
    np.savez("weights.npz", **{f"{i:02d}": each for i, each in enumerate(arrays)})
"""


@needs_horovod
def test_the_ported_horovod_example_comes_to_the_same_weights(tmp_path):
    """In two processes, which run one program after the other."""
    here = PORTED / "horovod"
    path = os.pathsep.join([str(ROOT), str(here)])
    done = subprocess.run(
        [sys.executable, "-m", "loop.launch.horovodrun", "2", sys.executable, "-X", "warm", "-c", BOTH,
         str(here / "theirs.py"), str(here / "ours.py")],
        capture_output=True, text=True, timeout=240, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    with np.load(tmp_path / "weights.npz") as stored:
        arrays = [stored[name] for name in sorted(stored.files)]
    half = len(arrays) // 2
    assert largest_difference(arrays[:half], arrays[half:]) <= BOUNDS["horovod"]


def test_the_page_has_each_program_its_lines_and_its_bound():
    page = (ROOT / "docs" / "ported.md").read_text()
    rows = re.findall(r"^\| \[[^]]+\]\(#([\w-]+)\) \|.*\| (\d+) \| (\d+) \| ([\d.e-]+) \|$", page, re.MULTILINE)
    assert sorted(name for name, *_ in rows) == sorted(BOUNDS) == sorted(TARGETS)
    for name, theirs, ours, bound in rows:
        lines = {whose: len((PORTED / name / f"{whose}.py").read_text().splitlines()) for whose in ("theirs", "ours")}
        assert (int(theirs), int(ours)) == (lines["theirs"], lines["ours"]), name
        assert float(bound) == BOUNDS[name], name
        assert f'--8<-- "ported/{name}/ours.py"' in page


def test_a_ported_program_is_verified(tmp_path):
    """The campaign does so for each of them, and trains each on two workers."""
    from tests.campaigns.ported import verified

    report = json.loads(verified("vae", tmp_path).stdout.splitlines()[-1])
    assert report["same"], report
