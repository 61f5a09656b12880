"""A real browser over pipes, by Chrome's DevTools protocol: no package, no port."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def installed() -> str | None:
    """The browser of this machine, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One browser with one page, to be closed."""

    def __init__(self, profile: Path) -> None:
        program = installed()
        assert program is not None
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        # The browser reads descriptor 3 and writes descriptor 4.
        shell = f'exec "$0" "$@" 3<&{commands} 4>&{answers}'
        flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
        self._process = subprocess.Popen(
            ["bash", "-c", shell, program, *flags, "--remote-debugging-pipe", f"--user-data-dir={profile}"],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._number, self._rest, self._session = 0, b"", ""
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._ask("Page.enable")
        self._ask("Network.enable")
        self.requests: list[str] = []
        """Addresses that the page has asked for."""

    def open(
        self, page: Path, *, width: int, dark: bool, scripts: bool = True, media: str = "", waits: bool = True
    ) -> None:
        """Shows a file at a width in CSS pixels, in a light or dark scheme; interactive pictures are drawn."""
        self._ask("Emulation.setScriptExecutionDisabled", value=not scripts)
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._ask("Emulation.setEmulatedMedia", features=scheme, media=media)
        self.requests.clear()
        self._ask("Page.navigate", url=page.as_uri())
        while self._read().get("method") != "Page.loadEventFired":
            pass
        if scripts and waits:
            self.evaluate("typeof drawn === 'undefined' ? null : drawn")

    def evaluate(self, script: str) -> Any:
        """The value of an expression of JavaScript."""
        found = self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def mouse(self, *moves: tuple[str, float, float]) -> None:
        """Moves the mouse to points of the window, presses or releases its button there."""
        for kind, x, y in moves:
            button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            held = {"buttons": 1} if kind == "mousePressed" else {}
            self._ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button, **held)

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        found = self._ask("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        """Ends the browser."""
        os.close(self._commands)
        os.close(self._answers)
        self._process.terminate()
        self._process.wait()

    def _ask(self, method: str, **params: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self) -> Any:
        while b"\0" not in self._rest:
            found = os.read(self._answers, 1 << 20)
            assert found, "the browser is gone"
            self._rest += found
        message, _, self._rest = self._rest.partition(b"\0")
        said = json.loads(message)
        if said.get("method") == "Network.requestWillBeSent":
            self.requests.append(said["params"]["request"]["url"])
        return said
