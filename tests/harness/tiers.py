"""Settings of tiers in the sizes of tests."""

from pathlib import Path
from typing import Any

from serve_app.config.cache import CacheSection


def tier_settings(host: int = 0, disk: int = 0, directory: Path | None = None, **others: Any) -> CacheSection:
    """Return settings with these bytes of host memory and of a directory; no value is too small."""
    return CacheSection.model_construct(
        host_cache_bytes=host, disk_cache_bytes=disk, disk_cache_dir=directory, **others
    )
