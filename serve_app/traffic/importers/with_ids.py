"""Forms without text: Mooncake's traces, aiperf's, and agents' sessions of `weka_trace`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
from msgspec import Struct, field

from router.protocol.block_hash import HASH_BYTES
from serve_app.request_files import TraceError, numbered_lines
from serve_app.traffic.importers.source import ImportOptions, SourceRequest
from serve_app.traffic.reader import MOONCAKE_BLOCK_TOKENS

_HALF = (1 << 64) - 1
_UNKNOWN = 1 << 63
"""Beside the ids of files: blocks that no other prompt has."""
_fresh = count()


def hashes_of(ids: Iterable[int], scope: int) -> bytes:
    """Return 16 bytes for each id of a scope, such as a file or a session."""
    words = np.array([each & _HALF for each in ids], "<u8")
    return np.stack([words, np.full(len(words), scope & _HALF, "<u8")], axis=1).tobytes()


def fitted(hashes: bytes, tokens: int, block_tokens: int) -> bytes:
    """Return hashes of as many blocks as a prompt has, with unknown ones for those that lack, and a partial one."""
    blocks = len(hashes) // HASH_BYTES
    whole, most = tokens // block_tokens, -(-tokens // block_tokens)
    if blocks < whole:
        return hashes + hashes_of((next(_fresh) for _ in range(whole - blocks)), _UNKNOWN)
    return hashes[: most * HASH_BYTES]


class _Row(Struct):
    """A line of Mooncake or aiperf. Times in ms; ``delay``: since the turn before in the session."""

    input_length: int | None = None
    output_length: int | None = None
    hash_ids: list[int] | None = None
    timestamp: float | None = None
    delay: float | None = None
    session_id: str | int | None = None
    model: str = ""
    tenant: str = ""


class _Session:
    """A conversation of aiperf: every line is a turn's own input, behind all turns and answers before it."""

    def __init__(self) -> None:
        self.at_s, self.turns, self.tokens = 0.0, 0, 0
        self._pieces: list[tuple[bytes, int]] = []

    def add(self, ids: list[bytes], tokens: int, output_tokens: int, size: int) -> tuple[int, bytes]:
        """Add a turn. Return the tokens of its whole prompt, and a hash for each whole block of it."""
        for place in range(0, tokens, size):
            unit = ids[place // size] if place // size < len(ids) else hashes_of([next(_fresh)], _UNKNOWN)
            self._pieces.append((unit, min(size, tokens - place)))
        prompt, packed = self.tokens + tokens, self._packed(size)
        self.tokens = prompt + output_tokens
        if output_tokens:
            self._pieces.append((hashes_of([next(_fresh)], _UNKNOWN), output_tokens))
        self.turns += 1
        return prompt, packed

    def _packed(self, size: int) -> bytes:
        """A block's hash is one of what it covers, and of the hash before: pieces need not begin where blocks do."""
        hashes: list[bytes] = []
        chain = blake2b(digest_size=HASH_BYTES)
        filled = 0
        for unit, tokens in self._pieces:
            taken = 0
            while taken < tokens:
                part = min(size - filled, tokens - taken)
                chain.update(unit + taken.to_bytes(8) + part.to_bytes(8))
                taken, filled = taken + part, (filled + part) % size
                if not filled:
                    hashes.append(chain.digest())
        return b"".join(hashes)


class TraceLines:
    """Lines of Mooncake, or of aiperf's `mooncake_trace`, whose sessions grow turn by turn."""

    block_tokens = MOONCAKE_BLOCK_TOKENS
    _rows: ClassVar[msgspec.json.Decoder[_Row]] = msgspec.json.Decoder(_Row)

    def __init__(self, path: Path, options: ImportOptions) -> None:
        self._path, self._options = path, options
        self._sessions: defaultdict[str | int, _Session] = defaultdict(_Session)
        self._free = 0

    def requests(self) -> Iterator[SourceRequest]:
        """Yield the requests. Raises TraceError."""
        cut: tuple[int, Exception] | None = None
        for number, line in numbered_lines(self._path):
            if cut is not None:
                break
            self._options.on_line(len(line))
            try:
                yield self._request(self._rows.decode(line))
            except (ValueError, RecursionError) as error:
                cut = number, error
                if not line.endswith(b"\n"):
                    self._options.notes["the last line is cut off, and left out"] += 1
                    return
        if cut is not None:
            raise TraceError(
                f"{self._path}, line {cut[0]}: {cut[1]}; a line is "
                '{"timestamp": MILLISECONDS, "input_length": TOKENS, "output_length": TOKENS, "hash_ids": [...]}'
            )

    def _request(self, row: _Row) -> SourceRequest:
        if row.input_length is None or row.input_length < 0:
            raise ValueError("input_length is missing: lines with text_input or messages are text, --format openai")
        notes, size, tokens = self._options.notes, self.block_tokens, row.input_length
        ids = row.hash_ids or []
        if len(ids) < tokens // size:
            notes["requests have fewer hash_ids than blocks: the rest is taken as shared with none"] += 1
        output = row.output_length if row.output_length is not None else self._options.output_tokens
        if row.output_length is None:
            notes["requests have no output_length: --output-tokens is taken"] += 1
        hashes = hashes_of(ids, self._options.number)
        session = self._sessions[row.session_id] if row.session_id is not None else _Session()
        at_s = self._arrival(row, session)
        if row.session_id is not None:
            each = [hashes[place : place + HASH_BYTES] for place in range(0, len(hashes), HASH_BYTES)]
            tokens, hashes = session.add(each, tokens, output, size)
            session.at_s = at_s
        return SourceRequest(
            at_s=at_s,
            tokens=tokens,
            output_tokens=output,
            hashes=fitted(hashes, tokens, size),
            tenant=row.tenant,
            model=row.model,
            session="" if row.session_id is None else str(row.session_id),
        )

    def _arrival(self, row: _Row, session: _Session) -> float:
        if row.timestamp is not None:
            return row.timestamp / 1e3
        if session.turns:
            if row.delay is not None:
                self._options.notes["turns have a delay: it is counted from the arrival before, not its answer"] += 1
            return session.at_s + (row.delay or 0.0) / 1e3
        self._options.notes["requests, or sessions, have no times: --rate spreads them"] += 1
        self._free += 1
        return (self._free - 1) / self._options.rate


class _AgentRow(Struct, rename={"tokens": "in", "output_tokens": "out"}):
    """A request of a session, or with ``requests`` a sub-agent. ``t``: seconds since the session began."""

    t: float = 0.0
    type: str = ""
    model: str = ""
    tokens: int = 0
    output_tokens: int = 0
    hash_ids: list[int] = field(default_factory=list)
    ttft: float | None = None
    api_time: float | None = None
    requests: list[_AgentRow] | None = None


class _AgentTrace(Struct):
    requests: list[_AgentRow]
    block_size: int
    id: str = ""
    hash_id_scope: str = "local"


class AgentSessions:
    """Sessions of `weka_trace`: one a line, or one a file. Each begins ``1 / rate`` seconds after the one before."""

    _traces: ClassVar[msgspec.json.Decoder[_AgentTrace]] = msgspec.json.Decoder(_AgentTrace)

    def __init__(self, path: Path, options: ImportOptions) -> None:
        self._path, self._options = path, options
        self.block_tokens = next(self._documents()).block_size
        if self.block_tokens < 1:
            raise TraceError(f"{path}: block_size is {self.block_tokens}")

    def requests(self) -> Iterator[SourceRequest]:
        """Yield the requests of all sessions, by session. Raises TraceError."""
        notes = self._options.notes
        for place, trace in enumerate(self._documents(self._options.on_line)):
            if trace.block_size != self.block_tokens:
                raise TraceError(
                    f"{self._path}: blocks of {trace.block_size} tokens follow those of {self.block_tokens}"
                )
            notes["sessions have no common clock: --rate spreads their beginnings"] += 1
            start_s = (self._options.number + place) / self._options.rate
            scope = self._options.number << 32 | (0 if trace.hash_id_scope == "global" else place + 1)
            session = f"{self._options.number}:{place}:{trace.id}"
            rows = [
                (inner, f"{session}:{at}" if row.requests is not None else session)
                for at, row in enumerate(trace.requests)
                for inner in (row.requests if row.requests is not None else [row])
            ]
            for row, name in sorted(rows, key=lambda each: each[0].t):
                yield SourceRequest(
                    at_s=start_s + row.t,
                    tokens=row.tokens,
                    output_tokens=row.output_tokens,
                    hashes=fitted(hashes_of(row.hash_ids, scope), row.tokens, trace.block_size),
                    model=row.model,
                    session=name,
                    ttft_s=row.ttft or 0.0,
                    duration_s=row.api_time or 0.0,
                )

    def _documents(self, on_line: Any = lambda _: None) -> Iterator[_AgentTrace]:
        """Yield lines; where a line is no whole session, the file is one."""
        for number, line in numbered_lines(self._path):
            try:
                trace = self._traces.decode(line)
            except (ValueError, RecursionError) as error:
                if number > 1:
                    raise TraceError(f"{self._path}, line {number}: {error}") from error
                yield self._whole()
                return
            on_line(len(line))
            yield trace

    def _whole(self) -> _AgentTrace:
        try:
            return self._traces.decode(b"".join(line for _, line in numbered_lines(self._path)))
        except (ValueError, RecursionError) as error:
            raise TraceError(
                f'{self._path}: {error}; a session is {{"block_size": TOKENS, "requests": [...]}}'
            ) from error
