"""The promoted version of each prompt name, stored in a file. Of two states, all ingresses use the higher one."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from serve_app.errors import InvalidRequest
from serve_app.prompts.lock import PromptError, read_bounded, write_atomically

STATE = "promotions.json"


class Cutover(msgspec.Struct, frozen=True, omit_defaults=True):
    """Versions of one name. ``previous``: "" for none."""

    promoted: str
    previous: str = ""


class Cutovers(msgspec.Struct, frozen=True):
    """All names' cut-overs. ``serial`` grows with each change. ``by`` distinguishes two simultaneous changes."""

    serial: int = 0
    by: str = ""
    names: Mapping[str, Cutover] = {}

    def newer_than(self, other: Cutovers) -> bool:
        """Return whether this state replaces the other. Of two different states, exactly one does."""
        return (self.serial, self.by) > (other.serial, other.by)

    def promoted(self, name: str, version: str) -> Cutovers:
        """Return the state after the promotion of a version."""
        before = self.names.get(name, Cutover(""))
        previous = before.promoted if before.promoted != version else before.previous
        return self._with(name, Cutover(version, previous))

    def rolled_back(self, name: str) -> Cutovers:
        """Return the state after a return to the previous version. Raises InvalidRequest."""
        before = self.names.get(name)
        if before is None or not before.previous:
            raise InvalidRequest(f"There is no earlier version of {name[:64]!r} to return to.", param="prompt_ref")
        return self._with(name, Cutover(before.previous))

    def refs(self, name: str) -> list[str]:
        """Return the references of a name's versions in use, the promoted one first."""
        cutover = self.names.get(name, Cutover(""))
        return [f"{name}@{version}" for version in (cutover.promoted, cutover.previous) if version]

    def check(self, refs: Collection[str]) -> None:
        """Raise PromptError if a version in use is not among ``refs``."""
        missing = [ref for name in self.names for ref in self.refs(name) if ref not in refs]
        if missing:
            raise PromptError(f"{missing[0]} is in use ({STATE}) and not locked; put it back, or roll back first")

    def _with(self, name: str, cutover: Cutover) -> Cutovers:
        return Cutovers(self.serial + 1, secrets.token_hex(4), {**self.names, name: cutover})


def read_cutovers(directory: Path) -> Cutovers:
    """Return the last written state, or an empty one without a file. Raises PromptError."""
    file = directory / STATE
    try:
        return msgspec.json.decode(read_bounded(file, 1 << 20), type=Cutovers)
    except FileNotFoundError:
        return Cutovers()
    except (OSError, ValueError) as error:
        raise PromptError(f"cannot read {file}: {error}") from error


def write_cutovers(directory: Path, cutovers: Cutovers) -> None:
    """Write the state for later starts. Raises OSError."""
    write_atomically(directory / STATE, msgspec.json.format(msgspec.json.encode(cutovers)) + b"\n")
