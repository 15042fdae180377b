"""Which version of a prompt its name alone means, kept in a file. Of two states all ingresses take the higher one."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from serve_app.errors import InvalidRequest
from serve_app.prompts.lock import PromptError, read_bounded, write_atomically

STATE = "promotions.json"


class Cutover(msgspec.Struct, frozen=True, omit_defaults=True):
    """Versions of one name; ``previous`` "" for none."""

    promoted: str
    previous: str = ""


class Cutovers(msgspec.Struct, frozen=True):
    """All names' cut-overs. ``serial`` grows with each change; ``by`` tells two changes made at once apart."""

    serial: int = 0
    by: str = ""
    names: Mapping[str, Cutover] = {}

    def newer_than(self, other: Cutovers) -> bool:
        """Say whether this is to replace the other; of two that differ, one is."""
        return (self.serial, self.by) > (other.serial, other.by)

    def promoted(self, name: str, version: str) -> Cutovers:
        """Return what is so once a version is what the name means."""
        before = self.names.get(name, Cutover(""))
        previous = before.promoted if before.promoted != version else before.previous
        return self._with(name, Cutover(version, previous))

    def rolled_back(self, name: str) -> Cutovers:
        """Return what is so with the version before. Raises InvalidRequest."""
        before = self.names.get(name)
        if before is None or not before.previous:
            raise InvalidRequest(f"There is no earlier version of {name[:64]!r} to go back to.", param="prompt_ref")
        return self._with(name, Cutover(before.previous))

    def refs(self, name: str) -> list[str]:
        """Return the versions of a name that are in use, as requests call them, the promoted one first."""
        cutover = self.names.get(name, Cutover(""))
        return [f"{name}@{version}" for version in (cutover.promoted, cutover.previous) if version]

    def check(self, refs: Collection[str]) -> None:
        """Raise PromptError where a version that is in use is not among ``refs``."""
        missing = [ref for name in self.names for ref in self.refs(name) if ref not in refs]
        if missing:
            raise PromptError(f"{missing[0]} is in use ({STATE}) and not locked; put it back, or roll back first")

    def _with(self, name: str, cutover: Cutover) -> Cutovers:
        return Cutovers(self.serial + 1, secrets.token_hex(4), {**self.names, name: cutover})


def read_cutovers(directory: Path) -> Cutovers:
    """Return what was written last; nothing is promoted where there is no file. Raises PromptError."""
    file = directory / STATE
    try:
        return msgspec.json.decode(read_bounded(file, 1 << 20), type=Cutovers)
    except FileNotFoundError:
        return Cutovers()
    except (OSError, ValueError) as error:
        raise PromptError(f"cannot read {file}: {error}") from error


def write_cutovers(directory: Path, cutovers: Cutovers) -> None:
    """Write the state for whoever starts next. Raises OSError."""
    write_atomically(directory / STATE, msgspec.json.format(msgspec.json.encode(cutovers)) + b"\n")
