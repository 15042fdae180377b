"""Public prompts of the settings."""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field, field_validator

MAX_PROMPTS = 256
MAX_PROMPT_BYTES = 1 << 20
MAX_TOTAL_BYTES = 8 << 20
PROMPT_WORD = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
"""The form of a name or version."""


class PublicPromptConfig(BaseModel):
    """One public prompt of the settings. Prompts in files belong in ``prompts_dir``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=f"^{PROMPT_WORD}$", description="clients refer to the prompt as name@version")
    version: str = Field(pattern=f"^{PROMPT_WORD}$", description="a changed text needs a new version")
    text: str = Field(description="the prompt itself")

    @property
    def ref(self) -> str:
        """The prompt's name in requests."""
        return f"{self.name}@{self.version}"

    @field_validator("text")
    @classmethod
    def _fits(cls, text: str) -> str:
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise ValueError("it holds a lone surrogate") from error
        if not 0 < size <= MAX_PROMPT_BYTES:
            raise ValueError(f"it has {size} bytes; 1 to {MAX_PROMPT_BYTES} are allowed")
        return text


def check_prompts(configs: Sequence[PublicPromptConfig]) -> None:
    """Raise ValueError for a reference given twice, and for prompts over the bounds."""
    refs = [config.ref for config in configs]
    if len(set(refs)) < len(refs):
        raise ValueError(f"public prompt {next(ref for ref in refs if refs.count(ref) > 1)} is given twice")
    if len(configs) > MAX_PROMPTS:
        raise ValueError(f"{len(configs)} public prompts are too many; at most {MAX_PROMPTS}")
    total = sum(len(config.text.encode()) for config in configs)
    if total > MAX_TOTAL_BYTES:
        raise ValueError(f"the public prompts have {total} bytes together; at most {MAX_TOTAL_BYTES}")
