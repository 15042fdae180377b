"""Everything that can grow at a door: each field of each body, each header, path, query, form and file."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from tests.serve_app.ingress.laboratory.doors import Door, Field, fields_of, samples
from tests.serve_app.ingress.laboratory.house import KEY, OPERATOR, Headers, House
from tests.serve_app.ingress.laboratory.shapes import UNITS, shapes, text, texts

MOST_HEADER_BYTES = 60 << 10
"""Below the server's own bound."""
BOUNDARY = b"----b"


class Growing(NamedTuple):
    """A request that grows. ``sent``: (size) -> target, headers, body; ``most``: its largest size, None for no own."""

    name: str
    door: Door
    sent: Callable[[int], tuple[bytes, Headers, bytes | list[bytes]]]
    most: int | None = None

    async def work(self, house: House, size: int) -> str:
        """Ask; return what is wrong with the answer, "" for nothing."""
        target, headers, body = await asyncio.to_thread(self.sent, size)  # not on the loop that is watched
        key = OPERATOR if self.door.of_operators else KEY
        said = await house.ask(self.door.method, target, headers, body, key=key)
        wrong = [*house.complaints.texts]
        if not 200 <= said.status < 500 and said.status != 503:
            wrong.append(f"{said.status} {bytes(said.body[:300])!r}")
        house.complaints.texts.clear()
        return "\n".join(wrong)[:2000]


def growing_fields(door: Door, chosen: Callable[[int, Field], slice]) -> Iterator[Growing]:
    """Yield every field of a door's bodies with some shapes. ``chosen``: (a field's number, it) -> which shapes."""
    known = list(shapes().items())

    def shaped(field: Field, shape: Any) -> Callable[[int], tuple[bytes, Headers, bytes]]:
        return lambda size: (door.target(), (), field.holding(shape(size, field.value)))

    def itself(field: Field, *, listed: bool) -> Callable[[int], tuple[bytes, Headers, bytes]]:
        return lambda size: (door.target(), (), field.inside_itself(size, listed=listed))

    for number, field in enumerate(fields_of(door)):
        able = [(name, shape) for name, shape in known if shape(64, field.value) is not None]
        for name, shape in able[chosen(number, field)]:
            yield Growing(f"{field.name}: {name}", door, shaped(field, shape))
        for listed in (False, True) if able[chosen(number, field)] else ():
            yield Growing(f"{field.name}: inside itself{' in lists' * listed}", door, itself(field, listed=listed))


def growing_heads(
    door: Door, headers: Sequence[str] = (), query: Sequence[str] = (), units: Sequence[str] = ()
) -> Iterator[Growing]:
    """Yield what a door's path, query and headers may hold. ``headers``, ``query``: the names that are looked for."""
    body = json.dumps(samples()[door.bodies[0]][0]).encode() if door.bodies and door.bodies[0] != "form" else b""
    at = f"{door.method} {door.path}"

    def of_head(name: str, of: Callable[[int], tuple[bytes, Headers]]) -> Growing:
        return Growing(f"{at} {name}", door, lambda size: (*of(size), body), MOST_HEADER_BYTES)

    def of_path(part: str, unit: str) -> Callable[[int], tuple[bytes, Headers]]:
        return lambda size: (door.target(**{part: quote(text(unit, size // 3))}), ())

    def of_query(name: str, unit: str) -> Callable[[int], tuple[bytes, Headers]]:
        return lambda size: (door.target() + f"?{name}={quote(text(unit, size // 3))}".encode(), ())

    def of_raw_query(one: bytes) -> Callable[[int], tuple[bytes, Headers]]:
        return lambda size: (door.target() + b"?" + one * (size // len(one)), ())

    def of_header(name: str, unit: str) -> Callable[[int], tuple[bytes, Headers]]:
        return lambda size: (door.target(), [(name.encode(), text(unit, size).encode())])

    def often(name: str) -> Callable[[int], tuple[bytes, Headers]]:
        return lambda size: (door.target(), [(name.encode(), b"a")] * (size // len(name)))

    for unit in units:
        for part in door.parameters:
            yield of_head(f"path {part}: {unit}", of_path(part, texts()[unit]))
        for name in query:
            yield of_head(f"?{name}=: {unit}", of_query(name, texts()[unit]))
        for name in headers:
            yield of_head(f"header {name}: {unit}", of_header(name, texts()[unit]))
    for name in (*headers, "x-other"):
        yield of_head(f"header {name}, often", often(name))
    yield of_head("headers", lambda size: (door.target(), [(b"x-%d" % number, b"a") for number in range(size // 8)]))
    yield of_head("header's name", lambda size: (door.target(), [(b"x" * size, b"a")]))
    for one in (b"a=1&", b"&", b"=", b"%", b"+"):
        yield of_head(f"query of {one.decode()}", of_raw_query(one))


def growing_paths(units: list[str]) -> Iterator[Growing]:
    """Yield unknown paths."""

    def of(begin: str, unit: str) -> Callable[[int], tuple[bytes, Headers, bytes]]:
        return lambda size: (f"{begin}{text(unit, size)}".encode(), (), b"")

    for name in units:
        for begin in ("/", "/v1/", "/v1/messages/", "/page/"):
            sent = of(begin, quote(texts()[name]))
            yield Growing(f"GET {begin}: {name}", Door("GET", begin, ()), sent, MOST_HEADER_BYTES)


def form(parts: list[tuple[bytes, bytes]], boundary: bytes = BOUNDARY) -> bytes:
    """Return a form of (head, content)."""
    return b"".join(b"--%b\r\n%b\r\n\r\n%b\r\n" % (boundary, *part) for part in parts) + b"--%b--\r\n" % boundary


def disposition(name: bytes, filename: bytes | None = None) -> bytes:
    """Return the head of a part."""
    file = b"" if filename is None else b'; filename="%b"' % filename
    return b'Content-Disposition: form-data; name="%b"%b' % (name, file)


def growing_forms(door: Door) -> Iterator[Growing]:
    """Yield forms with a file: its content, names, heads, parts, boundary, and how it arrives."""
    said = [(b"content-type", b"multipart/form-data; boundary=" + BOUNDARY)]
    purpose = (disposition(b"purpose"), b"batch")

    def of(name: str, parts: Callable[[int], list[tuple[bytes, bytes]]], most: int | None = None) -> Growing:
        return Growing(f"POST {door.path} {name}", door, lambda size: (door.target(), said, form(parts(size))), most)

    def of_unit(unit: str, raw: bytes) -> Iterator[Growing]:
        def long(size: int) -> bytes:
            return raw * (size // len(raw))

        yield of(f"content: {unit}", lambda size: [purpose, (disposition(b"file", b"a"), long(size))])
        yield of(f"file name: {unit}", lambda size: [(disposition(b"file", long(size)), b"a"), purpose])
        yield of(f"field name: {unit}", lambda size: [(disposition(long(size)), b"a"), purpose])
        yield of(f"purpose: {unit}", lambda size: [(disposition(b"purpose"), long(size))])

    for unit, one in UNITS.items():
        yield from of_unit(unit, one.encode())
    yield of("parts", lambda size: [(disposition(b"x"), b"a")] * (size // 60))
    yield of("heads", lambda size: [(disposition(b"file", b"a") + b"\r\nx: y" * (size // 6), b"a"), purpose])
    yield of("folded heads", lambda size: [(disposition(b"file", b"a") + b"\r\n y" * (size // 4), b"a"), purpose])
    yield of("parameters", lambda size: [(disposition(b"file", b"a") + b"; a=b" * (size // 5), b"a"), purpose])
    yield of("continued parameters", lambda size: [
        (disposition(b"file") + b"".join(b"; filename*%d=a" % n for n in range(size // 16)), b"a"), purpose
    ])  # fmt: skip
    yield of("beginnings of the boundary", lambda size: [
        purpose, (disposition(b"file", b"a"), (b"\r\n--" + BOUNDARY[:-1]) * (size // 8))
    ])  # fmt: skip
    yield Growing(
        f"POST {door.path} boundary", door, lambda size: (
            door.target(), [(b"content-type", b"multipart/form-data; boundary=" + b"b" * size)], b"--" + b"b" * size
        ), MOST_HEADER_BYTES,
    )  # fmt: skip
    yield Growing(
        f"POST {door.path} parameters of the type", door, lambda size: (
            door.target(), [(b"content-type", b"multipart/form-data" + b"; a=b" * (size // 5))], b"--"
        ), MOST_HEADER_BYTES,
    )  # fmt: skip

    def trickle(size: int) -> tuple[bytes, Headers, list[bytes]]:
        raw = form([purpose, (disposition(b"file", b"a"), b"\n" * size)])
        return door.target(), said, [raw[at : at + 16] for at in range(0, len(raw), 16)]

    yield Growing(f"POST {door.path} in small parts", door, trickle)
