"""Drives a headless Chromium over its DevTools protocol, without further packages.

Chromium reads commands from file descriptor 3 and writes answers and events to descriptor 4, as
JSON texts that end in a zero byte (`--remote-debugging-pipe`).
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.limits import HANG_S

CHROMIUM = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)
_PIPES = 'exec "$0" "$@" 3<&"$FROM_TEST" 4>&"$TO_TEST"'
_SETTLED = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


class Tab:
    """A browser tab: it loads pages, evaluates JavaScript in them, and counts their requests."""

    def __init__(self, process: subprocess.Popen[bytes], commands: int, answers: int) -> None:
        self.requests: list[str] = []
        self._process = process
        self._commands, self._answers = commands, answers
        self._received = b""
        self._session: str | None = None
        self._number = 0
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Network", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: object) -> dict[str, Any]:
        """Sends a command and returns its result; notes the events that arrive before it."""
        self._number += 1
        message: dict[str, object] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            pass
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def load(self, url: str) -> None:
        """Loads a page and waits until it is drawn, with all scripts and pictures."""
        self.call("Page.navigate", url=url)
        while self._receive().get("method") != "Page.loadEventFired":
            pass
        self.evaluate(_SETTLED)

    def evaluate(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression, and awaits promises."""
        found = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Waits until an expression is true, and returns its value."""
        end = time.monotonic() + HANG_S
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < end, f"never true: {expression}"
            self.evaluate(_SETTLED)
        return value

    def resize(self, width: int, height: int = 900) -> None:
        """Sets the window's size in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def prefer(self, scheme: str) -> None:
        """Makes the system prefer a colour scheme, `light` or `dark`."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def _receive(self) -> dict[str, Any]:
        """Returns the next answer or event."""
        end = time.monotonic() + HANG_S
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end - time.monotonic()))
            assert ready, "Chromium does not answer"
            part = os.read(self._answers, 1 << 16)
            assert part, f"Chromium has ended with code {self._process.wait()}"
            self._received += part
        text, _, self._received = self._received.partition(b"\0")
        message = json.loads(text)
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        return message


@contextmanager
def open_tab(folder: Path) -> Iterator[Tab]:
    """Starts Chromium with a profile in a folder, yields a tab, and ends it."""
    assert CHROMIUM is not None
    from_test, commands = os.pipe()
    answers, to_test = os.pipe()
    flags = ["--headless", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"]
    flags += ["--disable-dev-shm-usage", f"--user-data-dir={folder}"]
    if os.geteuid() == 0:
        flags.append("--no-sandbox")  # Chromium refuses root with one
    process = subprocess.Popen(
        ["bash", "-c", _PIPES, CHROMIUM, *flags],
        pass_fds=[from_test, to_test],
        env={**os.environ, "FROM_TEST": str(from_test), "TO_TEST": str(to_test)},
        stderr=subprocess.DEVNULL,
    )
    os.close(from_test)
    os.close(to_test)
    try:
        yield Tab(process, commands, answers)
    finally:
        process.terminate()
        process.wait(HANG_S)
        os.close(commands)
        os.close(answers)
