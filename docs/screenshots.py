"""Makes the pictures in docs/images: trains, opens `tfloop ui` and a report in Chromium, and takes screenshots.

Run it as `uv run python docs/screenshots.py`; it takes a few minutes and leaves nothing behind but the pictures.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
from browser import CHROMIUM, FLAGS, IMAGES, ROOT, ScreenshotError, Tab, page, started
from shown_pages import as_page, executed, in_terminal

TRAIN = ("train", "digits", "--epochs", "6", "--seed", "1", "--backend")
BACKENDS = {  # with a colour each: those that MLflow draws from the run's id may be hard to tell apart
    ("single",): "#1f77b4",
    ("mirrored", "--workers", "2"): "#ff7f0e",
    ("horovod", "--workers", "2"): "#2ca02c",
    ("multiworker", "--workers", "2"): "#9467bd",
}
RUN = "charlm"  # whose report, and whose picture in the terminal, is taken; the second command goes on from the first
TERMINALS = {  # what is typed, and the text behind which the picture is taken; "": at the end
    "terminal": (("runs", "show", RUN, "--root", "."), ""),
    "help": (("--help",), ""),
    "training": (("train", "digits", "--epochs", "20", "--workers", "2", "--track", "off"), "epoch 8/20"),
}
LONG = tuple(
    ("train", "charlm", *f"--workers 2 --set characters=150000 --profile {more} --run-dir {RUN} --track off".split())
    for more in ("10:12 --epochs 2", "200:202 --epochs 6")
)
MORE = (  # once the pictures of the four runs are taken, into the same store; a trial of the sweep fails
    "sweep digits --grid learning_rate=1e-3,3e-3,1e-2,1e30 --epochs 6 --seed 1 --sweep-dir swept",
    "train digits --epochs 6 --seed 1 --set hidden=128 --register digits",
    "report swept/trial-000 swept/trial-001 swept/trial-002 --out several.html",
)
CURVES = ("loss", "accuracy")
"""The charts: each of them has the curve of the training and, with `eval_`, that of the evaluation."""
TABLE = ("metrics.eval_loss", "metrics.eval_accuracy", "metrics.examples_per_second", "params.learning_rate")
NOTEBOOK = "notebook.html"  # the page that shows the executed example
PARENT = "mlflow.parentRunId"
WIDTH, SCALE = 1280, 1.5
"""Of the window, in CSS pixels, and pixels of the picture for each of them: still sharp when a README shrinks it."""
TRAIN_WAIT, SERVER_WAIT = 600.0, 180.0  # seconds; MLflow's server needs a minute on a slow machine


def main() -> int:
    """Trains, serves and takes the pictures; returns the exit code."""
    chromium = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if chromium is None:
        print("screenshots: no Chromium found: install it, e.g. with `apt-get install chromium`", file=sys.stderr)
        return 2
    tfloop = Path(sys.executable).with_name("tfloop")
    if not tfloop.exists():
        print(
            "screenshots: tfloop is not installed in this Python: run `uv sync`, then `uv run python`", file=sys.stderr
        )
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended, as with Ctrl-C
    with tempfile.TemporaryDirectory(prefix="tfloop-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        try:
            for command in [*([*TRAIN, *backend] for backend in BACKENDS), *LONG]:
                train([str(tfloop), *command], directory)
            for name, (typed, until) in TERMINALS.items():
                shown = in_terminal([str(tfloop), *typed], directory, until)
                (directory / f"{name}.html").write_text(as_page(" ".join(["tfloop", *typed]), shown))
            (directory / NOTEBOOK).write_text(executed(ROOT / "examples" / "notebook.ipynb", directory))
            port = free_port()
            print(f"MLflow UI on port {port}", file=sys.stderr)
            profile = directory / "chromium"
            browser = [chromium, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
            with started([str(tfloop), "ui", "--port", str(port)], directory), started(browser, directory):
                asyncio.run(take_pictures(f"http://127.0.0.1:{port}", profile, directory, str(tfloop)))
        except (ScreenshotError, aiohttp.ClientError, TimeoutError) as error:
            print(f"screenshots: {error or 'no answer'}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    return 0


def train(command: list[str], directory: Path) -> None:
    """Runs one training, the same way as typed in a shell."""
    print("tfloop", *command[1:], file=sys.stderr)
    with started(command, directory) as process:
        try:
            code = process.wait(timeout=TRAIN_WAIT)
        except subprocess.TimeoutExpired:
            raise ScreenshotError(f"the training did not end within {TRAIN_WAIT:.0f} s") from None
        if code:
            tail = "\n".join((directory / "tfloop.log").read_text(errors="replace").splitlines()[-20:])
            raise ScreenshotError(f"the training ended with exit code {code}:\n{tail}")


def free_port() -> int:
    """A free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def take_pictures(server: str, profile: Path, directory: Path, tfloop: str) -> None:
    """All pictures, once the server and the browser answer."""
    async with aiohttp.ClientSession() as http:
        runs = await logged_runs(http, server)
        experiment = runs[0]["info"]["experiment_id"]
        for run, colour in zip(runs, BACKENDS.values(), strict=True):
            tag = {"run_id": run["info"]["run_id"], "key": "mlflow.runColor", "value": colour}
            await ask(http, f"{server}/api/2.0/mlflow/runs/set-tag", tag)
        async with page(http, profile) as tab:
            rows = (
                2
                + sum("system/" not in metric["key"] for metric in runs[0]["data"]["metrics"])
                + len(runs[0]["data"]["params"])
            )  # 2: the headings
            table = 100 + 33 * rows
            await tab.remember(preferences(experiment, runs, table))
            address = f"{server}/#/experiments/{experiment}/runs"
            drawn = f"document.querySelectorAll('.js-plotly-plot .scatterlayer .trace').length >= {len(CURVES)}"
            await tab.window(WIDTH, table + 686, SCALE)
            await tab.picture(
                f"{address}?workflowType=machine_learning&compareRunsMode=CHART&orderByAsc=true",
                IMAGES / "mlflow-runs.png",
                texts=[
                    *CURVES,
                    *(entry["key"] for entry in runs[0]["data"]["params"]),
                    *(names[0] for names in BACKENDS),
                ],
                ready=drawn,
            )
            shown = next(run for run in runs if tag_of(run, "backend") == "horovod")
            await tab.window(WIDTH, 960, SCALE)
            await tab.picture(
                f"{address}/{shown['info']['run_id']}/model-metrics?workflowType=machine_learning",
                IMAGES / "mlflow-run.png",
                texts=[*CURVES, shown["info"]["run_name"]],
                ready=drawn,
            )
            await pictures_of_a_run(tab, directory)
            for command in MORE:
                train([tfloop, *command.split()], directory)
            await pictures_of_a_sweep(http, tab, server, experiment)
            await pictures_of_pages(tab, directory)


async def pictures_of_a_sweep(http: aiohttp.ClientSession, tab: Tab, server: str, experiment: str) -> None:
    """Of the table of all runs, of the run of the sweep, of the trial that failed, and of the registered model."""
    runs = await all_runs(http, server)
    sweep = next(run["info"] for run in runs if any(tag_of(trial, PARENT) == run["info"]["run_id"] for trial in runs))
    failed = next(run["info"] for run in runs if run["info"]["status"] == "FAILED")
    columns = [f"{kind}.`{name}`" for kind, name in (column.split(".") for column in TABLE)]
    state = {"selectedColumns": columns, "runsExpanded": {sweep["run_id"]: True}, "runListHidden": False}
    await tab.remember({ui_state(experiment): json.dumps(state)})
    pages = {
        "table": (
            f"{experiment}/runs?workflowType=machine_learning&compareRunsMode=TABLE",
            ["eval_loss", "learning_rate"],
        ),
        "sweep": (f"{experiment}/runs/{sweep['run_id']}?workflowType=machine_learning", ["best:"]),
        "failed": (f"{experiment}/runs/{failed['run_id']}?workflowType=machine_learning", ["Failed at step"]),
    }
    for name, (address, texts) in pages.items():
        # The page of a run has its description, metrics and parameters one below the other.
        await tab.window(WIDTH, 560 if name == "table" else 860, SCALE)
        await tab.picture(f"{server}/#/experiments/{address}", IMAGES / f"mlflow-{name}.png", texts)
    await tab.window(WIDTH, 560, SCALE)
    registered = f"{server}/#/models/digits?workflowType=machine_learning"
    await tab.picture(registered, IMAGES / "mlflow-model.png", ["Version 1"])


async def pictures_of_pages(tab: Tab, directory: Path) -> None:
    """Of the report of several runs, and of the executed notebook, as high as they are."""
    for name, width, image, text in (
        ("several.html", 1100, "report-several.png", "What differs"),
        (NOTEBOOK, 956, "notebook.png", "differs"),
    ):
        address = (directory / name).as_uri()
        await tab.window(width, 800, 1.25)
        await tab.open(address, [text])
        await tab.window(width, await tab.value("document.documentElement.scrollHeight"), 1.25)
        await tab.picture(address, IMAGES / image, [text])


async def pictures_of_a_run(tab: Tab, directory: Path) -> None:
    """Of its report, and of what a terminal shows."""
    for theme in ("light", "dark"):
        report = (directory / RUN / "report.html").as_uri()
        await tab.window(1100, 1000, 1.25, theme)
        await tab.open(report, ["Curves", "Where the time went"])
        above = await tab.value("document.querySelectorAll('section')[1].getBoundingClientRect().bottom")
        await tab.window(1100, round(above) + 20, 1.25, theme)
        await tab.picture(report, IMAGES / f"report-{theme}.png", texts=["Curves", "Where the time went"])
    for name in TERMINALS:
        page = (directory / f"{name}.html").as_uri()
        await tab.window(1100, 800)
        await tab.open(page)
        await tab.window(*await tab.value("[document.body.offsetWidth, document.body.offsetHeight]"), 1.1)
        await tab.picture(page, IMAGES / f"{name}.png", texts=["tfloop"])


async def all_runs(http: aiohttp.ClientSession, server: str) -> list[dict[str, Any]]:
    """The runs as MLflow has them, the oldest first."""
    found: dict[str, Any] | None = None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SERVER_WAIT):
            while found is None:
                with contextlib.suppress(aiohttp.ClientError):
                    found = await ask(http, f"{server}/api/2.0/mlflow/experiments/search", {"max_results": 100})
                await asyncio.sleep(0.5)
    if found is None:
        raise ScreenshotError(f"`tfloop ui` did not answer within {SERVER_WAIT:.0f} s")
    query = {
        "experiment_ids": [experiment["experiment_id"] for experiment in found["experiments"]],
        "order_by": ["attributes.start_time ASC"],
    }
    runs: list[dict[str, Any]] = (await ask(http, f"{server}/api/2.0/mlflow/runs/search", query)).get("runs", [])
    return runs


async def logged_runs(http: aiohttp.ClientSession, server: str) -> list[dict[str, Any]]:
    """The runs of the backends; there must be one for each command."""
    runs = await all_runs(http, server)
    wanted = [backend[0] for backend in BACKENDS]
    backends = [tag_of(run, "backend") for run in runs if run["info"]["status"] == "FINISHED"]
    if backends != wanted:
        raise ScreenshotError(f"MLflow has finished runs of {backends}, not of {wanted}")
    return runs


async def ask(http: aiohttp.ClientSession, url: str, question: dict[str, Any]) -> dict[str, Any]:
    """One call of MLflow's REST interface."""
    async with http.post(url, json=question) as answer:
        answer.raise_for_status()
        found: dict[str, Any] = await answer.json()
        return found


def tag_of(run: dict[str, Any], key: str) -> str | None:
    """A tag of a run."""
    return next((entry["value"] for entry in run["data"]["tags"] if entry["key"] == key), None)


def preferences(experiment: str, runs: list[dict[str, Any]], table_height: int) -> dict[str, str]:
    """What MLflow's pages keep in the browser: which charts they show, and that the first visit is over."""
    common = {
        "isAccordionReordered": True,
        "autoRefreshEnabled": False,
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
    }
    table = {
        "uuid": "table",
        "type": "DIFFERENCE",
        "metricSectionId": "runs",
        "runsCountToCompare": 10,
        "deleted": False,
        "isGenerated": False,
        "chartName": "Metrics and parameters",
        "compareGroups": ["Model metrics", "Parameters"],
        "showChangeFromBaseline": False,
        "showDifferencesOnly": False,
        "baselineColumnUuid": runs[0]["info"]["run_id"],
    }
    all_runs = common | {
        "orderByAsc": True,
        "runsHiddenMode": "SHOW_ALL",
        "runListHidden": True,
        "compareRunSections": [section("curves", "Curves", 2, 290), section("runs", "Runs", 1, table_height)],
        "compareRunCharts": [*map(line_chart, CURVES), table],
    }
    one_run = common | {
        "compareRunSections": [section("curves", "Curves", 2, 340)],
        "compareRunCharts": [*map(line_chart, CURVES)],
    }
    return {
        "_mlflow_dark_mode_toggle_enabled": "false",
        "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": "true",
        ui_state(experiment): json.dumps(all_runs),
        **{
            f"MLflowLocalStorage-1.1-RunPage-{run['info']['run_id']}-model-chartUIState": json.dumps(one_run)
            for run in runs
        },
    }


def ui_state(experiment: str) -> str:
    """The name under which MLflow's page of an experiment keeps what it shows."""
    return f'MLflowLocalStorage-1.1-ExperimentPage-["{experiment}"]-ReactComponentState'


def section(name: str, title: str, columns: int, height: int) -> dict[str, Any]:
    """A section of charts."""
    return {
        "uuid": name,
        "name": title,
        "display": True,
        "isReordered": True,
        "deleted": False,
        "isGenerated": False,
        "columns": columns,
        "cardHeight": height,
    }


def line_chart(metric: str) -> dict[str, Any]:
    """The chart of a metric of training and evaluation by step, in the section of the curves."""
    return {
        "uuid": metric,
        "type": "LINE",
        "metricSectionId": "curves",
        "runsCountToCompare": 10,
        "deleted": False,
        "isGenerated": True,
        "displayName": metric,
        "metricKey": metric,
        "selectedMetricKeys": [metric, f"eval_{metric}"],
        "lineSmoothness": 0,
        "xAxisScaleType": "linear",
        "scaleType": "linear",
        "range": {},
        "xAxisKey": "step",
        "selectedXAxisMetricKey": "",
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "ignoreOutliers": False,
        "useGlobalXaxisKey": True,
        "useGlobalLineSmoothing": True,
    }


if __name__ == "__main__":
    sys.exit(main())
