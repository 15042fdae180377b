"""An import: which form a file has, and its requests written in ours, with ids and names of a key kept nowhere."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import msgspec

from router.protocol.block_hash import HASH_BYTES
from serve_app.errors import unread
from serve_app.request_files import TraceError, numbered_lines
from serve_app.traffic.forms import SourceForm
from serve_app.traffic.importers.bodies import TIMES, BodyLines, body_of
from serve_app.traffic.importers.source import ImportOptions, SourceRequest
from serve_app.traffic.importers.vllm_log import MARK, VllmLog
from serve_app.traffic.importers.with_ids import AgentSessions, TraceLines
from serve_app.traffic.record import VERSION, Header, TrafficRequest
from serve_app.traffic.recording_key import KeyOffer, RecordingKey, every

WriteBytes = Callable[[bytes], object]

CHUNK = 256
"""Requests whose ids one run of the cipher makes."""
LOOK_LINES = 1000
"""Lines of a log that are searched for a request."""


class Importer(Protocol):
    """A file of one form. ``block_tokens``: of a hash."""

    block_tokens: int

    def requests(self) -> Iterator[SourceRequest]:
        """Yield the file's requests. Raises TraceError."""


def form_of(path: Path) -> SourceForm:
    """Return the form of a file, by its content. Raises TraceError."""
    first = b""
    for number, line in numbered_lines(path):
        first = first or line
        if MARK in line:
            return SourceForm.vllm
        if number == 1 or line.lstrip().startswith(b"{"):
            form = _form_of_line(path, line)
            if form is not None:
                return form
        if number >= LOOK_LINES:
            break
    if not first:
        raise TraceError(f"{path} is empty")
    if first.lstrip()[:1] in (b"{", b"["):
        with suppress(TraceError):
            AgentSessions(path, ImportOptions())
            return SourceForm.weka
    raise TraceError(
        f"{path}: no known form begins with {first[:80].decode('utf-8', 'replace').strip()!r}; --format is one of "
        f"{', '.join(form for form in SourceForm if form != SourceForm.auto)}"
    )


def _form_of_line(path: Path, line: bytes) -> SourceForm | None:
    try:
        found = msgspec.json.decode(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    if "warmpath_traffic" in found:
        raise TraceError(f"{path} is recorded traffic already: every command reads it as it is")
    if "requests" in found and "block_size" in found:
        return SourceForm.weka
    if "custom_id" in found and ("body" in found or "params" in found):
        return SourceForm.batch
    if "input_length" in found:
        return (
            SourceForm.aiperf
            if "session_id" in found or "delay" in found or "timestamp" not in found
            else SourceForm.mooncake
        )
    if body_of(found) is None:
        return None
    if not any(name in found for name in TIMES):
        raise TraceError(
            f"{path}: its first request has no time, none of {', '.join(TIMES)}; --format batch takes such at --rate"
        )
    return SourceForm.openai


def importer(path: Path, form: SourceForm, options: ImportOptions) -> Importer:
    """Return what reads a file of a form, which is not ``auto``. Raises TraceError."""
    if form in (SourceForm.mooncake, SourceForm.aiperf):
        return TraceLines(path, options)
    if form is SourceForm.weka:
        return AgentSessions(path, options)
    if form is SourceForm.vllm:
        return VllmLog(path, options)
    options.api = form if form is SourceForm.anthropic else ""
    return BodyLines(path, options, timed=form is not SourceForm.batch)


def import_traffic(
    paths: Sequence[Path], form: SourceForm, target: Path, options: ImportOptions, block_tokens: int | None = None
) -> int:
    """Write the requests of files to ``target``, which must not exist; return their number. Raises TraceError.

    ``block_tokens``: coarser blocks than the files'.
    """
    if target.exists():
        raise TraceError(f"{target} exists: name another file, or remove it")
    unfinished = target.with_name(f".{target.name}.part")
    try:
        with opened(unfinished, compressed=target.suffix == ".gz") as write:
            written = _written(write, paths, form, options, block_tokens)
        if not written:
            raise TraceError(f"{', '.join(map(str, paths))} holds no requests")
        unfinished.replace(target)
    except OSError as error:
        raise TraceError(f"{target} cannot be written: {unread(error)}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return written


@contextmanager
def opened(path: Path, *, compressed: bool) -> Iterator[WriteBytes]:
    """Open a file that its owner alone can read, and yield what writes to it. Raises OSError."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        if compressed:
            with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=6) as packed:
                yield packed.write
        else:
            yield file.write


def _written(
    write: WriteBytes, paths: Sequence[Path], given: SourceForm, options: ImportOptions, block_tokens: int | None
) -> int:
    key = RecordingKey(KeyOffer.new(""))
    encoder = msgspec.json.Encoder()
    lines: _Lines | None = None
    size = number = 0
    for options.number, path in enumerate(paths):
        form = form_of(path) if given is SourceForm.auto else given
        source = importer(path, form, options)
        wanted = size or block_tokens or source.block_tokens
        if wanted % source.block_tokens:
            raise TraceError(
                f"{path} has blocks of {source.block_tokens} tokens, and {wanted} is no multiple: give --block-tokens, "
                "a multiple of all files'"
            )
        chunk: list[SourceRequest] = []
        for request in source.requests():
            if lines is None:
                size = wanted
                started_s = request.at_s if request.at_s > 1e9 else 0.0
                lines = _Lines(key, started_s)
                header = Header(
                    VERSION, key.public, started_s, size, source=form if form is not SourceForm.auto else "import"
                )
                write(encoder.encode(header) + b"\n")
            chunk.append(request)
            if len(chunk) == CHUNK:
                write(encoder.encode_lines(lines.of(chunk, wanted // source.block_tokens)))
                number, chunk = number + len(chunk), []
        if chunk and lines is not None:
            write(encoder.encode_lines(lines.of(chunk, wanted // source.block_tokens)))
            number += len(chunk)
    return number


class _Lines:
    """Requests as lines. A session's requests continue each other."""

    def __init__(self, key: RecordingKey, started_s: float) -> None:
        self._key, self._started_s = key, started_s
        self._number = 0
        self._last: dict[str, str] = {}
        self._names: dict[tuple[str, str], str] = {}

    def of(self, requests: Iterable[SourceRequest], coarser: int) -> list[TrafficRequest]:
        requests = list(requests)
        hashes = [every(each.hashes, coarser) for each in requests]
        ids, at = self._key.ids(b"".join(hashes)), 0
        lines: list[TrafficRequest] = []
        for request, own in zip(requests, hashes, strict=True):
            end = at + len(own) // HASH_BYTES
            lines.append(self._line(request, ids[at:end]))
            at = end
        return lines

    def _line(self, request: SourceRequest, ids: list[int]) -> TrafficRequest:
        line = TrafficRequest(
            timestamp=round((request.at_s - self._started_s) * 1e3, 3),
            input_length=request.tokens,
            output_length=request.output_tokens,
            hash_ids=ids,
            tenant=self._name("tenant", request.tenant),
            model=request.model,
            adapter=self._name("adapter", request.adapter),
            session=self._name("session", request.session),
            choices=request.choices,
        )
        if request.ttft_s:
            line.ttft_ms = round(request.ttft_s * 1e3, 3)
        if request.duration_s:
            line.duration_ms = round(request.duration_s * 1e3, 3)
        if request.session:
            self._number += 1
            line.id = self._key.name("request", str(self._number))
            line.parent = self._last.get(request.session, "")
            self._last[request.session] = line.id
        return line

    def _name(self, kind: str, word: str) -> str:
        if not word:
            return ""
        name = self._names.get((kind, word))
        if name is None:
            name = self._names[kind, word] = self._key.name(kind, word)
        return name
