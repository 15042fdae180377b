"""Reads files of recorded traffic, merges several into one order, and says what is wrong with them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from serve_app.request_files import TraceError, numbered_lines
from serve_app.traffic.record import VERSION, Header, RecordedModel, ReplicaChange, ShadowChoice, TrafficRequest
from serve_app.traffic.workload import ReplicasAt, ShadowTold, Workload, chained, segments

MOONCAKE_BLOCK_TOKENS = 512
MOST_IDS = 100_000_000
"""With more, blocks are taken as coarser ones: memory would not suffice."""
_HEADER = b'"warmpath_traffic"'
_CHANGE = b'"replicas":'
_TOLD_LINES = 20_000
_REQUESTS = 1 << 14
_headers, _requests, _changes = (
    msgspec.json.Decoder(Header), msgspec.json.Decoder(TrafficRequest), msgspec.json.Decoder(ReplicaChange)
)  # fmt: skip

EXPECTED = (
    'a line of recorded traffic is {"timestamp": MILLISECONDS, "input_length": TOKENS, "output_length": TOKENS, '
    '"hash_ids": [...]}, below a header line {"warmpath_traffic": 1, ...} or alone, as in Mooncake\'s files; '
    "`warmpath traffic import` makes such a file from others"
)


class _Names:
    """Numbers names in the order of their first use."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}

    def place(self, name: str) -> int:
        return self.places.setdefault(name, len(self.places)) if name else -1


class _Columns:
    """What has been read. Numbers are packed; ids are cut to whole blocks."""

    def __init__(self, told: Callable[[int], object]) -> None:
        self._told = told
        self.lines = 0
        self.ids, self.lengths = array("Q"), array("q")
        self.arrival_s, self.ttft_s, self.duration_s = array("d"), array("f"), array("f")
        self.prompt_tokens, self.output_tokens = array("i"), array("i")
        self.cached, self.predicted = array("i"), array("i")
        self.tenant, self.model, self.adapter, self.replica = array("i"), array("i"), array("i"), array("i")
        self.tenants, self.models, self.adapters, self.replicas = _Names(), _Names(), _Names(), _Names()
        self.changes: list[ReplicasAt] = []
        self.facts: dict[str, RecordedModel] = {}
        self.warnings: list[str] = []
        self.recordings: dict[str, int] = {}
        self.shadows: dict[str, ShadowTold] = {}
        self.refused = self.late = 0
        self.last_s = float("-inf")

    def count(self) -> None:
        """Count a line."""
        self.lines += 1
        if not self.lines % _TOLD_LINES:
            self._told(self.lines)


def read_traffic(
    paths: Sequence[Path], *, block_tokens: int | None = None, on_progress: Callable[[int], object] = lambda _: None
) -> Workload:
    """Read files of one or several recordings, plain or .gz. ``on_progress`` hears the number of lines read.

    ``block_tokens``: coarser blocks than the files'. Files of several recordings share no prefixes. Raises TraceError
    with the file, the line and a remedy.
    """
    columns = _Columns(on_progress)
    sizes = {path: block_tokens_of(path) for path in paths}
    wanted = block_tokens or max(sizes.values(), default=MOONCAKE_BLOCK_TOKENS)
    for path, size in sizes.items():
        if wanted % size:
            remedy = (
                "--block-tokens takes a multiple of them" if block_tokens else "give --block-tokens, a multiple of all"
            )
            raise TraceError(f"{path} has blocks of {size} tokens, and {wanted} is no multiple: {remedy}")
        _read(path, size, wanted // size, columns)
    if not columns.arrival_s:
        told = f", only {columns.refused} refused ones" if columns.refused else ""
        raise TraceError(f"{', '.join(map(str, paths))} holds no answered requests{told}")
    return _workload(columns, wanted, paths)


def block_tokens_of(path: Path) -> int:
    """Return the tokens of a file's ids. Raises TraceError."""
    for number, line in numbered_lines(path):
        return _header(path, number, line).block_tokens if _HEADER in line else MOONCAKE_BLOCK_TOKENS
    raise TraceError(f"{path} is empty; {EXPECTED}")


def _header(path: Path, number: int, line: bytes) -> Header:
    try:
        header = _headers.decode(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}, line {number}: the header cannot be read: {error}; {EXPECTED}") from error
    if header.warmpath_traffic > VERSION:
        raise TraceError(
            f"{path} is of version {header.warmpath_traffic} of the form, and this warmpath reads up to {VERSION}: "
            "install a newer one"
        )
    return header


def recorded_lines(
    paths: Sequence[Path], on_line: Callable[[int], object] = lambda _: None
) -> Iterator[tuple[Header | None, float, TrafficRequest]]:
    """Yield the requests of files one after the other, each with its header, None for none, and Unix time 0 of it.

    Raises TraceError. A cut last line is left out.
    """
    for path in paths:
        header = None
        for _, line in _decoded(path, [], on_line):
            if isinstance(line, Header):
                header = line
            elif isinstance(line, TrafficRequest):
                yield header, header.started_s if header else 0.0, line


def _decoded(
    path: Path, warnings: list[str], on_line: Callable[[int], object]
) -> Iterator[tuple[int, Header | ReplicaChange | TrafficRequest]]:
    """Yield a file's lines with their numbers. A last one that a crash has cut is a warning. Raises TraceError."""
    for number, line in numbered_lines(path):
        on_line(len(line))
        if _HEADER in line:
            yield number, _header(path, number, line)
            continue
        decoded: ReplicaChange | TrafficRequest
        try:
            if _CHANGE in line and b'"input_length"' not in line:
                decoded = _changes.decode(line)
            else:
                decoded = _requests.decode(line)
        except (ValueError, RecursionError) as error:
            if line.endswith(b"\n"):
                raise TraceError(f"{path}, line {number}: {error}; {EXPECTED}") from error
            warnings.append(f"{path}: the last line, {number}, is cut off and left out")
            return
        yield number, decoded


def _read(path: Path, size: int, coarser: int, columns: _Columns) -> None:
    started_s, place, recorded = 0.0, -1, False
    for number, line in _decoded(path, columns.warnings, lambda _: columns.count()):
        if isinstance(line, Header):
            if line.block_tokens != size:
                raise TraceError(f"{path}, line {number}: blocks of {line.block_tokens} tokens follow those of {size}")
            started_s, recorded = line.started_s, bool(line.writer)
            place = columns.recordings.setdefault(line.recording, len(columns.recordings))
            for name, facts in line.models.items():
                columns.facts.setdefault(name, facts)
            continue
        if isinstance(line, ReplicaChange):
            named = tuple(_place(replica, max(place, 0), columns) for replica in line.replicas)
            columns.changes.append(ReplicasAt(started_s + line.timestamp / 1000.0, line.model, named))
            continue
        if place < 0:  # without a header
            place = columns.recordings.setdefault(f"file {path}", len(columns.recordings))
        late = columns.late
        try:
            _add(line, started_s, place, size, coarser, columns)
        except (ValueError, OverflowError) as error:
            raise TraceError(f"{path}, line {number}: {error}; {EXPECTED}") from error
        if recorded:  # a line is written when its answer has ended
            columns.late = late


def _add(request: TrafficRequest, started_s: float, recording: int, size: int, coarser: int, columns: _Columns) -> None:
    tokens, ids = request.input_length, request.hash_ids
    whole = tokens // size
    if ids and not whole <= len(ids) <= whole + 1:
        raise ValueError(f"{len(ids)} ids for {tokens} tokens in blocks of {size}")
    if request.status >= 400 and not request.ttft_ms:
        columns.refused += 1
        return
    arrival_s = started_s + request.timestamp / 1000.0
    if arrival_s < columns.last_s:
        columns.late += 1
    columns.last_s = arrival_s
    kept = ids[coarser - 1 : whole : coarser]
    columns.ids.extend(kept if not recording else [_apart(each, recording) for each in kept])
    columns.lengths.append(len(kept))
    columns.arrival_s.append(arrival_s)
    columns.prompt_tokens.append(tokens)
    columns.output_tokens.append(max(request.output_length // max(request.choices, 1), 1))
    told = request.ttft_ms > 0.0
    columns.ttft_s.append(request.ttft_ms / 1000.0 if told else float("nan"))
    columns.duration_s.append(request.duration_ms / 1000.0 if request.duration_ms else float("nan"))
    columns.cached.append(request.cached_tokens if told else -1)
    columns.predicted.append(request.predicted_tokens if told else -1)
    if request.shadow is not None:
        _count_shadow(request, request.shadow, columns)
    prefix = f"{recording}:" if recording else ""
    columns.tenant.append(columns.tenants.place(prefix + (request.tenant or "default")))
    columns.model.append(columns.models.place(request.model or "model"))
    columns.adapter.append(columns.adapters.place(request.adapter))
    columns.replica.append(_place(request.replica, recording, columns))


def _place(replica: str, recording: int, columns: _Columns) -> int:
    return columns.replicas.place(f"{recording}:{replica}" if recording and replica else replica)


def _count_shadow(request: TrafficRequest, choice: ShadowChoice, columns: _Columns) -> None:
    model = request.model or "model"
    told = columns.shadows.get(model)
    if told is None or told.policy != choice.policy:  # the last one that was set counts
        told = columns.shadows[model] = ShadowTold(choice.policy)
    told.requests += 1
    told.same += choice.same
    told.prompt_tokens += request.input_length
    told.acting_tokens += request.predicted_tokens
    told.predicted_tokens += choice.predicted_tokens


def _apart(block_id: int, recording: int) -> int:
    """Return an id that no other recording has: its upper bits are the recording's number."""
    return (block_id & ((1 << 53) - 1)) | recording << 53


def _workload(columns: _Columns, block_tokens: int, paths: Sequence[Path]) -> Workload:
    arrival_s = np.frombuffer(columns.arrival_s, np.float64)
    warnings = columns.warnings
    if columns.late and len(paths) == 1:
        warnings.append(f"{columns.late} requests stand behind later ones: they are sorted by their times")
    if (
        len(columns.recordings) > 1
        and len(paths) > 1
        and not all(name.startswith("file ") for name in columns.recordings)
    ):
        named = sum(not name.startswith("file ") for name in columns.recordings)
        if named > 1:
            warnings.append(f"the files are of {named} recordings, whose prefixes cannot be compared")
    order = np.argsort(arrival_s, kind="stable")
    lengths = np.frombuffer(columns.lengths, np.int64)
    ids, starts = _ordered(np.frombuffer(columns.ids, np.uint64), lengths, order)
    del columns.ids
    if len(ids) > MOST_IDS:
        coarser = -(-len(ids) // MOST_IDS)
        ids, starts = _coarser(ids, starts, coarser)
        block_tokens *= coarser
        warnings.append(f"blocks are taken as coarser ones of {block_tokens} tokens, because the file has so many")
    try:
        flat, path_start, sizes = segments(ids, starts)
    except ValueError as error:
        warnings.append(f"{error}: ids are taken together with those before them")
        flat, path_start, sizes = segments(chained(ids, starts), starts)
    first_s = float(arrival_s[order[0]])

    def column(values: array[Any], kind: Any) -> npt.NDArray[Any]:
        return np.frombuffer(values, kind)[order]

    return Workload(
        block_tokens=block_tokens,
        started_s=first_s,
        arrival_s=arrival_s[order] - first_s,
        prompt_tokens=column(columns.prompt_tokens, np.int32),
        output_tokens=column(columns.output_tokens, np.int32),
        tenant=column(columns.tenant, np.int32),
        model=column(columns.model, np.int32),
        replica=column(columns.replica, np.int32),
        cached_tokens=column(columns.cached, np.int32),
        predicted_tokens=column(columns.predicted, np.int32),
        ttft_s=column(columns.ttft_s, np.float32),
        duration_s=column(columns.duration_s, np.float32),
        paths=flat,
        path_start=path_start,
        sizes=sizes,
        tenants=list(columns.tenants.places),
        models=list(columns.models.places),
        replicas=list(columns.replicas.places),
        facts=columns.facts,
        changes=sorted(
            (ReplicasAt(each.at_s - first_s, each.model, each.replicas) for each in columns.changes),
            key=lambda each: each.at_s,
        ),
        warnings=tuple(warnings),
        refused=columns.refused,
        shadows=columns.shadows,
        adapter=column(columns.adapter, np.int32),
        adapters=list(columns.adapters.places),
    )


def _ordered(
    ids: npt.NDArray[np.uint64], lengths: npt.NDArray[np.int64], order: npt.NDArray[np.intp]
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """Return the ids of all prompts in another order of these, and their starts."""
    old_starts = np.concatenate(([0], np.cumsum(lengths)))[:-1]
    new_lengths = lengths[order]
    starts = np.concatenate(([0], np.cumsum(new_lengths))).astype(np.int64)
    if np.array_equal(order, np.arange(len(order))):
        return ids, starts
    ordered = np.empty_like(ids)
    for first in range(0, len(order), _REQUESTS):  # places of all ids at once would be three times as large as they
        some = slice(first, first + _REQUESTS)
        begin, end = starts[first], starts[min(first + _REQUESTS, len(order))]
        ordered[begin:end] = ids[
            np.repeat(old_starts[order[some]] - starts[:-1][some], new_lengths[some]) + np.arange(begin, end)
        ]
    return ordered, starts


def _coarser(
    ids: npt.NDArray[np.uint64], starts: npt.NDArray[np.int64], coarser: int
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """Return each ``coarser``-th id of every prompt: an id means a whole beginning."""
    within = np.arange(len(ids)) - np.repeat(starts[:-1], np.diff(starts))
    kept = within % coarser == coarser - 1
    return ids[kept], np.concatenate(([0], np.cumsum(kept)))[starts].astype(np.int64)
