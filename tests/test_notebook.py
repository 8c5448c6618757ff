"""A notebook: classes that stand in no file, made again and again."""

import subprocess
import sys

import nbformat
from nbclient import NotebookClient

from callbacks.run_record import cell
from tests.conftest import ROOT

SETUP = """
import sys
sys.path.insert(0, {root!r})
import keras, numpy as np
import callbacks
from loop import ArrayData, TrainTask, fit

def train(task):
    chosen = callbacks.standard(mlflow=None)
    return fit(task, epochs=2, callbacks=chosen, batch_size=8)
"""
TASK = """
from dataclasses import dataclass

@dataclass
class Line(TrainTask):
    hidden: int = {hidden}

    def build_model(self):
        return keras.Sequential([keras.Input((2,)), keras.layers.Dense(self.hidden), keras.layers.Dense(1)])

    def build_optimizer(self):
        return keras.optimizers.SGD(0.1)

    def train_data(self):
        inputs = np.random.default_rng(0).normal(size=(40, 2)).astype("float32")
        return ArrayData(inputs, inputs.sum(-1))

    def compute(self, model, batch, training):
        inputs, labels = batch
        loss = (model(inputs, training=training)[:, 0] - labels) ** 2
        if keras.ops.sum(loss) < 0:  # AutoGraph needs the text of the cell
            loss = -loss
        return {{"loss": loss}}

result = train(Line())
print(result.status, result.steps, result.model.count_params())
print(__import__("json").loads((result.run_dir / "run.json").read_text())["target"])
"""
TASKS = [TASK.format(hidden=hidden) for hidden in (3, 5)]
EXPECTED = ["finished 10 13\nNone\n", "finished 10 21\nNone\n"]


def test_a_class_of_a_cell_trains_again_and_again_also_when_it_is_redefined(tmp_path):
    shown = "result"
    again = "result = train(Line(hidden=2))\nprint(result.status, result.steps, result.model.count_params())"
    cells = [SETUP.format(root=str(ROOT)), *TASKS, again, shown]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    printed = [
        "".join(output["text"] for output in cell["outputs"] if output.get("name") == "stdout")
        for cell in notebook.cells[1:]
    ]
    assert printed == [*EXPECTED, "finished 10 9\n", ""]
    [output] = notebook.cells[-1]["outputs"]
    page = output["data"]["text/html"]
    assert "finished · 10 steps · single, 1 replica" in page
    assert page.count("<svg") == 1  # the loss


def test_what_a_notebook_shows_is_safe_and_complete():
    history = [{"epoch": n, "step": n, "examples": n, "<b>": float(n), "loss": 1 / n, "flat": 2.0} for n in (1, 2, 3)]
    history[1]["loss"] = float("nan")
    page = cell.html(["<script>", "finished"], history)
    assert "<script>" not in page
    assert "<b>" not in page
    assert "0.3333" in page
    assert cell.html(["stopped"], []) == "<div><div>stopped</div></div>"
    many = cell.html([], [{"epoch": 1, **{f"m{n}": 0.0 for n in range(25)}}])
    assert "and 5 more" in many


def test_a_class_of_a_main_without_a_file_trains(tmp_path):
    # As in a shell: without a file there is no text, and AutoGraph can't convert what it can't read.
    task = TASKS[0].replace("        if keras.ops.sum(loss) < 0:  # AutoGraph needs the text of the cell\n", "")
    task = task.replace("            loss = -loss\n", "")
    code = SETUP.format(root=str(ROOT)) + task
    done = subprocess.run([sys.executable, "-"], input=code, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.stdout == EXPECTED[0], done.stderr
