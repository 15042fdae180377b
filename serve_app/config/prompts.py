"""Public prompts as the settings file names them: read once, checked, bounded."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_PROMPTS = 256
MAX_PROMPT_BYTES = 1 << 20
MAX_TOTAL_BYTES = 8 << 20
PROMPT_WORD = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
"""A name, or a version."""


class PublicPromptConfig(BaseModel):
    """One public prompt as the settings name it: its ``text``, or a UTF-8 ``file`` that is read once, here.

    After validation the text is there, the file is forgotten and ``sha256`` is the text's: every process of a
    deployment gets the same bytes, whatever becomes of the file. Raises ValueError when they are not those expected.
    """

    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=f"^{PROMPT_WORD}$", description="clients refer to the prompt as name@version")
    version: str = Field(pattern=f"^{PROMPT_WORD}$", description="other text needs another version")
    text: str | None = Field(None, description="the prompt itself, or:")
    file: Path | None = Field(None, description="a UTF-8 file that holds it, to the last byte")
    sha256: str | None = Field(None, description="digest of its UTF-8 bytes; another one stops the start")

    @property
    def ref(self) -> str:
        """What a request calls it."""
        return f"{self.name}@{self.version}"

    @model_validator(mode="after")
    def _read(self) -> Self:
        if (self.text is None) == (self.file is None):
            raise ValueError(f"public prompt {self.ref} needs either text or file")
        try:
            if self.file is not None:
                if self.file.stat().st_size > MAX_PROMPT_BYTES:
                    raise ValueError(f"public prompt {self.ref}: {self.file} is over {MAX_PROMPT_BYTES} bytes")
                self.text = self.file.read_bytes().decode()
            raw = (self.text or "").encode()
        except OSError as error:
            raise ValueError(f"public prompt {self.ref}: cannot read {self.file} ({error.strerror})") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"public prompt {self.ref}: {self.file} is not UTF-8 at byte {error.start}") from error
        except UnicodeEncodeError as error:
            raise ValueError(f"public prompt {self.ref} holds a lone surrogate") from error
        self.file = None
        if not 0 < len(raw) <= MAX_PROMPT_BYTES:
            raise ValueError(f"public prompt {self.ref} has {len(raw)} bytes; it may have 1 to {MAX_PROMPT_BYTES}")
        digest = sha256(raw).hexdigest()
        expected = (self.sha256 or digest).removeprefix("sha256:").lower()
        if expected != digest:
            raise ValueError(f"public prompt {self.ref} has sha256 {digest}, and {expected} was expected")
        self.sha256 = digest
        return self


def check_prompts(configs: Sequence[PublicPromptConfig]) -> None:
    """Raise ValueError where a reference is given twice, or the registry is over its bounds."""
    refs = [config.ref for config in configs]
    if len(set(refs)) < len(refs):
        raise ValueError(f"public prompt {next(ref for ref in refs if refs.count(ref) > 1)} is given twice")
    if len(configs) > MAX_PROMPTS:
        raise ValueError(f"{len(configs)} public prompts are too many; at most {MAX_PROMPTS}")
    total = sum(len((config.text or "").encode()) for config in configs)
    if total > MAX_TOTAL_BYTES:
        raise ValueError(f"the public prompts have {total} bytes together; at most {MAX_TOTAL_BYTES}")
