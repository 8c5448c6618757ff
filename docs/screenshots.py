"""Makes the pictures in docs/images: trains, opens `tfloop ui` and a report in Chromium, and takes screenshots.

Run it as `uv run python docs/screenshots.py`; it takes a few minutes and leaves nothing behind but the pictures.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import html
import json
import os
import pty
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp  # MLflow requires it itself, so it is there wherever tfloop is

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
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
COLUMNS, LINES = 112, 50  # of the terminal
CURVES = ("loss", "accuracy")
"""The charts: each of them has the curve of the training and, with `eval_`, that of the evaluation."""
TABLE = ("metrics.eval_loss", "metrics.eval_accuracy", "metrics.examples_per_second", "params.learning_rate")
NOTEBOOK = "notebook.html"  # the page that shows the executed example
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",  # works for root and in containers, too; the only page that is opened is our own
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--lang=en-US",
    "--force-color-profile=srgb",  # the same colours on every machine
    "--remote-debugging-port=0",
)
PARENT = "mlflow.parentRunId"
WIDTH, SCALE = 1280, 1.5
"""Of the window, in CSS pixels, and pixels of the picture for each of them: still sharp when a README shrinks it."""
TRAIN_WAIT, SERVER_WAIT, PAGE_WAIT = 600.0, 180.0, 120.0  # seconds; MLflow's server needs a minute on a slow machine

STYLE = """
/* Chromium has no pointer that could leave the charts: Plotly's tool bars would stay, and cover the curves. */
.modebar-container, button[data-assistant-ui] { display: none !important }
/* The table of metrics and parameters cuts a name that does not fit: through its second line, if it may have one. */
[role="cell"] { display: block; white-space: nowrap; overflow: hidden; text-overflow: ellipsis }
"""


class ScreenshotError(Exception):
    """Something that one line can tell."""


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


@contextlib.contextmanager
def started(command: list[str], directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command in a process group of its own: the servers and the browser have children, and none may stay behind."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    environment |= {"MLFLOW_DISABLE_TELEMETRY": "true"}  # its notice would cover the page
    with (directory / f"{Path(command[0]).name}.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=directory,
            env=environment,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            os.killpg(process.pid, signal.SIGKILL)  # those that didn't follow
        process.wait()


def free_port() -> int:
    """A free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def in_terminal(command: list[str], directory: Path, until: str) -> str:
    """What a terminal shows of a command, with its colours: at its end, or where it has printed `until`."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "PYTHONIOENCODING": "utf-8"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        command, cwd=directory, env=environment, stdin=its, stdout=its, stderr=its, start_new_session=True
    )
    os.close(its)
    output = b""
    with contextlib.suppress(OSError):  # what a terminal says when no process writes any more
        while some := os.read(ours, 1 << 16):
            output += some
            above, _, bar = output.decode(errors="replace").rpartition("\n")
            if until and until in above and "|" in bar:
                os.killpg(process.pid, signal.SIGKILL)
    os.close(ours)
    if (code := process.wait()) and not until:
        raise ScreenshotError(f"{' '.join(command[1:])} ended with exit code {code}")
    return "\n".join(map(last_drawn, output.decode(errors="replace").split("\n")))


def last_drawn(line: str) -> str:
    """What is seen of a line that was drawn several times, without the place of this checkout."""
    drawn = [part for part in line.split("\r") if part.strip()]
    shown = drawn[-1] if drawn else ""
    padding = " " * (len(f"{ROOT}/") * shown.count(f"{ROOT}/"))
    shown = shown.replace(f"{ROOT}/", "")
    return f"{shown[:-1]}{padding}{shown[-1]}" if padding and shown.endswith("\u2502") else shown


PALETTE = ["#6e7681", "#ff7b72", "#7ee787", "#e3b341", "#79b8ff", "#d2a8ff", "#56d4dd", "#e6edf3"]
"""Of a terminal: black (here gray, since it stands on black), red, green, yellow, blue, magenta, cyan, white."""


def as_page(title: str, output: str) -> str:
    """A page that shows what was written on a terminal."""
    text, style = "", {}
    for part in re.split(r"(\x1b\[[0-9;]*m)", output.replace("\r", "")):
        if not part.startswith("\x1b"):
            css = ";".join(f"{name}:{value}" for name, value in style.items())
            part = re.sub("[\u2800-\u28ff]", lambda found: dots(found[0]), html.escape(part))
            text += f'<span style="{css}">{part}</span>' if part else ""
            continue
        codes = [int(code or 0) for code in part[2:-1].split(";")]
        while codes:
            code = codes.pop(0)
            if code == 38 and codes[:1] == [5]:
                code, codes = 30 + codes[1] % 8, codes[2:]
            if code == 0:
                style = {}
            elif code == 1:
                style["font-weight"] = "700"
            elif 30 <= code <= 37 or 90 <= code <= 97:
                style["color"] = PALETTE[code % 10]
            elif code == 39:
                style.pop("color", None)
    return (
        '<!doctype html><meta charset="utf-8"><style>body{margin:0;background:#0d1117;color:#c9d1d9;'
        "padding:22px 26px;width:max-content}pre{margin:0;font:14px/17px 'DejaVu Sans Mono',monospace}b{color:#7ee787}"
        "svg{width:1ch;height:17px;vertical-align:top;fill:currentColor}"
        f"</style><pre><b>$</b> {html.escape(title)}\n{text}</pre>"
    )


def dots(character: str) -> str:
    """A Braille character, of which plots are made, as a picture: not every fixed-width font has them."""
    places = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3)]
    there = [place for bit, place in enumerate(places) if ord(character) - 0x2800 >> bit & 1]
    circles = "".join(f'<circle cx="{x + 0.5}" cy="{y + 0.5}" r=".36"/>' for x, y in there)
    return f'<svg viewBox="0 0 2 4" preserveAspectRatio="none">{circles}</svg>'


def executed(path: Path, directory: Path) -> str:
    """A page that shows a notebook with the outputs of its cells, which are executed in a directory."""
    import nbformat
    from markdown_it import MarkdownIt
    from nbclient import NotebookClient

    print("executing", path.name, file=sys.stderr)
    notebook = nbformat.read(path, as_version=4)
    first = nbformat.v4.new_code_cell(f"import sys\nsys.path.insert(0, {str(ROOT)!r})")
    notebook.cells.insert(0, first)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(directory)}}).execute()
    shown = next(index for index, cell in enumerate(notebook.cells) if cell.get("outputs")) - 1
    body = ""
    for cell in notebook.cells[shown:]:  # without imports and the task, of which the picture would be too high
        if cell.cell_type == "markdown":
            body += MarkdownIt().render(cell.source)
            continue
        body += f'<pre class="in">{html.escape(cell.source)}</pre>'
        for output in cell.outputs:
            data = output.get("data", {})
            body += (
                data.get("text/html") or f"<pre>{html.escape(output.get('text') or data.get('text/plain', ''))}</pre>"
            )
    return (
        '<!doctype html><meta charset="utf-8"><style>body{margin:0;padding:8px 28px 20px;width:900px;'
        "font:14px/1.45 'DejaVu Sans',sans-serif;color:#1f2328}"
        "pre{font:12px/1.4 'DejaVu Sans Mono',monospace;margin:6px 0;white-space:pre-wrap}"
        "pre.in{background:#f6f8fa;border:1px solid #d0d7de;border-radius:4px;padding:8px 12px}"
        f"table{{border-collapse:collapse;font-size:12px}}tbody tr:nth-child(odd){{background:#f6f8fa}}</style>{body}"
    )


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


class Tab:
    """A page of the browser, told what to do through the DevTools protocol.

    Attributes:
        errors: what the page's console has told of, once `listen` has been called.
    """

    def __init__(self, socket_: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket_
        self._calls = 0
        self.errors: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method and returns its result."""
        self._calls += 1
        await self._socket.send_json({"id": self._calls, "method": method, "params": params})
        while True:
            message = await self._socket.receive(timeout=PAGE_WAIT)
            if message.type is not aiohttp.WSMsgType.TEXT:
                raise ScreenshotError("Chromium has ended")
            answer = message.json()
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(json.dumps(answer["params"]))
            if answer.get("id") == self._calls:
                if "error" in answer:
                    raise ScreenshotError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result

    async def remember(self, items: dict[str, str]) -> None:
        """Puts items into the local storage of every page before its own scripts run."""
        script = f"for (const [key, value] of Object.entries({json.dumps(items)})) localStorage.setItem(key, value)"
        await self.call("Page.enable")
        await self.call("Page.addScriptToEvaluateOnNewDocument", source=script)

    async def listen(self) -> None:
        """From now on, `errors` has what goes wrong in the page."""
        await self.call("Runtime.enable")
        await self.call("Log.enable")

    async def window(self, width: int, height: int, scale: float = 1.0, theme: str = "light") -> None:
        """Gives the window this size, and pictures so many pixels for each of its own."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    async def open(self, url: str, texts: Sequence[str] = (), ready: str = "true") -> None:
        """Opens a page, and waits until it shows the texts and is ready."""
        await self.call("Page.navigate", url="about:blank")  # else another #fragment would keep the old page
        await self.call("Page.navigate", url=url)
        texts_shown = f"{json.dumps([*texts])}.every(text => document.body?.innerText.includes(text))"
        try:
            async with asyncio.timeout(PAGE_WAIT):
                while not await self.value(f"document.readyState == 'complete' && {texts_shown} && {ready}"):
                    await asyncio.sleep(0.2)
        except TimeoutError:
            shown = str(await self.value("document.body?.innerText"))
            missing = [text for text in texts if text not in shown] or ["all curves"]
            raise ScreenshotError(f"{url}: the page does not show {', '.join(missing)}") from None

    async def picture(self, url: str, path: Path, texts: Sequence[str], ready: str = "true") -> None:
        """Opens a page in the window and saves what it shows."""
        await self.open(url, texts, ready)
        await self.value(
            f"document.head.append(Object.assign(document.createElement('style'), {{textContent: `{STYLE}`}}))"
        )
        await asyncio.sleep(2)  # charts are laid out anew, and fade in
        image = await self.call("Page.captureScreenshot", format="png")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(image["data"]))
        print(f"wrote {path.relative_to(ROOT)}, {path.stat().st_size // 1000} kB", file=sys.stderr)

    async def value(self, expression: str) -> Any:
        """The value of an expression in the page."""
        return (await self.call("Runtime.evaluate", expression=expression, returnByValue=True))["result"].get("value")


@contextlib.asynccontextmanager
async def page(http: aiohttp.ClientSession, profile: Path) -> Any:
    """The browser's page; its DevTools port stands in a file of the profile."""
    ports = profile / "DevToolsActivePort"
    try:
        async with asyncio.timeout(PAGE_WAIT):
            while not (ports.exists() and ports.read_text().count("\n")):
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise ScreenshotError(f"Chromium did not start within {PAGE_WAIT:.0f} s") from None
    async with http.get(f"http://127.0.0.1:{ports.read_text().split()[0]}/json/list") as answer:
        targets = await answer.json(content_type=None)
    address = next(target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page")
    async with http.ws_connect(address, max_msg_size=0) as socket_:  # 0: a picture is a large message
        yield Tab(socket_)


if __name__ == "__main__":
    sys.exit(main())
