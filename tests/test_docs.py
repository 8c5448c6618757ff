"""The documentation: its programs run and agree, its numbers are computed, its links and command lines are right."""

import ast
import functools
import html
import importlib
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf
import typer

import callbacks
import cli
import loop
from loop import ArrayData, TrainTask, fit
from loop.backends import create
from loop.backends.strategy import StrategyBackend
from loop.commands.export import export
from loop.data import BatchOptions, source
from loop.target import task_loader
from tests.conftest import ROOT, needs_horovod

DOCS = ROOT / "docs"
COMING_FROM = DOCS / "coming-from"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md"])


def blocks(path, language):
    """The fenced blocks of a page that are in this language."""
    fences = re.findall(r"^( *)```(\w*).*?\n(.*?)^\1```", path.read_text(), re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(code) for _, its_language, code in fences if its_language == language]


@pytest.fixture
def program(monkeypatch):
    """Runs a program of a "coming from" page, all of it but MLflow; gives its variables."""
    monkeypatch.setattr(callbacks, "standard", functools.partial(callbacks.standard, mlflow=None))
    return lambda page, whose: runpy.run_path(str(COMING_FROM / page / f"{whose}.py"), run_name="__main__")


@pytest.mark.parametrize("page", ["keras-fit", "tf-distribute", "tower", "make-parallel"])
def test_both_programs_come_to_the_same_loss(page, program):
    theirs, ours = program(page, "theirs"), program(page, "ours")
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=0, abs=1e-5)
    assert 0.05 < ours["loss"] < 1  # it has learned something: 2.3 is what knowing nothing costs


def test_lightning_comes_to_the_same_loss(program):
    """To the one that Lightning gave when the page was written; and to its loss today, where it is installed."""
    ours = program("lightning", "ours")["loss"]
    [said] = re.findall(r"gives a loss of ([\d.]+) ", (COMING_FROM / "lightning.md").read_text())
    assert ours == pytest.approx(float(said), rel=0, abs=1e-5)
    pytest.importorskip("lightning", reason="the program without tfloop needs Lightning, which is not installed")
    assert ours == pytest.approx(program("lightning", "theirs")["loss"], rel=0, abs=1e-5)


def test_what_was_an_estimator_trains(program):
    """There is no Estimator any more to compare it with."""
    assert 0.05 < program("estimator", "ours")["loss"] < 1


BOTH = """
import functools, json, runpy, sys
import callbacks
callbacks.standard = functools.partial(callbacks.standard, mlflow=None)
found = [runpy.run_path(path, run_name="__main__") for path in sys.argv[1:]]
if found[1]["result"].replicas == 2 and "loss" in found[0]:
    json.dump([each["loss"] for each in found], open("losses.json", "w"))
"""


@needs_horovod
def test_the_horovod_programs_come_to_the_same_loss(tmp_path):
    """In two processes, which run one program after the other."""
    paths = [str(COMING_FROM / "horovod" / f"{whose}.py") for whose in ("theirs", "ours")]
    done = subprocess.run(
        [sys.executable, "-m", "loop.launch.horovodrun", "2", sys.executable, "-X", "warm", "-c", BOTH, *paths],
        capture_output=True, text=True, timeout=200, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    theirs, ours = json.loads((tmp_path / "losses.json").read_text())
    assert ours == pytest.approx(theirs, rel=0, abs=1e-5)


def test_towers_err_where_they_are_uneven(program, quiet):
    """A last batch of five examples: three in one tower, two in the other."""
    code = (COMING_FROM / "tower" / "theirs.py").read_text().replace("EXAMPLES = 1600", "EXAMPLES = 1605")
    theirs: dict = {}
    exec(compile(code, "theirs.py", "exec", dont_inherit=True), theirs)
    task = runpy.run_path(str(COMING_FROM / "tower" / "ours.py"))["Digits"]
    alone, towers = (
        fit(task(examples=1605), backend=backend, callbacks=quiet()).metrics["eval_loss"]
        for backend in ("single", create("mirrored", 2))
    )
    assert towers == pytest.approx(alone, rel=0, abs=1e-5)
    assert abs(theirs["loss"] - alone) > 1e-3
    rows = re.findall(r"^\| .* \| (0\.\d+) \|$", (COMING_FROM / "tower.md").read_text(), re.MULTILINE)
    assert rows == [f"{each:.4f}" for each in (theirs["loss"], alone, towers)]


@pytest.mark.parametrize("page", ["mathematics.md", "data.md"])
def test_numbers_on_the_pages_are_right(page):
    """The code of a page runs from top to bottom, and `name = ...  # 4.0` has that value."""
    found: dict = {}
    checked = 0
    for code in blocks(DOCS / page, "python"):
        exec(code, found)
        for name, value in re.findall(r"^(\w+) = .*  # ([\[\d-].*)$", code, re.MULTILINE):
            np.testing.assert_allclose(found[name], ast.literal_eval(value), rtol=1e-6, atol=1e-12)
            checked += 1
    assert checked >= {"mathematics.md": 18, "data.md": 1}[page]


def of_readme(found, directory):
    """The README's task, as the pages import it."""
    [code] = blocks(ROOT / "README.md", "python")
    (directory / "task.py").write_text(code)
    found |= runpy.run_path(str(directory / "task.py"))


def after_callbacks(found):
    found["fit"](found["Digits"](), callbacks=[found["BestSoFar"]()])


def before_keras_fit(found, directory):
    def make_model():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, "sigmoid")])
        model.compile("adam", "binary_crossentropy")
        return model

    inputs = np.zeros((8, 3), "float32")
    labels = np.zeros((8, 1), "float32")
    found |= {"make_model": make_model, "KerasTask": loop.KerasTask}
    found |= {"x": inputs, "y": labels, "x_val": inputs, "y_val": labels}


def after_keras_fit(found):
    fit(found["task"], callbacks=callbacks.standard())


def after_commands(found):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(10)])
    assert found["predict"](None, model, (np.zeros((2, 3)), np.ones(2)))["label"].shape == (2,)


def before_export(found, directory):
    of_readme(found, directory)
    task = task_loader.load("task.py:Digits")
    fit(task, run_dir=directory / "run", callbacks=callbacks.standard())
    for name in ("served", "model.onnx", "model.tflite"):
        export(task, directory / "run", directory / name, check=False)


def after_export(found):
    assert found["logits"].shape == (3, 10)


def after_data_loaders(found):
    opened = source(found["data"], BatchOptions(4), "data")
    assert opened.example[0].shape[1:] == (20,)


def before_engines(found, directory):
    found |= {"TrainTask": TrainTask, "StrategyBackend": StrategyBackend}


def after_tracking(found):
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
    assert found["sample"](None, model, (np.zeros((2, 64)), np.ones(2)))["image"].shape == (2, 8, 8)


def after_memory(found):
    net = found["Net"]()
    net.blocks, net.head = [tf.square], tf.identity
    assert net(tf.constant(3.0)) == 9.0


def after_phases(found):
    assert [phase.name for phase in found["FineTune"]().phases()] == ["head", "all"]


PROGRAMS = {
    "callbacks.md": (of_readme, after_callbacks),
    "coming-from/data-loaders.md": (None, after_data_loaders),
    "coming-from/keras-fit.md": (before_keras_fit, after_keras_fit),
    "commands.md": (None, after_commands),
    "engines.md": (before_engines, None),
    "export.md": (before_export, after_export),
    "memory.md": (None, after_memory),
    "phases.md": (None, after_phases),
    "tracking.md": (of_readme, after_tracking),
}
"""The pages whose programs run from top to bottom: what they need, and what is asked of them afterwards."""

ELSEWHERE = {"mathematics.md", "data.md", "tutorial.md", "README.md"}
"""The pages whose programs other tests run."""

NOT_RUN = ("models:/digits/1",)
"""What stands in a program that needs a server: `test_mlflow_extras` loads such a model."""


@pytest.mark.parametrize("page", PROGRAMS)
def test_programs_on_the_pages_run(page, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(callbacks, "standard", functools.partial(callbacks.standard, mlflow=None))
    if "runs/mlflow.db" in (DOCS / page).read_text():
        (tmp_path / "runs").mkdir()
        shutil.copy(request.getfixturevalue("empty_store"), tmp_path / "runs" / "mlflow.db")
    before, after = PROGRAMS[page]
    found = {"keras": keras, "np": np, "os": os, "tf": tf, "loop": loop, "fit": fit, "__name__": "page"}
    if before is not None:
        before(found, tmp_path)
    for number, code in enumerate(blocks(DOCS / page, "python")):
        if not any(text in code for text in NOT_RUN):
            # A file of its own: AutoGraph reads the text of what it converts.
            path = tmp_path / f"page_{number}.py"
            path.write_text(code)
            exec(compile(code, str(path), "exec", dont_inherit=True), found)
    if after is not None:
        after(found)
    sys.modules.pop("task", None)


def test_the_preprocessing_on_the_page_trains(tmp_path, quiet):
    [code] = [code for code in blocks(DOCS / "data.md", "python") if "class OnDevice" in code]
    (tmp_path / "page.py").write_text("import numpy as np, tensorflow as tf\nfrom loop import ArrayData\n" + code)
    task = runpy.run_path(str(tmp_path / "page.py"))["OnDevice"]
    assert fit(task(), callbacks=quiet()).steps == 2


def test_every_page_with_a_program_is_run():
    with_programs = {
        path.relative_to(DOCS).as_posix() if path.is_relative_to(DOCS) else path.name
        for path in PAGES
        if blocks(path, "python")
    }
    assert with_programs == {*PROGRAMS, *ELSEWHERE}


class Number(tf.Module):
    """A model of one weight, which is 0."""

    def __init__(self):
        super().__init__()
        self.w = tf.Variable(0.0)


class Linear(TrainTask):
    """Its gradient is the mean of the inputs, and so is its value."""

    def build_model(self):
        return Number()

    def build_optimizer(self):
        return keras.optimizers.SGD(1.0)

    def train_data(self):
        return ArrayData(np.array([1, 2, 3, 6], "float32"))

    def eval_data(self):
        return ArrayData(np.array([1, 2, 3, 4, 10], "float32"))

    def compute(self, model, batch, training):
        return {"loss": model.w * batch, "value": batch}


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_loop_does_what_the_page_says(replicas, quiet):
    """Three replicas have 1, 1 and 2 of four examples; of the fifth alone, one replica has something."""
    backend = create("mirrored", replicas) if replicas > 1 else "single"
    result = fit(Linear(), batch_size=4, shuffle=False, backend=backend, callbacks=quiet())
    assert result.model.w.numpy() == -3.0
    assert result.metrics["eval_value"] == 4.0


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_code_on_the_pages_is_python(path):
    for code in blocks(path, "python"):
        code = re.sub(r"^%%writefile .*\n", "", code)  # of a cell of a notebook
        compile(code, str(path), "exec")


def test_commands_on_the_pages_can_be_typed():
    """Every `tfloop ...` in a block: the command exists, and takes these options."""
    commands, seen = typer.main.get_group(cli.app).commands, set()
    for path in PAGES:
        for code in blocks(path, "") + blocks(path, "bash") + blocks(path, "sh"):
            for line in code.replace("\\\n", " ").splitlines():
                for part in re.findall(r"(?:^|&& |uv run |srun |\$ )tfloop ([a-z][^&|#>]*)", line):
                    name, *arguments = shlex.split(part)
                    assert name in commands, f"{path}: {line}"
                    if not any(each in ("...", "--help") for each in arguments):
                        command = commands[name]
                        context = command.context_class(command, info_name=name)
                        command.make_parser(context).parse_args(args=arguments)
                    seen.add(name)
    assert {"train", "verify", "chaos", "tune"} <= seen


def test_commands_of_launchers_can_be_typed():
    """The table of docs/launchers.md: what is typed behind a launcher's own words, and files that are named."""
    table = (DOCS / "launchers.md").read_text().partition("\n\nWhere only")[0]
    command = typer.main.get_group(cli.app).commands["train"]
    typed = 0
    for row in re.findall(r"^\| .* \|$", table, re.MULTILINE)[2:]:
        cell = row.replace("\\|", "").split(" | ")[1]
        for code in re.findall(r"`([^`]+)`", cell):
            if code.startswith("kubectl "):
                assert (ROOT / code.split()[-1]).is_file(), row
                typed += 1
                continue
            # A piece alone, such as `--workers 4`, goes behind the target.
            words = code.partition("tfloop train TARGET")[2] if "tfloop" in code else code
            assert "tfloop" not in code or "tfloop train TARGET" in code, row
            context = command.context_class(command, info_name="train")
            command.make_parser(context).parse_args(args=["TARGET", *shlex.split(words.rstrip("'\""))])
            typed += 1
    assert typed >= 16


def test_every_yes_of_ours_is_a_test_and_every_yes_of_others_has_its_source():
    text = (DOCS / "features.md").read_text()
    rows = re.findall(r"^\| (\w[^|]*) \| (.*) \|$", text, re.MULTILINE)
    assert len(rows) > 30
    sources, linked = dict(re.findall(r"^\[([\w-]+)\]: (https://\S+)$", text, re.MULTILINE)), set()
    for what, cells in rows:
        ours, *others = cells.split(" | ")
        tests = re.findall(r"\[[^]]+\]\(\.\./(tests/[\w/]*test_\w+\.py)#(test_\w+)\)", ours)
        assert tests or ours == "no", what
        for file, test in tests:
            assert f"\ndef {test}(" in (ROOT / file).read_text(), what
        assert len(others) == 6, what
        for other in others:
            link = re.fullmatch(r"\[[^]]+\]\[([\w-]+)\]", other)
            assert link or other in ("no", "?", "yours", "one device", "PyTorch"), (what, other)
            linked |= {link[1]} if link else set()
    assert linked == set(sources)


def test_the_site_is_built_without_a_warning_and_fetches_nothing(tmp_path):
    pytest.importorskip("material", reason="MkDocs Material is not installed: uv sync --group docs")
    done = subprocess.run(  # not --quiet, with which a strict build passes warnings over
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        capture_output=True, text=True, timeout=200, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for package in (loop, callbacks):
        page = (tmp_path / "api" / package.__name__ / "index.html").read_text()
        documented = {name.split(".")[-1] for name in re.findall(r'<h3 id="([\w.]+)"', page)}
        assert set(package.__all__) <= documented
    shown = words_of(tmp_path / "api" / "loop" / "index.html")
    assert "batch_size:int|None=32,backend:str|Backend|None=" in shown  # the default, not the None of the code
    assert "defer_errors" not in shown  # an internal of Run
    every_option_is_shown(words_of(tmp_path / "api" / "command-line" / "index.html"))
    separator = json.loads((tmp_path / "search" / "search_index.json").read_text())["config"]["separator"]
    assert re.split(separator, "callbacks.ReduceOnPlateau") == ["callbacks", "Reduce", "On", "Plateau"]
    for programs in COMING_FROM.glob("*/ours.py"):
        page = (tmp_path / "coming-from" / programs.parent.name / "index.html").read_text()
        assert page.count("load_digits") == 4, "both programs, where each imports and calls it"
    front = (tmp_path / "index.html").read_text()
    assert not re.findall(r'<(?:link|script|img)[^>]*(?:href|src)="(?:https?:)?//', front)


def words_of(page):
    """The text of a page without tags and spaces."""
    return re.sub(r"\s", "", html.unescape(re.sub(r"<[^>]+>", "", page.read_text())))


def every_option_is_shown(page):
    """All commands with their visible options, from the typer app."""
    for name, command in typer.main.get_group(cli.app).commands.items():
        for path, each in [
            (name, command),
            *((f"{name}{sub}", it) for sub, it in getattr(command, "commands", {}).items()),
        ]:
            assert f"tfloop{path}".replace(" ", "") in page
            for parameter in each.params:
                if not getattr(parameter, "hidden", False) and parameter.param_type_name == "option":
                    assert max(parameter.opts, key=len) in page, (path, parameter.name)


def test_the_pictures_are_those_of_what_was_measured(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    for name, picture in importlib.import_module("figures").drawings().items():
        assert (DOCS / "images" / name).read_text() == picture, f"{name}: python docs/figures.py --draw"


def test_addresses_that_lead_nowhere_are_found(tmp_path):
    """What fails the build of the site: `mkdocs build --strict` calls it for all pages."""
    pytest.importorskip("mkdocs", reason="MkDocs is not installed: uv sync --group docs")
    broken = runpy.run_path(str(DOCS / "hooks.py"))["broken"]
    (tmp_path / "page").mkdir()
    (tmp_path / "a b.png").touch()
    (tmp_path / "index.html").write_text('<h2 id="here"></h2><a href="page/#there">&lt;img src="no.png"&gt;</a>')
    good = ('a href="../#here"', 'img src="../a%20b.png"', 'a href="#there"', 'a href="https://h/x"', 'a href="/page/"')
    bad = ('img src="a b.png"', 'a href="../#there"', 'a href="#here"', 'source srcset="x.png"', 'a href="../../page/"')
    lines = [*good, *bad]
    (tmp_path / "page" / "index.html").write_text('<h1 id="there"></h1>' + "".join(f"<{each}>" for each in lines))
    addresses = [each.split('"')[1] for each in bad]
    assert [text.split()[1] for text in broken(tmp_path)] == [each.split()[0] for each in addresses]


def test_targets_on_the_pages_can_be_trained():
    """The command that a page names finds its task in the file."""
    for path in sorted(COMING_FROM.glob("*/ours.py")):
        task_loader.check(f"{path}:Digits")
