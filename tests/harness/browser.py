"""A real browser without a window: Chromium, told what to do over a pipe by its own protocol."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
         "--disable-background-networking", "--remote-debugging-pipe")  # fmt: skip
TIMEOUT_S = 60.0


def program() -> str | None:
    """The browser's path; None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of Chromium.

    Attributes:
        complaints: what the console and the log have said of errors, and what could not be loaded.
        requests: addresses of everything that was asked for.
    """

    def __init__(self, path: str):
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        here, theirs = os.pipe(), os.pipe()  # to the browser, whose descriptor is 3; from it, 4
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{here[0]} 4>&{theirs[1]}', "bash", path, *FLAGS,
             f"--user-data-dir={self._folder.name}", "about:blank"],
            pass_fds=(here[0], theirs[1]), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL)  # fmt: skip
        os.close(here[0])
        os.close(theirs[1])
        self._write, self._read = here[1], theirs[0]
        self._number, self._rest, self._session = 0, b"", None
        try:
            self._attach()
        except BaseException:
            self.close()
            raise

    def _attach(self) -> None:
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a call."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def open(self, page: Path, width: int, height: int = 900, dark: bool = False) -> None:
        """Shows a page of a file, on a screen of that size."""
        self.visit(page.resolve().as_uri(), width, height, dark)
        until = time.monotonic() + TIMEOUT_S
        while self.run("document.readyState + location.protocol") != "completefile:":
            assert time.monotonic() < until, "the page was not loaded"

    def visit(self, address: str, width: int, height: int = 900, dark: bool = False) -> None:
        """Goes to an address, on a screen of that size."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=address)

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str) -> None:
        code = {"Tab": 9, "ArrowRight": 39}[key]
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def close(self) -> None:
        os.close(self._write)  # it ends with its pipe
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        self._folder.cleanup()

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, *_ = select.select([self._read], [], [], TIMEOUT_S)
            block = os.read(self._read, 1 << 20) if ready else b""
            assert block, "the browser does not answer"
            self._rest += block
        line, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event: str | None, params: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event == "Network.loadingFailed":
            self.complaints.append(f"not loaded: {params['errorText']}")
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(params["args"]))
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"]["text"])
