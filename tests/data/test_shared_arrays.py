"""Arrays in memory that all workers of a machine share."""

import os
import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import tensorflow as tf

from loop.data import shared_arrays
from loop.data.array_source import constant
from tests.conftest import needs_horovod, tfloop

# Never skipped where CI runs. Without memory files `shared` returns the data as it is, as for the arrays "apart" below.
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such memory")

TASK = """
    import os
    import sys
    from pathlib import Path

    import keras
    import numpy as np

    import callbacks
    from loop import ArrayData, TrainTask


    class Large(TrainTask):
        def build_model(self):
            return keras.Sequential([keras.Input((512,)), keras.layers.Dense(1)])

        def build_optimizer(self):
            return keras.optimizers.SGD(1e-3)

        def train_data(self):
            random = np.random.default_rng(0)
            inputs = random.normal(size=(1024, 512)).astype("float32")  # 2 MiB
            if "differ" in os.environ.get("HOW", ""):
                inputs[-1] = os.getpid()
            if os.environ.get("HOW") == "apart":
                inputs = np.asfortranarray(inputs)
            return ArrayData(inputs, random.normal(size=(1024, 1)).astype("float32"))

        def compute(self, model, batch, training):
            inputs, labels = batch
            return {"loss": keras.losses.mean_squared_error(labels, model(inputs, training=training))}

        def build_callbacks(self):
            return [Maps()]


    class Maps(callbacks.Callback):
        runs_on = "all"

        def on_fit_end(self, run, status):
            lines = Path("/proc/self/maps").read_text().splitlines()
            inodes = [line.split()[4] for line in lines if "tfloop-arrays" in line]
            print(f"inodes of {run.backend.rank}: {inodes}", file=sys.stderr)
"""


def train(directory, backend, how=""):
    """The inodes of the memory that each worker has, and the hash of the weights."""
    (directory / "task.py").write_text(textwrap.dedent(TASK))
    done = tfloop(
        "train", "task.py:Large", "--workers", 2, "--backend", backend, "--steps", 20, "--batch-size", 50,
        "--run-dir", how or "run", "--track", "off", "--json", cwd=directory, env={**os.environ, "HOW": how},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = dict(re.findall(r"inodes of (\d): (\[.*\])", done.stderr))
    return found, re.findall(r'"weights_sha256": "(\w+)"', done.stdout)


@pytest.mark.parametrize("backend", ["multiworker", pytest.param("horovod", marks=needs_horovod)])
def test_workers_read_the_same_memory_with_the_same_bits(backend, tmp_path):
    inodes, weights = train(tmp_path, backend)
    apart, weights_apart = train(tmp_path, backend, "apart")
    assert set(inodes) == set(apart) == {"0", "1"}
    assert inodes["0"] == inodes["1"] != "[]"
    assert apart["0"] == apart["1"] == "[]"
    assert len(weights) == 1
    assert weights == weights_apart


def test_a_worker_with_other_examples_keeps_its_own(tmp_path):
    inodes, _ = train(tmp_path, "multiworker", "differ")
    assert inodes["0"] != "[]"
    assert inodes["1"] == "[]"


@pytest.fixture
def arrays():
    random = np.random.default_rng(1)
    return [random.normal(size=(700, 300)).astype(dtype) for dtype in ("float16", "float32", "float64")] + [
        random.integers(-9, 9, (99, 7)).astype(dtype) for dtype in ("int8", "uint16", "int32", "int64")
    ]


def test_each_type_has_the_same_content_there_and_is_not_copied(arrays):
    with shared_arrays._memory(arrays) as memory:
        views = shared_arrays._views(memory, arrays)
    for array in arrays:
        view = views[id(array)]
        tensor = constant(view, "x")
        assert (tensor.dtype, tensor.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(tensor, array)
        view[0] = 1  # of this process alone
        np.testing.assert_array_equal(tensor[0], view[0])


def test_what_differs_is_not_taken(arrays):
    with shared_arrays._memory(arrays) as memory:
        other = arrays[0].copy()
        other[-1, -1] = np.nan
        assert id(other) not in shared_arrays._views(memory, [other])
        assert shared_arrays._views(memory, [arrays[0].reshape(-1)]) == {}
        assert shared_arrays._views(memory, [arrays[0].view("int16")]) == {}
        memory.inode += 1
        assert shared_arrays._views(memory, arrays) == {}
        with subprocess.Popen([sys.executable, "-c", ""]) as ended:
            memory.pid = ended.pid
        assert ended.returncode == 0
        assert shared_arrays._views(memory, arrays) == {}


def test_what_no_tensor_has_is_not_shared():
    assert shared_arrays._can_be_shared(np.zeros(1 << 18))
    # So that the error is that of one worker, which names the type: DLPack has another one.
    assert not shared_arrays._can_be_shared(np.zeros(1 << 18, "longdouble"))


def test_a_part_of_it_that_tensorflow_cannot_take_as_it_is_is_copied(arrays):
    with shared_arrays._memory(arrays) as memory:
        view = shared_arrays._views(memory, arrays)[id(arrays[1])]
    assert shared_arrays.as_tensor(view[:10]) is not None
    for part in (view[1:], view[:, :7], view[:, ::2]):
        assert shared_arrays.as_tensor(part) is None
        np.testing.assert_array_equal(constant(part, "x"), part)
    assert shared_arrays.as_tensor(arrays[1]) is None


@pytest.mark.parametrize(("module", "function"), [("os", "memfd_create"), ("fcntl", "fcntl")])
def test_no_memory_is_no_error(module, function, arrays, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(getattr(shared_arrays, module), function, full)
    with shared_arrays._memory(arrays) as memory:
        assert memory is None


def test_tensors_outlive_the_arrays(arrays):
    with shared_arrays._memory(arrays) as memory:
        views = shared_arrays._views(memory, arrays)
    tensor = constant(views[id(arrays[2])], "x")
    expected = float(arrays[2].sum())
    del views
    assert float(tf.reduce_sum(tensor)) == pytest.approx(expected, rel=1e-12)
