"""The lines of a batch's input: found in its chunks, checked, and known by their places from then on.

Blank lines cost a look at their bytes, and what has many lines is worked on in parts.
"""

import re
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import msgspec

from serve_app.batch.batch_file import BatchRequest, parse_line
from serve_app.batch.batches import LineError
from serve_app.batch.order import beginnings
from serve_app.errors import InvalidRequest, RequestTooLarge

MAX_LINE_BYTES = 32 << 20
PART_LINES = 1000
"""The most lines that are found, or checked, at once."""
_BLANK = re.compile(rb"\s*")
_STREAMING = ("stream", "stream_options")
"""Fields that have no effect on an answer in a file."""


@dataclass(frozen=True, slots=True)
class RawLine:
    """A line that is not blank: its number from 1, its bytes, and their ``start`` in the content."""

    number: int
    start: int
    raw: bytes


@dataclass(frozen=True, slots=True)
class InputLine:
    """A request of the input, ``start`` bytes after its beginning."""

    start: int
    length: int
    model: str
    beginnings: bytes


async def lines_of(chunks: AsyncIterator[bytes]) -> AsyncIterator[list[RawLine]]:
    """Yield the lines of a content that are not blank, some at a time. Raises RequestTooLarge."""
    rest, at, number, looked = bytearray(), 0, 1, 0
    async for chunk in chunks:
        rest += chunk
        begin, lines = 0, list[RawLine]()
        while True:
            blank = _end_of_blank(rest, begin)
            number += rest.count(b"\n", begin, blank)
            begin = blank
            if (end := rest.find(b"\n", max(begin, looked))) < 0:
                break
            lines.append(RawLine(number, at + begin, bytes(rest[begin:end])))
            number, begin = number + 1, end + 1
            if len(lines) == PART_LINES:
                yield lines
                lines = []
        del rest[:begin]
        at, looked = at + begin, len(rest)
        if looked > MAX_LINE_BYTES:
            raise RequestTooLarge(f"A line may have {MAX_LINE_BYTES >> 20} MiB.")
        if lines:
            yield lines
    if rest:
        yield [RawLine(number, at, bytes(rest))]


def _end_of_blank(text: bytearray, begin: int) -> int:
    match = _BLANK.match(text, begin)
    assert match is not None
    return match.end()


def checked(lines: Sequence[RawLine], endpoint: str) -> list[tuple[int, str, InputLine | LineError]]:
    """Return each line's number, its custom_id, and what is known of it; or, without a custom_id, what is wrong."""
    return [(line.number, *_checked(line, endpoint)) for line in lines]


def _checked(line: RawLine, endpoint: str) -> tuple[str, InputLine | LineError]:
    try:
        request = parse_line(line.raw)
    except InvalidRequest as error:
        code = "invalid_json_line" if error.param is None else "invalid_request"
        return "", LineError(code, error.message, line.number, error.param)
    if request.url != endpoint:
        message = f"url is {request.url}, and the batch's endpoint {endpoint}."
        return "", LineError("mismatched_url", message, line.number, "url")
    model = sys.intern(str(request.body.get("model")))
    return request.custom_id, InputLine(line.start, len(line.raw), model, beginnings(request.body))


def request_of(raw: bytes) -> tuple[BatchRequest, bytes]:
    """Return a line's request, and the body to ask for."""
    request = parse_line(raw)
    return request, msgspec.json.encode({name: value for name, value in request.body.items() if name not in _STREAMING})
