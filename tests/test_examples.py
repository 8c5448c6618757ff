"""The examples, small; and as people run them."""

import subprocess
import sys

import pytest

import callbacks
from loop import fit, target
from tests.conftest import ROOT


def quietly():
    return callbacks.standard(mlflow=None, progress=None)


def test_charlm_learns_more_than_how_frequent_characters_are():
    task = target.load("charlm", ["context=32", "width=32", "layers=1", "characters=100000"])
    result = fit(task, steps=60, callbacks=quietly())
    assert result.metrics["eval_loss"] < result.metrics["eval_unigram"] - 0.2
    # The unigram entropy is a property of the text: an independent count of it.
    import numpy as np

    frequency = np.bincount(task.windows.reshape(-1)) / task.windows.size
    entropy = -(frequency[frequency > 0] * np.log(frequency[frequency > 0])).sum()
    assert result.metrics["eval_unigram"] == pytest.approx(entropy, rel=0.03)


def test_bring_your_keras_model():
    path = target.shipped_path("bring_your_keras_model")
    result = fit(target.load(f"{path}:MyModel"), callbacks=quietly())
    assert result.history[-1]["eval_loss"] < result.history[0]["eval_loss"]
    assert result.metrics["eval_accuracy"] > 0.85


def test_keras_task_uses_names_functions_and_weights():
    import keras
    import numpy as np

    from loop import ArrayData, KerasTask

    inputs, labels = np.ones((12, 3), "float32"), np.arange(12, dtype="float32")[:, None]
    weights = (np.arange(12) < 6).astype("float32")

    def model_fn():
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")])

    losses = []
    for loss in ("mean_squared_error", keras.losses.MeanSquaredError(), keras.losses.mean_squared_error):
        data = ArrayData(inputs, labels, weights)
        task = KerasTask(model_fn, lambda: keras.optimizers.SGD(0.0), loss, data, data)
        losses.append(fit(task, callbacks=quietly()).metrics["eval_loss"])
    assert losses == [np.mean(np.arange(6.0) ** 2)] * 3  # the first six have weight 1, the others 0


@pytest.mark.parametrize("name", ["digits", "bring_your_keras_model"])
def test_examples_run_as_scripts(name, tmp_path):
    done = subprocess.run(
        [sys.executable, target.shipped_path(name)], capture_output=True, text=True, timeout=240, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "'eval_accuracy': 0." in done.stdout
    assert (tmp_path / "runs" / "mlflow.db").exists()


def test_the_readmes_own_task_trains(tmp_path):
    code = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    (tmp_path / "readme_task.py").write_text(code)
    result = fit(target.load("readme_task.py:Digits", ["hidden=128"]), epochs=5, callbacks=quietly())
    assert result.metrics["accuracy"] > 0.9
