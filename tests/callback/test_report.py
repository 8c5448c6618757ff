"""The pages of one run and of several: what they show, nothing foreign gets in, and browsers show them."""

import asyncio
import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import sys
from html.parser import HTMLParser
from pathlib import Path

import aiohttp
import mlflow
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import callbacks
import cli
from callbacks.run_record import comparison, record, report
from callbacks.run_record import page as pages_
from callbacks.run_record.charts import thinned
from callbacks.run_record.record import Checkpoint, Fault, Record
from loop import fit
from tests.conftest import ROOT
from tests.tasks import Plain

VOID = {"meta", "br", "input"}
TAGS = VOID | set(
    re.findall(
        r"\w+",
        "html head title style body main header footer section figure figcaption div span p h1 h2 b i strong small "
        "code dl dt dd table thead tbody tr th td script svg text line path circle rect label button ul li",
    )
)
ATTRIBUTES = set(
    re.findall(
        r"\S+",
        "lang charset name content http-equiv class role aria-label aria-hidden data-value data-chart width height "
        "viewbox preserveaspectratio d x y x1 x2 y1 y2 cx cy r dy text-anchor hidden id type min max step value",
    )
)


class Page(HTMLParser):
    """The texts of a page as a browser shows them; any element that isn't ours is an error."""

    def __init__(self, text):
        super().__init__()
        self.open, self.texts, self.scripts, self.charts = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        assert tag in TAGS, tag
        for name, value in attributes:
            assert name in ATTRIBUTES, (tag, name, value)
            if name == "data-chart":
                self.charts.append(json.loads(value))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        (self.scripts if self.open[-1:] == ["script"] else self.texts).append(data.strip())

    def handle_comment(self, data):
        raise AssertionError(data)

    handle_pi = unknown_decl = handle_comment


@pytest.fixture
def command(monkeypatch, capfd):
    """Runs a command line in this process; gives exit code, and what it wrote."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["tfloop", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        output = capfd.readouterr()
        return ended.value.code or 0, output.out + output.err

    return run


@pytest.fixture(scope="module")
def lived(tmp_path_factory, empty_store):
    """A run of two attempts, of which the second one is delivered to a store of sqlite."""
    place = tmp_path_factory.mktemp("lived")
    database = shutil.copy(empty_store, place / "mlflow.db")
    for epochs, tracker in ((2, None), (4, callbacks.MLflowTracker(f"sqlite:///{database}", "own"))):
        chosen = callbacks.standard(mlflow=tracker, progress=None)
        result = fit(Plain(), epochs=epochs, batch_size=20, callbacks=chosen, run_dir=place / "run")
    return result, database


def artifacts(database, tmp_path):
    """The reports of the only run in a store."""
    client = mlflow.MlflowClient(f"sqlite:///{database}")
    [run] = client.search_runs([client.get_experiment_by_name("own").experiment_id])
    names = [file.path for file in client.list_artifacts(run.info.run_id)]
    assert sorted(names) == ["journal.jsonl", "report.html", "run.json"]
    return Path(client.download_artifacts(run.info.run_id, "report.html", str(tmp_path))).read_text()


def test_the_page_of_a_run_has_its_numbers_and_is_in_mlflow(lived, tmp_path, command, empty_store):
    result, database = lived
    text = (result.run_dir / report.NAME).read_text()
    page = Page(text)
    for name, value in result.metrics.items():
        assert f"{value:.4g}" in page.texts, name
    best = min(row["eval_loss"] for row in result.history)
    for told in ("Plain", "finished", "best eval_loss", f"{best:.4g}", f"{result.steps:,}", "in 2 attempts", "single"):
        assert told in page.texts, told
    for fault in record.read(result.run_dir).faults:
        assert fault.text in page.texts
    assert "went on from step-00000012" in page.texts
    assert [each.name for each in record.read(result.run_dir).checkpoints if each.name not in page.texts] == []
    assert {"data", "callbacks", "saving"} <= {each for text in page.texts for each in re.findall(r"[a-z-]+", text)}
    assert artifacts(database, tmp_path) == text  # it was delivered, and after the last line of the journal
    [loss] = [chart for chart in page.charts if {"train", "held"} <= {line["kind"] for line in chart["lines"]}][:1]
    for line in loss["lines"]:  # the values at the pointer: training and evaluation of a metric are in one chart
        name = {"train": "loss", "held": "eval_loss"}.get(line["kind"])
        if name:
            assert line["steps"][-1] == result.steps
            assert line["values"][-1] == pytest.approx(result.metrics[name], rel=1e-4)
    row = page.texts[page.texts.index("eval_loss", page.texts.index("at step")) :][1:5]
    evaluated = [each["eval_loss"] for each in result.history]
    steps = {each["eval_loss"]: each["step"] for each in result.history}
    assert row == [f"{evaluated[0]:.4g}", f"{evaluated[-1]:.4g}", f"{best:.4g}", f"{steps[best]:,}"]

    (result.run_dir / report.NAME).unlink()
    code, output = command("report", result.run_dir)
    assert (code, output.splitlines()[-1]) == (0, f"wrote {result.run_dir / report.NAME}")
    again = (result.run_dir / report.NAME).read_text()
    assert again.partition("<footer>")[0] == text.partition("<footer>")[0]
    # As if the store had been down when the run ended.
    other = shutil.copy(empty_store, tmp_path / "other.db")
    for _ in range(2):
        assert command("sync", result.run_dir, "--track", f"sqlite:///{other}")[0] == 0
        assert artifacts(other, tmp_path) == again


class Ends(callbacks.Callback):
    every = 1

    def __init__(self, act):
        self.act = act

    def on_steps_end(self, run, metrics):
        if run.progress.step == 3:
            self.act()


def test_runs_that_fail_or_are_stopped_have_one_too_and_none_fails_for_it(tmp_path, quiet, capfd):
    def fail():
        raise RuntimeError("lost <the> way to https://user:hunter22@host/")

    with pytest.raises(RuntimeError):
        fit(Plain(), batch_size=20, callbacks=quiet() + [Ends(fail)], run_dir=tmp_path / "failed")
    page = Page((tmp_path / "failed" / report.NAME).read_text())
    assert {"failed", "RuntimeError: lost <the> way to https://***@host/"} <= set(page.texts)
    ends = Ends(lambda: os.kill(os.getpid(), signal.SIGTERM))
    result = fit(Plain(), batch_size=20, callbacks=quiet() + [ends], run_dir=tmp_path / "preempted")
    assert result.status == "preempted"
    assert {"interrupted", "stopped by a signal"} <= set(Page((tmp_path / "preempted" / report.NAME).read_text()).texts)

    (tmp_path / "run" / report.NAME).mkdir(parents=True)
    result = fit(Plain(), batch_size=20, callbacks=quiet(), run_dir=tmp_path / "run")
    assert result.status == "finished"
    assert "warning: report.html could not be written (IsADirectoryError: " in capfd.readouterr().err
    result = fit(Plain(), batch_size=20, callbacks=quiet(report=None), run_dir=tmp_path / "none")
    assert not (result.run_dir / report.NAME).exists()


NASTY = (
    "</script><script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "</style>",
    "<!--",
    "&lt;b&gt;",
    "\udcff",
    "]]>",
)
texts = st.text(max_size=30) | st.sampled_from(NASTY)
numbers = st.floats() | st.sampled_from([0.0, 1e308, -1e308, 5e-324, math.nan, math.inf])
steps = st.integers(0, 2**53)
curves = st.dictionaries(texts, st.lists(st.tuples(steps, numbers), max_size=6).map(sorted), max_size=4)
records = st.builds(
    Record, path=texts.map(lambda text: Path("runs", text.replace("\0", ""))), name=texts, task=texts, target=texts,
    replicas=st.none() | steps, workers=st.none() | steps, status=st.sampled_from(["", *record.STATUSES]), reason=texts,
    started=st.none() | st.floats(0, 1e11), seconds=st.floats(0, 1e11), attempts=st.integers(0, 3), steps=steps,
    total_steps=st.none() | steps, hyperparameters=st.dictionaries(texts, texts | numbers | st.lists(texts)),
    options=st.dictionaries(texts, st.none() | texts), versions=st.dictionaries(texts, texts), backend=texts,
    curves=curves, speed=st.lists(st.tuples(steps, numbers), max_size=4),
    clock=st.lists(st.tuples(steps, st.floats(0, 1e11)), max_size=6), verdict=st.lists(texts, max_size=4),
    checkpoints=st.lists(st.builds(Checkpoint, texts, steps, texts, steps, st.floats(0, 1e11)), max_size=2),
    split=st.dictionaries(st.sampled_from(["data", "compute"]) | texts, st.floats(0, 1e308)),
    faults=st.lists(st.builds(Fault, st.floats(0, 1e11), steps, texts), max_size=3),
)  # fmt: skip


def hostile(text):
    pairs = {text: text, "nested": [text, {text: text}]}
    return Record(
        Path("runs", text), text, task=text, target=text, backend=text, reason=text, status="failed", total_steps=3,
        hyperparameters=pairs, options=pairs, versions={text: text}, machine=pairs, verdict=[text] * 4,
        curves={text: [(1, math.nan), (2, 1.0)], "eval_" + text: [(1, 1.0)]}, ranks=[{text: 1.0}, {"data": 1.0}],
        checkpoints=[Checkpoint(text, 1, text, 1, 0.0)], faults=[Fault(0.0, 1, text)], split={text: 1.0},
    )  # fmt: skip


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(records)
@example(Record(Path("runs/x"), "x"))
@example(hostile(NASTY[0]))
@example(hostile(NASTY[1]))
@example(hostile("".join(NASTY)))
def test_no_text_or_number_breaks_out_or_breaks_it(of):
    metrics = [name.removeprefix("step/").removeprefix("eval_") for name in of.curves]
    pages = {report.html(of): [of.name, *metrics, *(each.text for each in of.faults)]}
    pages[comparison.html([of, Record(Path("runs/other"), "other"), of], live=True)] = [of.name, *of.curves]
    for text, named in pages.items():
        page = Page(text)
        assert page.scripts[-1] == pages_._asset("charts.js").strip()
        for name in named:
            shown = name.encode("utf-8", "replace").decode().strip()
            assert shown in page.texts or not shown or "@" in shown, name
        assert not re.search(r"(?i)\b(nan|inf)\b", "".join(re.findall(r' (?:d|[cxy][12xy]?|width)="[^"]*"', text)))


def test_secrets_are_not_in_it(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "key-of-the-environment")
    of = Record(
        Path("runs/x"), "x", hyperparameters={"password": "hidden-1", "deep": {"token": "hidden-2"}}, status="failed",
        options={"resume": "https://user:hidden-3@host/x"}, faults=[Fault(0.0, 1, "bad key-of-the-environment")],
        reason="sent to http://hidden-4@host",
    )  # fmt: skip
    text = report.html(of) + comparison.html([of, of])
    assert not re.findall(r"hidden-\d|key-of-the-environment", text)
    assert text.count("***") >= 5


numbered = st.lists(numbers, max_size=300).map(lambda values: list(enumerate(values)))


@settings(max_examples=60, deadline=None)
@given(numbered, st.integers(3, 60))
def test_thinned_points_keep_the_ends_the_extremes_and_what_is_not_finite(points, most):
    kept = thinned(points, most)
    assert list(kept) == [point for point in points if point in kept]  # in order, and none is new
    assert len(kept) <= most + 5
    if points:
        assert (kept[0], kept[-1]) == (points[0], points[-1])
        values, all_values = ([value for _, value in some if abs(value) < 1e100] for some in (kept, points))
        if all_values:
            assert (min(values), max(values)) == (min(all_values), max(all_values))
        assert any(not abs(value) < 1e100 for _, value in kept) == any(not abs(value) < 1e100 for _, value in points)


@pytest.mark.parametrize(("count", "last"), [(1, 200_000), (30, 20_000)])  # of metrics with three curves each; steps
def test_a_page_of_very_many_steps_is_light_and_keeps_every_extreme(count, last):
    extremes = {last // 5 * 3: 50.5, last // 2 - 1: -7.25}
    curves = {"loss": [(step, extremes.get(step, 1 / step)) for step in range(1, last + 1)]}
    noisy = [(step, (step * 7919 % 10_007) / 9973) for step in range(1, last + 1)]
    for index in range(count):
        curves |= dict.fromkeys((f"metric{index}", f"step/metric{index}", f"eval_metric{index}"), noisy)
    of = Record(Path("runs/x"), "x", curves=curves, speed=noisy, clock=noisy, steps=last)
    for text in (report.html(of), comparison.html([of] * comparison.MOST)):
        assert len(text.encode()) < 500_000
        # In what the script draws, and in what is drawn already.
        assert any({50.5, -7.25} <= set(line["values"]) for chart in Page(text).charts for line in chart["lines"])


def test_a_page_of_very_many_metrics_says_what_it_leaves_out_and_keeps_the_first_ones():
    curves = {"loss": [(1, 2.0)], "eval_loss": [(1, 0.125)]}
    few = Record(Path("runs/x"), "x", curves=dict(curves))
    for index in range(500):
        curves[f"metric{index:03}"] = [(1, 1.0)]
    faults = [Fault(0.0, step, f"fault {step}") for step in range(500)]
    many = Record(Path("runs/x"), "x", curves=curves, faults=faults)
    for text, left_out in ((report.html(many), 501 - 24), (comparison.html([many, many]), 502 - 24)):
        page = Page(text)
        assert len(page.charts) == 24
        assert f"Metrics without a chart here: {left_out}. Their values are in the table." in page.texts
        assert "eval_loss" in page.texts
        assert re.search(r">0\.125", text)
        assert "102 more are in the run directory." in page.texts
    texts = Page(report.html(many)).texts
    assert "fault 499" in texts  # of what happened, the newest
    assert "fault 0" not in texts
    assert "without a chart" not in report.html(few) + comparison.html([few, few])


def test_every_line_of_a_long_journal_counts(tmp_path):
    def line(event, step, **metrics):
        return json.dumps({"time": 1.7e9 + step, "event": event, "step": step, "epoch": 0, "metrics": metrics}) + "\n"

    reader = record.Reader(tmp_path)
    assert reader.read().curves == {}
    with (tmp_path / "journal.jsonl").open("w") as file:
        file.write(line("restore", 0) + line("fit_start", 0))
        for step in range(1, 10_001):
            file.write(line("steps_end", step, loss=1 / step, norm=99.5 if step == 5003 else 1.0))
            if step % 1000 == 0:
                file.write(line("eval_end", step, eval_loss=abs(step - 5000)) + line("epoch_end", step, loss=1 / step))
            if step % 3000 == 0:
                file.flush()
                reader.read()
        file.write(line("fit_end", 10_000))
    whole = record.read(tmp_path)
    assert reader.read() == whole == reader.read()  # read piece by piece, it is the same
    assert len(whole.curves["step/loss"]) == 10_000
    assert whole.best("eval_loss") == (5000, 0.0)
    assert "99.5" in report.html(whole)


def test_runs_are_compared_on_one_page(lived, tmp_path, command):
    first = lived[0].run_dir
    second = fit(
        Plain(), epochs=3, batch_size=30, callbacks=callbacks.standard(mlflow=None, progress=None),
        run_dir=tmp_path / "runs" / "other",
    )  # fmt: skip
    code, output = command("report", first, "other")
    assert (code, output) == (0, "wrote comparison.html\n")
    page = Page(Path("comparison.html").read_text())
    assert {"2 runs", "run", "other", "eval_loss", "option batch_size", "20", "30"} <= set(page.texts)
    best = min(row["eval_loss"] for row in second.history)
    assert any(text.startswith(f"{best:.4g}") for text in page.texts)
    assert sum(text.partition("\n")[0].endswith(" *") for text in page.texts) >= 1
    for chart in page.charts:
        assert [line["kind"] for line in chart["lines"]] == ["run0", "run1"]
    assert command("report", first, "other", "two.html")[0] == 0  # as for one run
    assert command("report", first, "other", "--out", "two.html")[0] == 0
    assert (
        Path("two.html").read_text().partition("<footer>")[0]
        == Path("comparison.html").read_text().partition("<footer>")[0]
    )
    for arguments, told in (
        ((first, "other", first), f"{first} and {first} are the same run"),
        ((first, "othr"), "did you mean 'other'?"),
        ([first] * 13, "give at most 12"),
    ):
        code, output = command("report", *arguments)
        assert (code, output.count("\n")) == (2, 1), output
        assert told in output


def test_bad_input_is_one_line(lived, tmp_path, command):
    directory = lived[0].run_dir
    (tmp_path / "notes.html").write_text("mine")
    for arguments, told in (
        ((tmp_path,), "isn't a run directory"),
        ((tmp_path / "nowhere",), "isn't a run directory"),
        ((directory, tmp_path / "notes.html"), "exists already, and isn't a report"),
        ((directory, "--out", tmp_path), "it is a directory"),
        ((directory, tmp_path), "isn't a run directory"),
        ((directory, tmp_path / "no" / "way.html"), "No such file or directory"),
    ):
        code, output = command("report", *arguments)
        assert (code, output.count("\n")) == (2, 1), output
        assert told in output
    assert (tmp_path / "notes.html").read_text() == "mine"
    assert command("report", directory, tmp_path / "out.html")[0] == 0
    assert command("report", directory, tmp_path / "out.html")[0] == 0  # a report may be overwritten


def browser_module():
    spec = importlib.util.spec_from_file_location("browser", ROOT / "docs" / "browser.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def look_with_chromium(tmp_path, look):
    """Runs `look(tab)` with a page of a browser."""
    pictures = browser_module()
    chromium = next(filter(None, map(shutil.which, pictures.CHROMIUM)), None)
    if chromium is None:
        pytest.skip("there is no Chromium here")

    async def opened():
        profile = tmp_path / "chromium"
        browser = [chromium, *pictures.FLAGS, f"--user-data-dir={profile}", "about:blank"]
        with pictures.started(browser, tmp_path):
            async with aiohttp.ClientSession() as http, pictures.page(http, profile) as tab:
                await tab.listen()
                await look(tab)

    with contextlib.closing(asyncio.new_event_loop()) as loop:
        loop.run_until_complete(opened())


async def drag(tab):
    """Draws the middle half of the first chart's width with the mouse."""
    box = await tab.value(
        "chart = document.querySelector('.chart'), chart.scrollIntoView(), box = chart.getBoundingClientRect(),"
        "[box.left, box.top, box.width]"
    )
    for kind, at in (("mousePressed", 0.25), ("mouseMoved", 0.5), ("mouseMoved", 0.75), ("mouseReleased", 0.75)):
        await tab.call(
            "Input.dispatchMouseEvent", type=kind, x=box[0] + at * box[2], y=box[1] + 50, button="left", buttons=1,
            clickCount=1,
        )  # fmt: skip


CUT = """
tops = range => new Set([...range.getClientRects()].map(box => Math.round(box.top))).size,
lines = each => (range = document.createRange(), range.selectNodeContents(each), tops(range)),
[...document.querySelectorAll('.figures td:not(:first-child), .checkpoints td')].filter(
    each => lines(each) > each.textContent.split('\\n').length
).concat([...document.querySelectorAll('.key b')].filter(
    each => each.getBoundingClientRect().right > each.closest('.keys').getBoundingClientRect().right + 1
)).map(each => each.textContent)
"""
"""The numbers that are broken into two lines, or that stand beyond the edge."""


async def looked_at(tab, path, bad_steps):
    """A page in light and dark, wide and narrow, with what a pointer may do there."""
    seen = []
    for theme, width in (("light", 1100), ("dark", 1100), ("dark", 360)):
        await tab.window(width, 800, 1.0, theme)
        await tab.open(path.as_uri(), ["Curves"])
        assert await tab.value("document.documentElement.scrollWidth") <= width
        seen.append(await tab.value("getComputedStyle(document.body).backgroundColor"))
        assert await tab.value(CUT) == []
        assert await tab.value("document.querySelector('figure path').getTotalLength() > 300")
        await tab.value(
            "chart = document.querySelector('.chart'), box = chart.getBoundingClientRect(),"
            "chart.onpointermove({clientX: box.left})"
        )
        assert await tab.value("document.querySelector('.at').textContent") != f"step {bad_steps:,}"
        await tab.value("chart.onpointerleave()")
        assert await tab.value("document.querySelectorAll('.chart.on').length") == 0
    assert seen == ["rgb(245, 246, 248)", "rgb(13, 16, 22)", "rgb(13, 16, 22)"]
    drawn = "[...document.querySelectorAll('.chart path, .chart text')].map(each => each.outerHTML).join()"
    as_it_came = await tab.value(drawn)
    first, last = await tab.value("plot = [...plots.values()][0], [plot.first, plot.last]")
    await drag(tab)
    width = last - first
    zoomed = await tab.value("view.range")
    assert zoomed == pytest.approx([first + width / 4, first + 3 * width / 4], rel=0.01)
    assert await tab.value("document.querySelector('.tools button').hidden") is False
    await tab.value(
        "slider = document.querySelector('.tools input'), slider.value = 0.5,slider.dispatchEvent(new Event('input'))"
    )
    assert await tab.value("document.querySelectorAll('path.raw').length > 0")
    assert not await tab.value("[...document.querySelectorAll('path')].some(path => /NaN|Inf/.test(path.outerHTML))")
    await tab.value(
        "document.querySelector('.tools button').click(), slider.value = 0,slider.dispatchEvent(new Event('input'))"
    )
    assert await tab.value(drawn) == as_it_came
    assert await tab.value("smoothed([1, 'nan', 3], 0.5).join()") == f"1,nan,{(0.25 + 1.5) / 0.75}"


def test_chromium_shows_them_in_light_and_dark_without_an_error(lived, tmp_path):
    of = record.read(lived[0].run_dir)
    bad = dataclasses.replace(
        of, status="failed", task=NASTY[0], name="x" * 200,
        curves={
            "loss": [(1, 1.0), (2, 0.5), (3, math.nan), (4, 0.1)], NASTY[1]: [(1, 2.0)], "eval_loss": [(1, 1.2345e-30)],
        },
    )  # fmt: skip
    (tmp_path / "bad.html").write_text(report.html(bad))
    (tmp_path / "both.html").write_text(comparison.html([of, bad]))

    async def look(tab):
        for path in (lived[0].run_dir / report.NAME, tmp_path / "bad.html", tmp_path / "both.html"):
            await looked_at(tab, path, bad.steps)
        assert tab.errors == []
        await tab.value("document.body.append(Object.assign(new Image(), {src: 'http://127.0.0.1:9/'}))")
        async with asyncio.timeout(60):  # it is refused, and the browser reports that
            while not any("Content Security Policy" in error for error in tab.errors):
                await tab.value("1")

    look_with_chromium(tmp_path, look)
