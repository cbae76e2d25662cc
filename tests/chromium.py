"""A page in headless Chromium, driven over its debugging pipe: what it holds after its scripts ran, and its errors."""

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_PATIENCE_S = 300
# No network: what a page wants from elsewhere fails to resolve, and shows as an error of its console.
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"),
    *(
        "--no-first-run",
        "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
        "--window-size=1400,1000",
        "--remote-debugging-pipe",
    ),
)


class Page:
    """One tab. Commands are those of the DevTools protocol, a JSON text and a NUL each."""

    def __init__(self, commands: Any, answers: Any) -> None:
        self._commands, self._answers, self._sent = commands, answers, 0
        self._session: str | None = None
        self.errors: list[str] = []  # exceptions, console errors, failed requests
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; events on the way are looked at for errors."""
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while (answer := self._read()).get("id") != self._sent:
            self._notice(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, place: Path | str) -> None:
        """Load a file or an address and wait until the page says that it is there."""
        self.call("Page.navigate", url=place if isinstance(place, str) else place.as_uri())
        while (event := self._read()).get("method") != "Page.loadEventFired":
            self._notice(event)

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"]))
        return found["result"].get("value")

    def _read(self) -> dict[str, Any]:
        content = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            if not byte:
                raise RuntimeError("Chromium has ended")
            content += byte
        return json.loads(content)

    def _notice(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(json.dumps(params["args"]))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """Start Chromium with its profile in that folder; it ends with the block."""
    assert CHROMIUM is not None
    (to_read, commands), (answers, to_write) = os.pipe(), os.pipe()
    command = ["bash", "-c", f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}', CHROMIUM, *_OPTIONS]
    process = subprocess.Popen(
        [*command, f"--user-data-dir={profile}", "about:blank"],
        pass_fds=(to_read, to_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read)
    os.close(to_write)
    watchdog = threading.Timer(_PATIENCE_S, process.kill)  # a browser that hangs fails the test, and does not hang it
    watchdog.start()
    with os.fdopen(commands, "wb") as write, os.fdopen(answers, "rb") as read:
        try:
            page = Page(write, read)
            yield page
        finally:
            watchdog.cancel()
            process.kill()
            process.wait()
