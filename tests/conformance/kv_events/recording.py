"""A recorded stream as a file: JSON lines, in the order in which things happened.

The first line names the engine: {"recording": "kv_events", "engine": ..., "num_blocks": ...}. Then, of each kind any:
{"number": 0, "payload": base64 of the msgpack}, {"request": {"root": hex, "token_ids": [...], "cached_tokens": 0}} for
a request that ran alone, {"reset": true} for a reset that was done.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.conformance.kv_events.laws import Checker


class NoRecording(ValueError):
    """The file is not what it should be; the message says where."""


def write_recording(path: Path, engine: str, num_blocks: int | None, batches: Iterable[tuple[int, bytes]]) -> None:
    """Write batches, in order, as a recording."""
    head = {"recording": "kv_events", "engine": engine, "num_blocks": num_blocks}
    lines = [head, *({"number": number, "payload": b64encode(payload).decode()} for number, payload in batches)]
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return a recording's lines, the first of them its head. Raises NoRecording, OSError."""
    lines: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        try:
            lines.append(json.loads(line))
        except ValueError as error:
            raise NoRecording(f"{path}, line {number}: {error}") from error
    if not lines or not isinstance(lines[0], dict) or lines[0].get("recording") != "kv_events":
        raise NoRecording(f'{path}: the first line must say {{"recording": "kv_events"}}')
    return lines


def check_recording(path: Path, num_blocks: int | None = None) -> Checker:
    """Return a checker that has read a file; ``num_blocks`` None: as its head says. Raises NoRecording, OSError."""
    head, *lines = read_lines(path)
    checker = Checker(num_blocks or head.get("num_blocks"))
    for number, line in enumerate(lines, 2):
        try:
            if "payload" in line:
                checker.batch(int(line["number"]), b64decode(line["payload"], validate=True))
            elif "request" in line:
                asked = line["request"]
                checker.request(bytes.fromhex(asked["root"]), asked["token_ids"], asked["cached_tokens"])
            elif "reset" in line:
                checker.reset()
            else:
                raise NoRecording(f"{path}, line {number}: neither payload nor request nor reset")
        except (KeyError, TypeError, ValueError) as error:
            raise NoRecording(f"{path}, line {number}: {error}") from error
    return checker
