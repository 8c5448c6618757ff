"""A notebook: classes that stand in no file, made again and again."""

import gc
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from tensorflow.python.framework import ops
from tensorflow.python.framework.func_graph import FuncGraph

from benchmarks import fit_overhead
from callbacks.run_record import cell
from loop import UsageError, compare, fit
from loop.backends import create
from loop.target import cells as cells_
from tests.conftest import ROOT
from tests.tasks import Conv, Plain

SETUP = """
import sys
sys.path.insert(0, {root!r})
from loop import ArrayData, TrainTask, fit
import keras, numpy as np
import callbacks

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
INTERRUPTS = """
import os, signal, threading, time

def press_again(run, status):
    time.sleep(0.4)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)

def interrupt_at(reached):
    def wait():
        reached.wait()
        os.kill(os.getpid(), signal.SIGINT)  # as Jupyter's button does

    thread = threading.Thread(target=wait)
    thread.start()
    return thread

reached = threading.Event()
watch = callbacks.LambdaCallback(every=50, steps_end=lambda run, metrics: reached.set(), fit_end=press_again)
thread = interrupt_at(reached)
result = fit(Line(), epochs=10**6, callbacks=callbacks.standard(mlflow=None) + [watch], batch_size=8)
thread.join()
quiet = callbacks.standard(mlflow=None)
again = fit(Line(), steps=result.steps + 5, callbacks=quiet, batch_size=8, run_dir=result.run_dir)
print(result.status, result.steps >= 50, again.steps - result.steps, again.status)
"""
EARLY = """
begun = threading.Event()
thread = interrupt_at(begun)

class Slow(Line):
    def train_data(self):
        begun.set()
        thread.join()
        return super().train_data()

fit(Slow())
"""
TASKS = [TASK.format(hidden=hidden) for hidden in (3, 5)]
EXPECTED = ["finished 10 13\nNone\n", "finished 10 21\nNone\n"]


def test_a_class_of_a_cell_trains_again_and_again_also_when_it_is_redefined(tmp_path):
    """And all else that one kernel shows: where texts go, an interrupt, errors in one line, two workers."""
    shown = "result"
    again = "result = train(Line(hidden=2))\nprint(result.status, result.steps, result.model.count_params())"
    workers = "two = fit(Line(), epochs=2, batch_size=8, workers=2, callbacks=callbacks.standard(mlflow=None))\n"
    workers += (
        "one = train(Line())\nnp.testing.assert_allclose(*[r.model.get_weights()[0] for r in (one, two)], rtol=1e-5)"
    )
    cells = [SETUP.format(root=str(ROOT)), *TASKS, again, shown, INTERRUPTS, EARLY, "fit(Line(), epochs='x')", workers]
    executed = execute(cells, tmp_path)
    assert not any(output.get("name") == "stderr" for cell in executed for output in cell["outputs"])
    printed = [printed_by(cell) for cell in executed]
    for text, expected in zip(printed[1:4], [*EXPECTED, "finished 10 9\n"], strict=True):
        assert text.endswith(expected)
        assert text.startswith("Line: ")
    lines = [output["data"]["text/plain"] for output in executed[1]["outputs"] if "data" in output]
    assert [line.startswith("epoch 2/2 100% step 10/10  loss ") for line in lines] == [True]

    [output] = executed[4]["outputs"]
    page = output["data"]["text/html"]
    assert "finished · 10 steps · single, 1 replica" in page
    assert page.count("<svg") == 1  # the loss
    assert len(output["data"]["text/plain"]) < 500

    assert "interrupted: the run saves, and fit returns what there is" in printed[5]
    assert printed[5].endswith("preempted True 5 finished\n")
    assert errors_of(executed[6]) == ["interrupted before training began: nothing is lost"]
    assert errors_of(executed[7]) == ["UsageError: epochs='x': give a whole number >= 1"]
    assert "[0] epoch 2/2" in printed[8]
    assert errors_of(executed[8]) == []


def execute(cells, directory):
    """Executes cells in a kernel; gives them with their outputs."""
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = NotebookClient(made, timeout=240, allow_errors=True, resources={"metadata": {"path": str(directory)}})
    client.create_kernel_manager().kernel_spec.argv[1:1] = ["-X", "warm"]  # and so are the workers that it starts
    client.execute()
    return made.cells


def printed_by(cell):
    return "".join(output["text"] for output in cell["outputs"] if output.get("name") == "stdout")


def errors_of(cell):
    return ["\n".join(output["traceback"]) for output in cell["outputs"] if output["output_type"] == "error"]


def test_the_example_notebook_runs(tmp_path):
    example = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in example.cells)  # they would grow old
    path = f"import sys\nsys.path.insert(0, {str(ROOT)!r})"
    cells = execute([path, *(cell["source"] for cell in example.cells if cell["cell_type"] == "code")], tmp_path)
    assert [errors_of(cell) for cell in cells] == [[] for _ in cells]
    assert "<svg" in str(cells[4]["outputs"])
    shown = cells[6]["outputs"][-1]["data"]
    assert re.search(r"hidden +64 +128\n", shown["text/plain"])
    assert re.search(r">hidden</td><td[^>]*>64</td><td[^>]*>128</td>", shown["text/html"])
    assert shown["text/html"].count("<polyline") == 2 * shown["text/html"].count("<svg") == 2 * 4
    for line in printed_by(cells[-1]).splitlines()[-4:]:
        two, one = re.findall(r"(\d\.\d+) on", line)
        assert float(two) == pytest.approx(float(one), abs=1e-5)


def test_what_a_class_needs_of_other_cells_is_taken_in_order_and_no_more():
    cells = [
        "import numpy as np\nimport loop",
        "from loop import *",
        "%matplotlib inline",
        "data = [1]\nmodel = loop.fit(1)\nunused = 3",
        "get_ipython().run_line_magic('time', '')",
        "class Base:\n    pass",
        "data.append(2); data[0] = 5",
        "def helper(n):\n    return n + len(data)",
        "@np.vectorize\ndef decorated(x):\n    return x",
        "class Task(Base):\n    size = 1",
        "class Task(Base):\n    def use(self, model):\n        unused = helper(2)\n        return model, decorated",
        "loop.fit(Task(), workers=2)\nresult = loop.fit(Task())",
    ]
    needed = cells_.needed_statements(cells, "Task")
    imports = ["import numpy as np", "from loop import *"]
    assert needed == [*imports, "data = [1]", cells[5], "data.append(2)", "data[0] = 5", *cells[7:9], cells[10]]


def test_what_changes_a_variable_within_a_statement_is_found():
    """A loop that appends was left out, and the workers had the empty list."""
    cells = [
        "data = []\nother = []",
        "for number in range(3):\n    if number:\n        data.append(number)",
        "try:\n    del data[0]\nexcept IndexError:\n    data[0] = 1",
        "for number in range(3):\n    other.append(number)",
        "def later():\n    data.append(4)",
        "class Task:\n    size = len(data)",
    ]
    assert cells_.needed_statements(cells, "Task") == ["data = []", cells[1], cells[2], cells[5]]


def test_what_is_set_on_a_class_a_function_or_a_module_is_found():
    """Workers had the class as its cell says."""
    cells = [
        "import settings",
        "class Task:\n    rate = 0.1",
        "Task.rate = 0.3",  # on a class that isn't there any more
        "class Task:\n    rate = settings.RATE\n    def use(self):\n        return helper()",
        "def helper():\n    return helper.number",
        "settings.RATE = 0.2",
        "Task.rate += 1",
        "helper.number = 1",
        "Task.rate\nTask.show()\nprint(Task.rate)",
        "for rate in (1, 2):\n    Task.rate = rate\n    loop.fit(Task(), workers=2)",
    ]
    assert cells_.needed_statements(cells, "Task") == [cells[0], *cells[3:8]]


def test_what_a_magic_runs_in_the_notebook_is_found():
    magics = [
        "get_ipython().run_cell_magic('time', '', 'import os\\n\\nclass Base:\\n    pass\\n')",
        "get_ipython().run_cell_magic('capture', 'said', 'rate = 0.1\\n%matplotlib inline\\n')",
        "get_ipython().run_line_magic('time', 'data = [1]')",
        "get_ipython().run_cell_magic('timeit', '', 'data = [2]\\n')",  # which binds nothing in the notebook
        "get_ipython().system('echo data')",
    ]
    task = "class Task(Base):\n    size = len(data)"
    assert cells_.needed_statements([*magics, task], "Task") == ["class Base:\n    pass", "data = [1]", task]


def test_what_stands_within_a_statement_of_a_cell_is_found():
    optional = "try:\n    import numpy as np\nexcept ImportError as error:\n    np = error"
    chosen = "if True:\n    def helper():\n        return 1\nelse:\n    class helper:\n        pass"
    cells = [optional, chosen, "other = 1", "class Task:\n    size = np.ones(helper())"]
    assert cells_.needed_statements(cells, "Task") == [optional, chosen, cells[-1]]


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


def test_what_a_comparison_shows_is_safe_and_complete(tmp_path, quiet):
    results = []
    for hidden in (2, 3):
        results.append(fit(Plain(hidden=hidden), epochs=2, run_dir=tmp_path / f"<i>{hidden}", callbacks=quiet()))
    found = compare(results[0], tmp_path / "<i>3")
    assert ["hidden", "2", "3"] in found.differences
    assert [row[0] for row in found.results] == ["eval_loss", "loss"]
    best = [min(row["eval_loss"] for row in result.history) for result in results]
    stars = [value.splitlines()[0].endswith(" *") for value in found.results[0][1:]]
    assert stars == [value == min(best) for value in best]
    page = found._repr_html_()
    assert "<i>" not in page
    assert page.count("<polyline") == 4
    assert "hidden" in repr(found)
    with pytest.raises(UsageError, match="1 runs: give at least 2"):
        compare(results[0])
    with pytest.raises(UsageError, match="the same run: give it once"):
        compare(results[0], results[0].run_dir)
    with pytest.raises(UsageError, match="a list isn't a run"):
        compare(results[0], [results[0]])
    many = cell.comparison(["a", "b"], [[f"m{n}", "1", "2"] for n in range(25)], {}, [])
    assert "and 5 more" in many
    assert "<svg" not in many


def test_the_runs_of_a_cell_have_the_colors_of_the_report():
    page = (Path(cell.__file__).parent / "templates" / "page.css").read_text()
    assert tuple(re.findall(r"\.run\d+ \{ --part: (#\w{6}) \}", page)) == cell.COLORS


def test_a_class_of_a_main_without_a_file_trains(tmp_path):
    # As in a shell: without a file there is no text, and AutoGraph can't convert what it can't read.
    task = TASKS[0].replace("        if keras.ops.sum(loss) < 0:  # AutoGraph needs the text of the cell\n", "")
    task = task.replace("            loss = -loss\n", "")
    code = SETUP.format(root=str(ROOT)) + task
    done = subprocess.run([sys.executable, "-"], input=code, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.stdout == EXPECTED[0], done.stderr


MOST_BYTES_PER_FIT = 1_500_000
"""Bound of the slope of the memory over fits; what the allocator keeps differs from fit to fit."""


def test_memory_does_not_grow_from_fit_to_fit():
    gc.collect()
    gc.freeze()  # what other tests have left would be looked at after each fit: most of the time of this test
    fit_overhead.measure(0, tracked=False)
    before = graphs()
    found = fit_overhead.measure(8, tracked=False, warm=0)
    assert graphs() == before
    assert found.bytes_per_fit < MOST_BYTES_PER_FIT


def test_nor_does_it_on_several_replicas(quiet):
    """A collective has a gradient, which TensorFlow keeps by its name, and with it the graph of the run."""
    fit(Conv(), epochs=1, callbacks=quiet(), backend=create("mirrored", 2))
    before = set(ops.gradient_registry._registry)
    fit(Conv(), epochs=1, callbacks=quiet(), backend=create("mirrored", 2))
    assert set(ops.gradient_registry._registry) == before


def graphs():
    """How many graphs of functions there are."""
    gc.collect()
    return sum(isinstance(thing, FuncGraph) for thing in gc.get_objects())
