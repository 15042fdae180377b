"""Outputs go to each submitter together, and a sink that fails harms nobody else."""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.engine.outbox import Outbox
from serve_app.engine.protocol import EngineOutput


def test_a_submitter_gets_the_outputs_of_a_turn_together() -> None:
    """The first output after a delivery asks for the next one, once."""
    asked: list[None] = []
    got: list[Sequence[EngineOutput]] = []

    def fails(outputs: Sequence[EngineOutput]) -> None:
        raise RuntimeError

    box, sink = Outbox(lambda: asked.append(None)), got.append
    for name, to in (("x", fails), ("a", sink), ("b", sink)):
        box.add(to, EngineOutput(name))
    assert len(asked) == 1
    box.deliver()
    assert [[output.request_id for output in batch] for batch in got] == [["a", "b"]]
    box.add(sink, EngineOutput("d"))
    assert len(asked) == 2
