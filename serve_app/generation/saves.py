"""What became of an explicit save, in words."""

from __future__ import annotations

from dataclasses import asdict

from serve_app.engine.protocol import SaveResult

SAVE_FIELD = "save_system_prompt_kv_cache"

_NOT_SAVED = {
    "over_budget": "not saved: it needs {needed_tokens} tokens of KV beside the {held_tokens} that your saves hold, "
    "and your part of a replica's pin budget (pin_budget) is {budget_tokens}",
    "too_large": "not saved: it needs {needed_tokens} tokens of KV, and a replica's whole pin budget (pin_budget) is "
    "{budget_tokens}",
    "too_short": "not saved, because the system prompt does not fill a KV block",
    "failed": "not saved, because vLLM did not hold it",
    "off": "not saved, because prefix caching is switched off, or it is vLLM's and has no pin budget (pin_budget)",
}


def save_warning(save: SaveResult | None, asked_by: str = SAVE_FIELD) -> str:
    """Return why a save is not there, "" where it is or none was asked for; ``asked_by``: the field that asked."""
    reason = _NOT_SAVED.get(save.outcome) if save is not None else None
    return f"{asked_by}: {reason.format(**asdict(save))}" if save is not None and reason else ""
