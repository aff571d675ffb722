"""Look at a page in Debian's Chromium, over the protocol that its developer tools use."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
START_SECONDS = 90.0


def program() -> str | None:
    """Return the path of an installed browser; None if there is none."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


class Browser:
    """A browser without a window, which shows one page; as a context manager none is left."""

    def __init__(self, url: str) -> None:
        path = program()
        assert path is not None
        self._url = url
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._process = subprocess.Popen(
            [
                *(path, "--headless", "--disable-gpu", "--no-sandbox", "--no-first-run"),
                *("--disable-dev-shm-usage", "--disable-background-networking"),
                *("--window-size=1000,640", "--remote-debugging-port=0"),
                *(f"--user-data-dir={self._profile.name}", url),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._profile.cleanup()

    def texts(self, *ids: str) -> list[str]:
        """Return what the page's elements say now."""
        script = f"{json.dumps(ids)}.map((id) => document.getElementById(id)?.textContent ?? '')"
        return list(self.value(script))

    def value(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"]["value"]

    def picture(self, path: Path) -> None:
        """Write what the page looks like to a PNG file."""
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))

    def wait_until(self, holds: Callable[[], bool], seconds: float = 60.0) -> None:
        """Wait for the page."""
        until = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < until, self.value("document.body.innerText")
            time.sleep(0.1)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        until = time.monotonic() + START_SECONDS
        while "result" not in (answer := asyncio.run(self._ask(method, parameters))):
            assert time.monotonic() < until, answer
            time.sleep(0.1)  # the page was still being loaded
        found: dict[str, Any] = answer["result"]
        return found

    async def _ask(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        """Send one command to the page, and return the message that answers it."""
        async with aiohttp.ClientSession() as session:
            where = await self._page(session)
            async with session.ws_connect(where, max_msg_size=0) as socket:
                await socket.send_json({"id": 1, "method": method, "params": parameters})
                while (answer := await socket.receive_json(timeout=60)).get("id") != 1:
                    pass
        return dict(answer)

    async def _page(self, session: aiohttp.ClientSession) -> str:
        """Return the address at which the page takes commands, once the browser has started."""
        port = Path(self._profile.name) / "DevToolsActivePort"
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            assert self._process.poll() is None, "the browser has ended"
            if port.exists() and (lines := port.read_text().splitlines()):
                async with session.get(f"http://127.0.0.1:{lines[0]}/json/list") as answer:
                    pages = await answer.json(content_type=None)
                for page in pages:
                    if page["type"] == "page" and page["url"].startswith(self._url):
                        return str(page["webSocketDebuggerUrl"])
            await asyncio.sleep(0.1)
        raise AssertionError(f"the browser doesn't show {self._url}")
