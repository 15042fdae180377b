"""The drafter of the settings, a model or an EAGLE-3 head, and the fingerprint of the pair.

The fingerprint enters every cache key: blocks hold the KV of both models, and are of no use to another pair.
"""

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from tokenizers import Tokenizer

from serve_app.checkpoints.checkpoint import CheckpointError, CheckpointInfo, load_checkpoint_info, weights_fingerprint
from serve_app.checkpoints.limits import max_model_len
from serve_app.checkpoints.sources.resolve import resolve_model
from serve_app.config.app import AppConfig
from serve_app.config.engine import NGRAM
from serve_app.engine.speculative.eagle_config import read_eagle_config


def drafter_path(config: AppConfig) -> Path | None:
    """Return the directory of the drafter's checkpoint, None without one. Raises CheckpointError."""
    name = config.speculative_model
    return None if name is None or (name == NGRAM and config.engine_traits.ngram) else resolve_model(name)


def load_served_model(config: AppConfig) -> CheckpointInfo:
    """Return the facts of the settings' model and its drafter. Raises CheckpointError."""
    return with_drafter(load_checkpoint_info(resolve_model(config.model, config.revision)), config)


def with_drafter(info: CheckpointInfo, config: AppConfig) -> CheckpointInfo:
    """Return the facts of the model with the fingerprint of the pair; unchanged without a drafter.

    Raises CheckpointError for another vocabulary, too few positions, or a head of another model.
    """
    path = drafter_path(config)
    if path is None:
        return info
    if not config.engine_traits.built_in:
        raise CheckpointError("speculative_model: a model that drafts needs engine=torch; with engine=vllm set ngram")
    if not _fitting_head(info.path, path):
        _check_model(info, path, config)
    pair = sha256(f"{info.fingerprint}+{weights_fingerprint(path)}".encode()).hexdigest()[: len(info.fingerprint)]
    return replace(info, fingerprint=pair)


def _fitting_head(model: Path, path: Path) -> bool:
    """Return whether ``path`` holds an EAGLE-3 head. Raises CheckpointError for one of another model."""
    try:
        head = read_eagle_config(path)
        if head is not None:
            head.check_fits(model, json.loads((model / "config.json").read_text()))
    except ValueError as error:
        raise CheckpointError(f"speculative_model: {error}") from error
    return head is not None


def _check_model(info: CheckpointInfo, path: Path, config: AppConfig) -> None:
    draft = load_checkpoint_info(path)
    if draft.vocab_size != info.vocab_size:
        raise CheckpointError(
            f"speculative_model {path} has {draft.vocab_size} tokens, {info.path} has {info.vocab_size}: a drafter "
            "must have the model's own vocabulary; choose a smaller model of the same family"
        )
    different = _first_difference(info.path, path)
    if different:
        raise CheckpointError(
            f"speculative_model {path} has another vocabulary than {info.path} ({different}); choose a smaller model "
            "of the same family"
        )
    wanted = max_model_len(config, info)
    if draft.max_model_len < wanted:
        raise CheckpointError(
            f"speculative_model {path} takes {draft.max_model_len} positions, fewer than the {wanted} of {info.path}: "
            f"set max_model_len to at most {draft.max_model_len}"
        )


def _first_difference(model: Path, draft: Path) -> str:
    """Return one token that has another id in the two tokenizers, in words; "" when all have the same."""
    files = [path / "tokenizer.json" for path in (model, draft)]
    if not all(file.is_file() for file in files) or files[0].read_bytes() == files[1].read_bytes():
        return ""
    ours, theirs = (Tokenizer.from_file(str(file)).get_vocab() for file in files)
    for token in sorted(ours.keys() | theirs.keys()):
        if ours.get(token) != theirs.get(token):
            return f"the token {token!r} has id {ours.get(token)} in one and {theirs.get(token)} in the other"
    return ""
