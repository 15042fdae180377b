"""The dashboard as a table: what each panel asks, in rows from what clients feel to what replicas do.

Knows neither Grafana's format (``grafana.py``) nor an instance. ``tests/cluster/observability/`` holds every query
against the catalog of families, and ``tests/integration/test_boards.py`` against a real Prometheus.
"""

from __future__ import annotations

from cluster.observability.replicas import MOVES, POOL, REPLICAS
from cluster.observability.traffic import CACHE, CLIENTS, ROUTING

ROWS = (CLIENTS, CACHE, ROUTING, POOL, MOVES, REPLICAS)
