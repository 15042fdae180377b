"""A hub id -> its snapshot in huggingface_hub's cache. HF_HOME, HF_TOKEN and HF_HUB_OFFLINE apply."""

from collections.abc import Callable
from pathlib import Path

from serve_app.checkpoints.checkpoint import CheckpointError

WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt"]
UNWANTED = ["*/*", "consolidated*"]
"""Other formats of the same weights. Mistral's are also safetensors."""


def ensure_snapshot(model_id: str, revision: str | None) -> Path:
    """Return the directory of a model's files, fetched if they are not in the cache. Raises CheckpointError."""
    from huggingface_hub import snapshot_download  # the import takes seconds

    def fetch() -> str:
        return snapshot_download(model_id, revision=revision, allow_patterns=WANTED, ignore_patterns=UNWANTED)

    return _fetched(model_id, revision, fetch)


def ensure_config(model_id: str, revision: str | None) -> Path:
    """Return a model's config.json, fetched without the weights. Raises CheckpointError."""
    from huggingface_hub import hf_hub_download

    return _fetched(model_id, revision, lambda: hf_hub_download(model_id, "config.json", revision=revision))


def _fetched(model_id: str, revision: str | None, fetch: Callable[[], str]) -> Path:
    from huggingface_hub import errors

    named = model_id if revision is None else f"{model_id} at revision {revision}"
    sentences = {
        errors.GatedRepoError: f"{model_id} is gated: accept its terms on the hub, then set HF_TOKEN",
        errors.RevisionNotFoundError: f"the hub has {model_id}, but not revision {revision}",
        errors.RepositoryNotFoundError: f"the hub has no model {model_id}, or it is private and needs HF_TOKEN; there "
        "is no such local directory either",
        errors.LocalEntryNotFoundError: f"{named} is not in the hub's cache (HF_HOME), and the hub cannot be reached, "
        "or HF_HUB_OFFLINE is set",
    }
    try:
        return Path(fetch()).resolve()
    except Exception as error:  # includes errors of the hub's HTTP library, which differs by version
        sentence = next((text for kind, text in sentences.items() if isinstance(error, kind)), None)
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(sentence or f"{named} cannot be fetched from the hub: {reason}") from error
