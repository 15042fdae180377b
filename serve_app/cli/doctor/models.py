"""Which models are here already, and whether others could be fetched. Fetches nothing."""

from __future__ import annotations

import os
from pathlib import Path

from serve_app.checkpoints.model_cache import default_cache_dir
from serve_app.checkpoints.sources.smollm2 import SMOLLM2
from serve_app.cli.doctor.finding import Finding, warning

_TRUE = ("1", "ON", "YES", "TRUE")


def models() -> Finding:
    """Look into the caches of made and of fetched models."""
    cache = default_cache_dir()
    made = [path.name for path in sorted(cache.glob("*")) if path.is_dir() and not path.name.startswith(".")]
    fetched = [path.name for path in hub_cache().glob("models--*")]
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in _TRUE
    default = any(name.startswith(SMOLLM2) for name in made)
    found = (
        f"{'the default model is' if default else 'the default model is not'} in {cache}; "
        f"{len(fetched)} of the hub's in {hub_cache()}{'; HF_HUB_OFFLINE is set' if offline else ''}"
    )
    if offline and not default and not fetched:
        advice = "unset HF_HUB_OFFLINE once, or serve a directory (--model), or the built-in demo"
        return warning("models", found, advice)
    return Finding("models", "ok", found)


def hub_cache() -> Path:
    """Return where huggingface_hub keeps what it fetched."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
