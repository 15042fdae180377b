"""Outputs of an engine, for tests."""

from typing import Any

from serve_app.engine.protocol import EngineOutput, FinishReason, FirstToken


def output(
    token_ids: tuple[int, ...] = (),
    first: FirstToken | None = None,
    finish_reason: FinishReason | None = None,
    **more: Any,
) -> EngineOutput:
    """Return an output of a request whose id does not matter."""
    return EngineOutput("r", token_ids, first=first, finish_reason=finish_reason, **more)
