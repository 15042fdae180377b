"""A JSON body read field by field: every wrong value becomes a 400 that names the field and says what to send.

Owns parsing and the sentences. Knows no API: which fields there are and what they mean is the reader's business.
A field that is null counts as absent; a field nobody asks for is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from serve_app.errors import InvalidRequest

INT64 = 2**63


class Body:
    """One JSON object of a request. ``path`` goes before field names in messages, as in ``stream_options.``."""

    def __init__(self, fields: Mapping[str, Any], path: str = "") -> None:
        self._fields = fields
        self._path = path

    @classmethod
    def parse(cls, raw: bytes) -> Body:
        """Read the outermost object. Raises InvalidRequest for anything but one valid JSON object in UTF-8."""
        try:
            value = msgspec.json.decode(raw)
        except (ValueError, RecursionError) as error:  # also: invalid UTF-8, lone surrogates, numbers out of range
            said = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:120]
            raise InvalidRequest(f"The body is not valid JSON in UTF-8 ({said}); send one JSON object.") from error
        if not isinstance(value, dict):
            raise InvalidRequest('The body must be a JSON object, with fields like "model".')
        return cls(value)

    def raw(self, name: str) -> Any:
        """Return a field's value as it came; None when absent."""
        return self._fields.get(name)

    def fault(self, name: str, demand: str) -> InvalidRequest:
        """Return the error that ``name`` must be as ``demand`` says."""
        return InvalidRequest(f"{self._path}{name} must be {demand}.", param=f"{self._path}{name}")

    def integer(self, name: str, low: int, high: int) -> int | None:
        """Return a whole number from ``low`` to ``high`` (JSON's 3.0 is whole too), or None."""
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or not low <= value <= high:
            raise self.fault(name, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, demand: str, low: float, high: float, *, low_excluded: bool = False) -> float | None:
        """Return a number in the range, or None; ``demand`` says the range in words."""
        value = self.raw(name)
        if value is None:
            return None
        if type(value) not in (int, float) or not low <= value <= high or (low_excluded and value == low):
            raise self.fault(name, demand)
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fault(name, "true or false")
        return value

    def text(self, name: str, max_chars: int) -> str | None:
        """Return a string of 1 to ``max_chars`` characters, or None."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, str) or not 1 <= len(value) <= max_chars:
            raise self.fault(name, f"a string of 1 to {max_chars} characters")
        return value

    def object(self, name: str) -> Body | None:
        """Return a nested object, or None."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fault(name, "an object")
        return Body(value, f"{self._path}{name}.")

    def refuse_unless(self, name: str, *neutral: Any) -> None:
        """Raise InvalidRequest when a field that has no effect here holds anything but a value without effect."""
        value = self.raw(name)
        if value is not None and not any(value == harmless for harmless in neutral):
            raise InvalidRequest(
                f"{self._path}{name} is not supported by this version; leave it out.", param=f"{self._path}{name}"
            )
