"""An engine without cache, copies, saves, adapters or tiers, in the product's own replica: it repeats the prompt."""

import threading
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any
from unittest import mock

from ray.serve import Application

from router.protocol.events import LoadReport, StatsReport
from serve_app import app
from serve_app.config.engine import ENGINES, EngineTraits
from serve_app.engine.protocol import (
    Engine,
    EngineMaker,
    EngineOutput,
    EngineRequest,
    FirstToken,
    OutputSink,
    Prefilled,
    SaveResult,
)
from serve_app.engine.reports import LoadReports, PrefillRate
from serve_app.replica.replica import Replica


class TinyEngine(Engine):
    """One request at a time, in a thread."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[EngineRequest, OutputSink] | None] = SimpleQueue()
        self._live: set[str] = set()
        self._reports = LoadReports(64, 64, lambda: PrefillRate(0.0))
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._waiting.put(None)

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        self._reports.arrived(request.decision)
        self._live.add(request.request_id)
        self._waiting.put((request, sink))

    def cancel(self, request_id: str) -> None:
        self._live.discard(request_id)

    def load(self) -> LoadReport:
        return self._reports.report(0.0, queued_tokens=0, running=len(self._live), waiting=0)

    def stats(self) -> StatsReport:
        return StatsReport(())

    def healthy(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        while (taken := self._waiting.get()) is not None:
            request, sink = taken
            name, ids, count = request.request_id, request.token_ids.tolist(), request.sampling.max_tokens or 1
            save = SaveResult("off") if request.saves else None
            sink([EngineOutput(name, (ids[0],), first=FirstToken(0, save=save))])
            told = [EngineOutput(name, (ids[i % len(ids)],)) for i in range(1, count) if name in self._live]
            reason = "length" if name in self._live else "cancelled"
            sink([*told, EngineOutput(name, finish_reason=reason, prefilled=Prefilled(len(ids), 0))])
            self._live.discard(name)


MAKER = EngineMaker(lambda *_: TinyEngine())
ENGINES["simulated"] = EngineTraits(f"{__name__}:MAKER", frozenset(), simulated=True)


class TinyReplica(Replica):
    """The product's replica; its process imports this module, which names the engine in the table."""


def build(args: Mapping[str, Any]) -> Application:
    """Build the product's app with this engine."""
    with mock.patch.object(app, "Replica", TinyReplica):
        return app.build_app(args)
