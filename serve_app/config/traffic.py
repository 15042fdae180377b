"""The setting `traffic_log`: where the traffic of an ingress is recorded, without its text."""

import math
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator

from serve_app.config.quantities import Bytes


class TrafficLogConfig(BaseModel):
    """The fields of `traffic_log`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Path = Field(
        description="the file, such as traffic.jsonl; with several ingresses, or while an earlier one still writes it, "
        "each writes its own, and its short name comes before the suffix"
    )
    max_bytes: Bytes = Field(1_000_000_000, ge=65_536, description="a larger file is rotated to FILE.1, FILE.2 ...")
    keep: int = Field(4, ge=0, le=1000, description="rotated files that are kept")
    leave_out: list[str] = Field(default_factory=list, description="names of tenants whose requests are not recorded")
    block_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens of one block id, a multiple of block_size: larger ones make a smaller file; default: "
        "block_size",
    )

    @field_validator("path")
    @classmethod
    def _is_a_file(cls, path: Path) -> Path:
        try:
            name = path.expanduser().name
        except RuntimeError as error:
            raise ValueError(f"{path} is in the folder of an unknown user") from error
        if name in ("", ".."):
            raise ValueError(f"{path} is a folder: name a file in it, such as traffic.jsonl")
        return path

    def tokens_of_a_block(self, block_sizes: set[int]) -> int:
        """Return the tokens of an id for models of these block sizes. Raises ValueError."""
        tokens = self.block_tokens or math.lcm(*block_sizes)
        for size in block_sizes:
            if tokens % size:
                raise ValueError(f"block_tokens is {tokens}, and must be a multiple of block_size, {size}")
        return tokens
