"""The LoRA adapters that each replica has in memory, and the wait for a load elsewhere.

Adapters are identified by the 8-byte hashes of their keys. A report is a hint: a replica loads a missing adapter.
"""

from itertools import repeat
from math import isfinite

import numpy as np

from router.load.load_table import Floats, LoadTable
from router.protocol.events import LoadReport, adapter_hash, unpack_keys


class LoraResidency:
    """Replicas by adapter. A replica without a measured load time is assumed to need the others' median."""

    def __init__(self) -> None:
        self._reported: dict[str, tuple[bytes, float]] = {}
        self._holders: dict[bytes, set[str]] = {}
        self._loading_s: dict[str, float] = {}

    def report(self, replica_id: str, report: LoadReport) -> None:
        """Record a known replica's report."""
        said = (report.adapters, report.adapter_load_s)
        if self._reported.get(replica_id, (b"", 0.0)) == said:
            return
        self.forget(replica_id)
        self._reported[replica_id] = said
        for key in unpack_keys(report.adapters):
            self._holders.setdefault(key, set()).add(replica_id)
        if isfinite(report.adapter_load_s) and report.adapter_load_s > 0.0:
            self._loading_s[replica_id] = min(report.adapter_load_s, 600.0)

    def forget(self, replica_id: str) -> None:
        """Forget a replica. Unknown ids are ignored."""
        self._loading_s.pop(replica_id, None)
        packed, _ = self._reported.pop(replica_id, (b"", 0.0))
        for key in set(unpack_keys(packed)):
            self._holders[key].discard(replica_id)
            if not self._holders[key]:
                del self._holders[key]

    def wait_s(self, adapter: str, loads: LoadTable) -> Floats | None:
        """Return by row the wait in seconds for an adapter (its key; "": none), or None when no replica has it."""
        holders = self._holders.get(adapter_hash(adapter)) if adapter else None
        if not holders or not self._loading_s:
            return None
        usual_s = sorted(self._loading_s.values())[len(self._loading_s) // 2]
        names = loads.replica_ids
        waits = np.fromiter(map(self._loading_s.get, names, repeat(usual_s)), np.float64, len(names))
        waits[[row for name in holders if (row := loads.row_of(name)) is not None]] = 0.0
        return waits
