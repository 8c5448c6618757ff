"""Makes docs/images/site-phone.png and site.png: builds the documentation and opens it in Chromium.

Run it as `uv run --group docs python docs/site_pictures.py`.
"""

from __future__ import annotations

import asyncio
import functools
import http.server
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import aiohttp
from browser import CHROMIUM, FLAGS, IMAGES, ROOT, ScreenshotError, page, started

WINDOWS = {"site.png": (1300, 1000, "light"), "site-phone.png": (390, 844, "dark")}
"""The pictures, with width and height of the window and the theme."""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files, and prints nothing."""

    def log_message(self, *args: object) -> None:
        pass


def main() -> int:
    """Builds, serves on loopback and takes the pictures; returns the exit code."""
    chromium = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if chromium is None:
        print("site_pictures: no Chromium found: install it, e.g. with `apt-get install chromium`", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended, as with Ctrl-C
    with tempfile.TemporaryDirectory(prefix="tfloop-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        site = directory / "site"
        build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(site)]
        subprocess.run(build, cwd=ROOT, check=True)
        handler = functools.partial(Quiet, directory=str(site))
        browser = [chromium, *FLAGS, f"--user-data-dir={directory / 'chromium'}", "about:blank"]
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            try:
                with started(browser, directory):
                    asyncio.run(take_pictures(f"http://127.0.0.1:{server.server_port}/", directory / "chromium"))
            except (ScreenshotError, aiohttp.ClientError, TimeoutError) as error:
                print(f"site_pictures: {error or 'no answer'}", file=sys.stderr)
                return 1
            finally:
                server.shutdown()
    return 0


async def take_pictures(address: str, profile: Path) -> None:
    """The landing page in each window. It must be no wider than the window."""
    async with aiohttp.ClientSession() as session, page(session, profile) as tab:
        for name, (width, height, theme) in WINDOWS.items():
            await tab.window(width, height, 1.0, theme)
            await tab.picture(address, IMAGES / name, texts=["The same numbers everywhere"])
            if await tab.value("document.documentElement.scrollWidth") > width:
                raise ScreenshotError(f"{name}: the page is wider than {width} pixels")


if __name__ == "__main__":
    sys.exit(main())
