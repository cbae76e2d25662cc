"""Decoders in separate processes: each loads a model once and then answers requests, one JSON line each.

The first line of a worker is `ready`, or `skipped` with the reason. A request names a method of the decoder and its
arguments. The answer is its `result`, or the `error` that it raised.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol, Self

ROOT = Path(__file__).parents[2]


class Unavailable(Exception):
    """The error for an engine that is not installed or cannot run this model."""


class Decoding(Protocol):
    """The interface of every engine.

    Attributes:
        facts: facts to report beside the numbers, such as the release.
    """

    facts: Mapping[str, Any]

    def decode(self, prompt: Sequence[int], new_tokens: int) -> tuple[list[int], float]:
        """Return the greedy continuation, and the seconds from its first token to its last."""
        ...

    def loss(self, windows: Sequence[Sequence[int]]) -> float:
        """Return the mean cross-entropy, in nats, of all tokens of the windows except each first one."""
        ...


class Worker:
    """A process that holds one decoder. It sleeps on its pipe between two requests.

    Raises:
        Unavailable: the process does not start, skips its engine, or ends before it is ready.
    """

    def __init__(self, command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None) -> None:
        self._log = open(log, "w", encoding="utf-8")  # noqa: SIM115  # the process writes to it until it ends
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
            )
        except OSError as error:
            self._log.close()
            raise Unavailable(f"{command[0]} does not start: {error.strerror}") from error
        hello = self._read()
        if "ready" not in hello:
            self.close()
            raise Unavailable(hello.get("skipped", "the process ended before it was ready"))
        self.facts: dict[str, Any] = hello["ready"]

    def __call__(self, method: str, *arguments: Any) -> Any:
        """Call a method of the decoder and return its result.

        Raises:
            Unavailable: the method raised an error, or the process ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([method, *arguments]) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise Unavailable(f"the process ended before {method}") from error
        answer = self._read()
        if "result" not in answer:
            raise Unavailable(answer.get("error", f"the process ended during {method}"))
        return answer["result"]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else {}


def answer(load: Any) -> None:
    """Serve the decoder that `load` returns until the input ends. The engine's own output goes to stderr."""
    replies: IO[str] = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def reply(**message: Any) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        decoder: Decoding = load()
    except (ImportError, Unavailable) as missing:
        return reply(skipped=str(missing))
    except Exception as error:  # noqa: BLE001  # an engine's own error, whatever its type, is why it is skipped
        return reply(skipped=f"{type(error).__name__}: {first_line(error)}")
    reply(ready=dict(decoder.facts))
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        try:
            reply(result=getattr(decoder, method)(*arguments))
        except Exception as error:  # noqa: BLE001
            reply(error=f"{type(error).__name__}: {first_line(error)}")
    return None


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, at most 200 characters of it."""
    return (str(error).splitlines() or [""])[0][:200]
