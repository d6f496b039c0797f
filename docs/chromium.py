"""Pages in Chromium, driven through chromedriver's HTTP interface, which needs no library."""

import base64
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

AXE = Path(os.environ.get("AXE_CORE", "node_modules/axe-core/axe.min.js"))
"""Deque's rules of accessibility, from npm's package axe-core."""
DRIVER, BROWSER = shutil.which("chromedriver"), shutil.which("chromium")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars",
)  # fmt: skip


class Page:
    """A session of chromedriver."""

    def __init__(self, address: str, profile: Path) -> None:
        self._address = address
        options = {"binary": BROWSER, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options,
                  "goog:loggingPrefs": {"browser": "ALL"}}  # fmt: skip
        made = self._send("POST", "", {"capabilities": {"alwaysMatch": wanted}})
        self._address += f"/{made['sessionId']}"

    def _send(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(f"{self._address}{path}", data, method=method)
        asked.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return json.load(answer)["value"]

    def cdp(self, command: str, **params: object) -> Any:
        """Send a command of the DevTools protocol."""
        body = {"cmd": command, "params": params}
        return self._send("POST", "/goog/cdp/execute", body)

    def show(self, file: Path, width: int, scheme: str) -> None:
        """Load a page, and wait until it is complete; ``scheme`` is light or dark."""
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=900,
                 deviceScaleFactor=1, mobile=False)  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.cdp("Emulation.setEmulatedMedia", media="", features=features)
        self._send("POST", "/url", {"url": file.as_uri()})
        whole = f"location.href == {json.dumps(file.as_uri())} && document.readyState == 'complete'"
        for _ in range(200):
            if self.ask(whole):
                return
            time.sleep(0.05)
        raise TimeoutError(f"the browser has not loaded {file} in ten seconds.")

    def ask(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self.cdp("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"the page's script failed: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def violations(self) -> list[list[Any]]:
        """Return the rules of axe that the page breaks, each with the start of its elements."""
        self.ask(AXE.read_text() + "; axe.run().then(result => window.axed = result); 0")
        for _ in range(1200):
            if self.ask("!!window.axed"):
                break
            time.sleep(0.05)
        if not self.ask("axed.passes.length > 5"):
            raise RuntimeError("axe tried hardly any rule.")
        broken: list[list[Any]] = self.ask(
            "axed.violations.map(v => [v.id, v.nodes.map(n => n.html.slice(0, 120))])"
        )
        return broken

    def complaints(self) -> Any:
        """Return what stands on the browser's console since the last call."""
        return self._send("POST", "/se/log", {"type": "browser"})

    def tab(self) -> None:
        """Press the tabulator."""
        keys = [{"type": kind, "value": "\ue004"} for kind in ("keyDown", "keyUp")]
        body = {"actions": [{"type": "key", "id": "keys", "actions": keys}]}
        self._send("POST", "/actions", body)

    def printed(self) -> bytes:
        """Return the page as a PDF."""
        answer = self.cdp("Page.printToPDF", preferCSSPageSize=True, printBackground=True)
        return base64.b64decode(answer["data"])

    def picture(self, whole: bool = False) -> bytes:
        """Return what is shown as a PNG, or the whole page."""
        if whole:
            height = self.ask("document.documentElement.scrollHeight")
            width = self.ask("innerWidth")
            self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=height,
                     deviceScaleFactor=1, mobile=False)  # fmt: skip
        return base64.b64decode(self.cdp("Page.captureScreenshot")["data"])

    def close(self) -> None:
        """End the session."""
        self._send("DELETE", "")


@contextmanager
def driven(profile: Path) -> Iterator[Page]:
    """Yield a page of a fresh browser, which keeps its files in ``profile``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    quiet = subprocess.DEVNULL
    with subprocess.Popen([str(DRIVER), f"--port={port}"], stdout=quiet, stderr=quiet) as process:
        try:
            for _ in range(200):
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    time.sleep(0.05)
            page = Page(f"http://127.0.0.1:{port}/session", profile)
            yield page
            page.close()
        finally:
            process.terminate()
