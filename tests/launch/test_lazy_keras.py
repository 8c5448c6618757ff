"""Parts of Keras that no training needs are imported when they are first used."""

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

USES_THEM = """
import sys
from concurrent.futures import ThreadPoolExecutor
from loop.launch import stderr

with stderr.quiet_start(says=False):
    import keras
import numpy as np
import tensorflow as tf
import loop


class Line(loop.TrainTask):
    def build_model(self):
        return keras.Sequential([keras.layers.Dense(1)])

    def build_optimizer(self):
        return keras.optimizers.SGD(0.1)

    def train_data(self):
        return loop.ArrayData(np.ones((8, 2), np.float32), np.ones(8, np.float32))

    def compute(self, model, batch, training):
        return {"loss": tf.square(model(batch[0], training=training)[:, 0] - batch[1])}


loop.fit(Line(), steps=1, run_dir="run")
assert not {"matplotlib", "sklearn", "pandas"} & set(sys.modules)
model = Line().build_model()
model.compile("sgd", "mse")
model.fit(np.ones((8, 2)), np.ones(8), validation_split=0.5, verbose=0)
with ThreadPoolExecutor(2) as pool:
    first, second = pool.map(lambda module: module.wrappers.SKLearnClassifier, (keras, tf.keras))
assert first is second and first.__module__ == "keras.src.wrappers.sklearn_wrapper"
assert "matplotlib" not in sys.modules
broken = "keras.src.visualization.plot_image_gallery"
sys.modules[broken] = None
said = []
for attempt in range(2):  # the second one said that the module has no such attribute
    try:
        keras.visualization.plot_image_gallery
    except ImportError as error:
        said.append(broken in str(error))
assert said == [True, True]
del sys.modules[broken]
assert "plot_image_gallery" in dir(keras.visualization)
assert keras.src.visualization.plot_image_gallery.plt is sys.modules["matplotlib.pyplot"]
try:
    keras.wrappers.TorchClassifier
except AttributeError as error:
    print(error)
"""


def test_a_training_needs_none_of_them_and_who_uses_them_finds_them(tmp_path):
    script = tmp_path / "uses.py"  # a file, since AutoGraph looks for the source of functions
    script.write_text(USES_THEM)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=240
    )
    assert done.stdout.splitlines()[-1:] == ["module 'keras.wrappers' has no attribute 'TorchClassifier'"], done.stderr
    assert Path("run/journal.jsonl").exists()
