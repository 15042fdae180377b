"""Outputs wait together until they may leave; the first and the last ones do not wait."""

from __future__ import annotations

import pytest

from serve_app.engine.protocol import EngineOutput, FinishReason
from serve_app.replica.token_streams import TokenStream


def output(token: int, finish_reason: FinishReason | None = None) -> EngineOutput:
    return EngineOutput("r", (token,), finish_reason=finish_reason)


def test_between_first_and_last_outputs_leave_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten steps of 30 ms: without an interval ten leave, with one of 100 ms four; no token is lost or moved."""

    def leaving(interval_s: float) -> list[list[int]]:
        now_s = 50.0
        monkeypatch.setattr("serve_app.replica.token_streams.time.monotonic", lambda: now_s)
        stream, left = TokenStream(interval_s), []
        for token in range(10):
            ready = stream.push(output(token, "length" if token == 9 else None))
            if ready is not None:
                left.append(list(ready.token_ids))
            now_s += 0.03
        return left

    assert leaving(0.0) == [[token] for token in range(10)]
    assert leaving(0.1) == [[0], [1, 2, 3, 4], [5, 6, 7, 8], [9]]
