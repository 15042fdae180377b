"""What every importer yields, what it is told, and what it has to tell about its file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from serve_app.api.request import GenerateRequest
from serve_app.request_files import TraceError

MS_SINCE_1970 = 1e11
"""Larger times are in milliseconds: as seconds they would be after the year 5000."""


@dataclass(slots=True, kw_only=True)
class SourceRequest:
    """A request of a file. ``at_s``: its arrival, since 1970 or any common start.

    ``hashes``: 16 bytes for each whole block, and for a partial last one where the form has an id for it. Equal ones
    mean equal beginnings. ``choices``: of which ``output_tokens`` is the sum.
    """

    at_s: float
    tokens: int
    output_tokens: int
    hashes: bytes
    tenant: str = ""
    model: str = ""
    adapter: str = ""
    session: str = ""
    choices: int = 1
    ttft_s: float = 0.0
    duration_s: float = 0.0


class PromptReader(Protocol):
    """Tokenizes as a server would. ``block_tokens``: of a hash."""

    block_tokens: int

    def prompts(self, request: GenerateRequest, tenant: str) -> list[tuple[int, bytes]]:
        """Return the tokens and hashes of each of a request's prompts. Raises InvalidRequest."""

    def prompt(self, text: str, tenant: str, model: str, adapter: str, *, special: bool) -> tuple[int, bytes]:
        """Return those of a text. ``special``: the tokenizer's own tokens stand around it. Raises InvalidRequest."""

    def of_ids(self, ids: Sequence[int], tenant: str, model: str, adapter: str) -> tuple[int, bytes]:
        """Return those of token ids."""


@dataclass
class ImportOptions:
    """``reader``: None without ``--tokenizer``. ``rate``: requests, or sessions, a second where a file has no times.

    ``output_tokens``: of an answer whose length nothing tells. ``notes``: what was assumed, with its count.
    ``on_line``: hears the bytes of each line. ``number``: of the file, to keep ids of several files apart.
    """

    reader: PromptReader | None = None
    rate: float = 1.0
    output_tokens: int = 1
    api: str = ""
    number: int = 0
    notes: Counter[str] = field(default_factory=Counter)
    on_line: Callable[[int], object] = lambda _: None

    def text_reader(self, path: Path) -> PromptReader:
        """Return the tokenizer. Raises TraceError without one."""
        if self.reader is None:
            raise TraceError(
                f"{path} has prompts as text, and tokens are counted as a server counts them: give "
                "--tokenizer MODEL, named as for `warmpath serve`"
            )
        return self.reader


def seconds(value: Any) -> float:
    """Return a time: seconds, milliseconds since 1970, or ISO 8601 (UTC where no zone is told). Raises ValueError."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value / 1e3 if value > MS_SINCE_1970 else float(value)
    if not isinstance(value, str):
        raise ValueError(f"a time is seconds, milliseconds since 1970 or ISO 8601, not {value!r:.40}")
    try:
        return seconds(float(value))
    except ValueError:
        moment = datetime.fromisoformat(value)
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
