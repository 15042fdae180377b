"""A form with a file (`multipart/form-data`), read as it arrives: the file's bytes are passed on, and never held.

Source: RFC 7578, RFC 2046.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from email.message import Message
from email.parser import Parser

from serve_app.errors import InvalidRequest

MAX_HEAD_BYTES = 16 << 10
MAX_FIELD_BYTES = 64 << 10
MAX_FIELDS = 64

TakeFile = Callable[[str, AsyncIterator[bytes]], Awaitable[None]]
"""(filename, content): reads the whole content."""


async def read_form(content_type: str, parts: AsyncIterator[bytes], take: TakeFile, name: str) -> dict[str, str]:
    """Return a form's fields; the file of the field ``name`` goes to ``take``.

    Raises InvalidRequest for a body that is no form, and the errors of ``parts`` and ``take``.
    """
    head = Message()
    head["content-type"] = content_type
    boundary = head.get_param("boundary")
    if head.get_content_type() != "multipart/form-data" or not isinstance(boundary, str) or not boundary:
        raise InvalidRequest(f"Send a form (multipart/form-data) with the file in its field {name}.", param=name)
    body, mark = _Body(parts), b"\r\n--" + boundary.encode("utf-8", "surrogateescape")
    await body.whole(mark, MAX_HEAD_BYTES)
    fields: dict[str, str] = {}
    for _ in range(MAX_FIELDS):
        if await body.whole(b"\r\n", MAX_HEAD_BYTES) == b"--":
            return fields
        about = Parser().parsestr((await body.whole(b"\r\n\r\n", MAX_HEAD_BYTES)).decode(errors="replace"), True)
        field, filename = about.get_param("name", header="content-disposition"), about.get_filename()
        if field == name:
            content = body.until(mark)
            await take(filename or "unnamed", content)
            async for _rest in content:
                pass
        else:
            fields[str(field)] = (await body.whole(mark, MAX_FIELD_BYTES)).decode(errors="replace")
    raise InvalidRequest(f"A form may have {MAX_FIELDS} fields.")


class _Body:
    def __init__(self, parts: AsyncIterator[bytes]) -> None:
        self._parts = parts
        self._ahead = bytearray(b"\r\n")  # the first boundary may be at the beginning
        self._over = False

    async def until(self, mark: bytes) -> AsyncIterator[bytes]:
        """Yield the bytes before a mark, and skip it."""
        while (at := self._ahead.find(mark)) < 0:
            if len(self._ahead) >= len(mark):
                keep = len(self._ahead) - len(mark) + 1
                yield bytes(self._ahead[:keep])
                del self._ahead[:keep]
            await self._more()
        yield bytes(self._ahead[:at])
        del self._ahead[: at + len(mark)]

    async def whole(self, mark: bytes, most: int) -> bytes:
        """Return the bytes before a mark, and skip it. Raises InvalidRequest for more than ``most``."""
        data = bytearray()
        async for part in self.until(mark):
            data += part
            if len(data) > most:
                raise InvalidRequest(f"A part of the form is longer than {most} bytes.")
        return bytes(data)

    async def _more(self) -> None:
        part = await anext(self._parts, None)
        while part == b"":
            part = await anext(self._parts, None)
        if self._over:
            raise InvalidRequest("The form ends before its last boundary.")
        if part is None:
            self._over = True
            part = b"\r\n"  # some clients leave the last line break out
        self._ahead += part
