"""A model's name in the settings -> the directory of its checkpoint, built, fetched or converted if needed."""

from collections.abc import Callable
from pathlib import Path

from serve_app.checkpoints.checkpoint import CheckpointError, CheckpointInfo, load_checkpoint_info
from serve_app.checkpoints.demo_model import RECIPES, ensure_demo_model
from serve_app.checkpoints.sources.gguf_file import ensure_converted
from serve_app.checkpoints.sources.hub import ensure_snapshot
from serve_app.checkpoints.sources.smollm2 import SMOLLM2, ensure_smollm2
from serve_app.config.app import AppConfig, is_hub_id

BUILT_IN = (SMOLLM2, *RECIPES)


def resolve_model(name_or_path: str, revision: str | None = None) -> Path:
    """Return the directory of a built-in model, a checkpoint, a GGUF file or a hub id. Raises CheckpointError."""
    path = Path(name_or_path).expanduser()
    if is_hub_id(name_or_path):
        return ensure_snapshot(name_or_path, revision)
    if revision is not None:
        raise CheckpointError(f"revision={revision} is for models of a hub (NAMESPACE/NAME), not for {name_or_path!r}")
    if name_or_path == SMOLLM2:
        return ensure_smollm2()
    if name_or_path in RECIPES:
        return ensure_demo_model(name_or_path)
    if path.is_dir():
        return path.resolve()
    if path.suffix == ".gguf" and path.is_file():
        return ensure_converted(path.resolve())
    raise CheckpointError(
        f"there is no model {name_or_path!r}; give a built-in one ({', '.join(BUILT_IN)}), a directory, a GGUF file or "
        "a hub id (NAMESPACE/NAME)"
    )


def load_served_model(config: AppConfig) -> CheckpointInfo:
    """Return the facts of the settings' model. Raises CheckpointError."""
    return load_checkpoint_info(resolve_model(config.model, config.revision))


def with_local_model(config: AppConfig, say: Callable[[str], None]) -> AppConfig:
    """Return the settings with a local model, fetched and converted if needed.

    Every model except a built-in one becomes a path, with the same name for clients, so that a later replica serves the
    same weights even if a hub's branch has moved. If the settings name no model and the default one is unavailable, the
    model is `demo`, and ``say`` receives the reason. Raises CheckpointError.
    """
    try:
        path = resolve_model(config.model, config.revision)
    except CheckpointError as error:
        if config.model != SMOLLM2:
            raise
        if "model" in config.model_fields_set:
            raise CheckpointError(f"{error}. Settings that name no model get `demo` instead") from error
        ensure_demo_model("demo")
        say(f"{error}. Serving `demo` with random weights instead")
        return config.model_copy(update={"model": "demo"})
    if config.model in BUILT_IN:
        return config
    return config.model_copy(update={"model": str(path), "served_model_name": config.model_name, "revision": None})
