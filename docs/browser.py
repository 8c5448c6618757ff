"""A browser that opens pages and takes pictures of them; for the scripts beside this one, and the tests."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp  # MLflow requires it itself, so it is there wherever tfloop is

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
PAGE_WAIT = 120.0
"""Seconds that a page has to show what is expected of it."""
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

STYLE = """
/* Chromium has no pointer that could leave the charts: Plotly's tool bars would stay, and cover the curves. */
.modebar-container, button[data-assistant-ui] { display: none !important }
/* The table of metrics and parameters cuts a name that does not fit: through its second line, if it may have one. */
[role="cell"] { display: block; white-space: nowrap; overflow: hidden; text-overflow: ellipsis }
"""


class ScreenshotError(Exception):
    """Something that one line can tell."""


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
