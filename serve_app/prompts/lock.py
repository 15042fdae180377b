"""A directory of registered prompts: `NAME/VERSION.txt`, `prompts.lock` with each SHA-256, `.locked/` with copies."""

import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, AnyStr

import yaml

from serve_app.config.files import read_yaml
from serve_app.config.prompts import MAX_PROMPT_BYTES, MAX_PROMPTS, MAX_TOTAL_BYTES, PROMPT_WORD
from serve_app.errors import unread

LOCK = "prompts.lock"
COPIES = ".locked"

_WORD, _TENANT = re.compile(PROMPT_WORD), re.compile(rf"{PROMPT_WORD}(~\d+)?")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_HEADER = "# Written by `warmpath prompts add`. A version never changes; its file is checked against this.\n"


class PromptError(ValueError):
    """A prompt or the lock is invalid. The message contains the remedy."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One version. ``tenant``: its only tenant, None: public. ``digest``: ``sha256:`` and 64 hex digits.

    ``digest`` is empty for a prompt of the settings. ``text`` is empty for an entry of the lock.
    """

    name: str
    version: str
    text: str = ""
    tenant: str | None = None
    digest: str = ""

    @property
    def ref(self) -> str:
        """The prompt's reference in requests."""
        return f"{self.name}@{self.version}"


class PromptDirectory:
    """The prompts below ``path``. Every call reads the current files."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def locks(self) -> list[Prompt]:
        """Return the entries of ``prompts.lock``, or none without a lock. Raises PromptError."""
        file = self._path / LOCK
        if not self._path.is_dir():
            raise PromptError(f"there is no directory {self._path}; `warmpath prompts add` makes one")
        try:
            entries = read_yaml(read_bounded(file, 1 << 20).decode())
            locks = list(_locks_of({} if entries is None else entries))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise PromptError(f"cannot read {file}: {unread(error)}") from error
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise PromptError(
                f"{file} is no lock of prompts ({unread(error)}); restore it from version control"
            ) from error
        if len(locks) > MAX_PROMPTS:
            raise PromptError(f"{file} has {len(locks)} prompts; at most {MAX_PROMPTS}")
        return locks

    def read(self) -> list[Prompt]:
        """Return all prompts. Raises PromptError for the first that differs from its lock."""
        contents = [(lock, self._bytes(lock)) for lock in self.locks()]
        total = sum(len(raw) for _, raw in contents)
        if total > MAX_TOTAL_BYTES:
            raise PromptError(f"the prompts in {self._path} have {total} bytes together; at most {MAX_TOTAL_BYTES}")
        return [replace(lock, text=raw.decode()) for lock, raw in contents]

    def problems(self) -> list[str]:
        """Return the problems: files that differ from the lock, or are not locked. Raises PromptError."""
        locks, problems = self.locks(), []
        for lock in locks:
            try:
                self._bytes(lock)
            except PromptError as error:
                problems.append(str(error))
        locked_files = {self._file(lock) for lock in locks}
        for file in sorted(self._path.glob("*/*.txt")):
            if file not in locked_files and not file.parent.name.startswith("."):
                ref = f"{file.parent.name}@{file.stem}"
                problems.append(f"prompt {ref}: {file} is not in {LOCK} (run: warmpath prompts add {ref})")
        return problems

    def add(self, ref: str, source: Path | None, tenant: str | None) -> Prompt:
        """Lock a version: the bytes of ``source``, else of its file. ``tenant`` None: as other versions, else public.

        Raises PromptError, also if other bytes are locked, because a published version never changes.
        """
        name, separator, version = ref.partition("@")
        if not separator or not _WORD.fullmatch(name) or not _WORD.fullmatch(version):
            raise PromptError("a prompt is NAME@VERSION, each of 1 to 64 letters, digits and _ . -")
        if tenant is not None and not _TENANT.fullmatch(tenant):
            raise PromptError("a tenant's name has 1 to 64 letters, digits and _ . -, and perhaps ~ and a number")
        self._path.mkdir(parents=True, exist_ok=True)
        locks = self.locks()
        sibling = next((lock for lock in locks if lock.name == name), None)
        if sibling is not None and tenant not in (None, sibling.tenant):
            owner = f"the tenant {sibling.tenant}'s" if sibling.tenant else "public"
            raise PromptError(f"{name} is {owner}, with all its versions; take another name")
        lock = Prompt(name, version, "", sibling.tenant if sibling is not None else tenant)
        raw = _prompt_bytes(ref, source or self._file(lock))
        lock = replace(lock, digest=_digest(raw))
        before = next((other for other in locks if other.ref == ref), None)
        if before is not None and before != lock:
            where = self._difference(before, raw)
            raise PromptError(
                f"{ref} is locked as {before.digest}, and this is {lock.digest}; {where}. Lock it as a new version"
            )
        if before is None and len(locks) == MAX_PROMPTS:
            raise PromptError(f"there are {MAX_PROMPTS} prompts already; remove unused versions from {LOCK}")
        for file in (self._file(lock), self._copy(lock)):
            file.parent.mkdir(exist_ok=True)
            write_atomically(file, raw)
        if before is None:
            write_atomically(self._path / LOCK, (_HEADER + _dumped([*locks, lock])).encode())
        return lock

    def _file(self, lock: Prompt) -> Path:
        return self._path / lock.name / f"{lock.version}.txt"

    def _copy(self, lock: Prompt) -> Path:
        return self._path / COPIES / lock.digest.removeprefix("sha256:")

    def _bytes(self, lock: Prompt) -> bytes:
        file = self._file(lock)
        raw = _prompt_bytes(lock.ref, file)
        if _digest(raw) != lock.digest:
            where = self._difference(lock, raw)
            raise PromptError(f"prompt {lock.ref}: {file} has {_digest(raw)}, and {LOCK} has {lock.digest}; {where}")
        return raw

    def _difference(self, lock: Prompt, raw: bytes) -> str:
        """Describe the first difference from the locked bytes, if an intact copy of them exists."""
        copy = self._copy(lock)
        try:
            locked = read_bounded(copy, MAX_PROMPT_BYTES)
        except OSError:
            return f"which byte differs cannot be told: there is no copy of the locked bytes, {copy}"
        if _digest(locked) != lock.digest:
            return f"which byte differs cannot be told: {copy} was changed, too"
        at = first_difference(locked, raw)
        return f"the first differing byte is {at}: {_byte_text(locked, at)} was locked, {_byte_text(raw, at)} is there"


def first_difference(one: AnyStr, other: AnyStr) -> int:
    """Return the offset of the first differing character or byte, or the shorter length if one is a prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))


def read_bounded(file: Path, most: int) -> bytes:
    """Return a file's bytes. Raises OSError, and ValueError for more than ``most`` bytes."""
    with file.open("rb") as opened:
        raw = opened.read(most + 1)
    if len(raw) > most:
        raise ValueError(f"it has over {most} bytes")
    return raw


def write_atomically(file: Path, raw: bytes) -> None:
    """Replace a file's bytes atomically. Raises OSError."""
    part = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        part.write_bytes(raw)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def _prompt_bytes(ref: str, file: Path) -> bytes:
    try:
        raw = read_bounded(file, MAX_PROMPT_BYTES)
        raw.decode()
    except FileNotFoundError:
        raise PromptError(f"prompt {ref}: there is no {file}") from None
    except UnicodeDecodeError as error:
        raise PromptError(f"prompt {ref}: {file} is not UTF-8 at byte {error.start}") from None
    except (OSError, ValueError) as error:
        raise PromptError(f"prompt {ref}: cannot read {file}: {unread(error)}") from error
    if not raw:
        raise PromptError(f"prompt {ref}: {file} is empty")
    return raw


def _digest(raw: bytes) -> str:
    return f"sha256:{sha256(raw).hexdigest()}"


def _byte_text(raw: bytes, at: int) -> str:
    return repr(raw[at : at + 16])[1:] if at < len(raw) else "the end"


def _locks_of(entries: Mapping[str, Any]) -> Iterable[Prompt]:
    for name, entry in entries.items():
        tenant = entry.get("tenant")
        for version, digest in entry["versions"].items():
            valid = all(isinstance(word, str) and _WORD.fullmatch(word) for word in (name, version))
            if not valid or not (tenant is None or (isinstance(tenant, str) and _TENANT.fullmatch(tenant))):
                raise ValueError(f"{name!r} {version!r} has an invalid name")
            if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
                raise ValueError(f"the digest of {name}@{version} is invalid")
            yield Prompt(name, version, "", tenant, digest)


def _dumped(locks: Iterable[Prompt]) -> str:
    entries: dict[str, dict[str, Any]] = {}
    for lock in locks:
        entry = entries.setdefault(lock.name, {"tenant": lock.tenant} if lock.tenant is not None else {})
        entry.setdefault("versions", {})[lock.version] = lock.digest
    return yaml.safe_dump(entries, width=200)
