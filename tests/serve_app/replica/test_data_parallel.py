"""A replica's place in a group of data-parallel ranks, from Serve's context and the application's notices."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve

from serve_app.engine.vllm.settings import DataParallel
from serve_app.replica import data_parallel


class Group:
    """Ranks of one gang, and the notices that they leave each other."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.posted: list[dict[str, Any]] = []
        self.patch = patch
        patch.setattr(data_parallel.notices, "post", lambda app, kind, name, notice: self.posted.insert(0, notice))
        patch.setattr(data_parallel.notices, "read", lambda app, kind: list(self.posted))
        patch.setattr(data_parallel, "_MEET_S", 0.01)
        patch.setattr(data_parallel, "_POLL_S", 0.01)

    def join(self, rank: int, gang: str = "g", node: str = "n") -> DataParallel | None:
        context = SimpleNamespace(app_name="a", gang_context=SimpleNamespace(gang_id=gang, rank=rank, world_size=2))
        self.patch.setattr(serve, "get_replica_context", lambda: context)
        runtime = SimpleNamespace(get_node_id=lambda: node)
        self.patch.setattr(data_parallel.ray, "get_runtime_context", lambda: runtime)
        return data_parallel.join_group()


def test_a_groups_ranks_meet_where_its_first_one_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other groups of the application have ports of their own."""
    group = Group(monkeypatch)
    first, other = group.join(0), group.join(0, "other")
    assert first is not None and other is not None and first.port != other.port
    assert group.join(1) == DataParallel(1, 2, first.port)
    assert data_parallel.gang_rank() == 1
    with pytest.raises(ValueError, match="on different nodes"):
        group.join(1, node="another")
    with pytest.raises(TimeoutError, match="did not start"):
        group.join(1, "lonely")


def test_an_engine_outside_serve_is_in_no_group() -> None:
    assert data_parallel.join_group() is None
