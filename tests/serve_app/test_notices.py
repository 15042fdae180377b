"""The board of notices: one a name, the newest first, few, and each application its own."""

from __future__ import annotations

import pytest
from ray.experimental import internal_kv

from serve_app.notices import KEPT, clear, post, read, remove


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, bytes]:
    """A dictionary in place of Ray's GCS, with its calls."""
    values: dict[bytes, bytes] = {}

    def put(key: bytes, value: bytes, overwrite: bool, namespace: bytes) -> None:
        assert overwrite and namespace
        values[key] = value

    monkeypatch.setattr(internal_kv, "_internal_kv_put", put)
    monkeypatch.setattr(internal_kv, "_internal_kv_get", lambda key, namespace: values.get(key))
    monkeypatch.setattr(internal_kv, "_internal_kv_del", lambda key, namespace: values.pop(key, None))
    monkeypatch.setattr(
        internal_kv, "_internal_kv_list", lambda start, namespace: [key for key in values if key.startswith(start)]
    )
    return values


def test_the_newest_come_first_a_name_has_one_and_the_oldest_go() -> None:
    for number in [0, *range(KEPT + 5), 7]:
        post("app", "handover", str(number), {"number": number})
    kept = [number for number in range(KEPT + 4, 4, -1) if number != 7]
    assert [notice["number"] for notice in read("app", "handover")] == [7, *kept]


def test_applications_and_kinds_do_not_see_each_other() -> None:
    post("app", "handover", "x", {})
    assert read("app2", "handover") == read("app", "prewarm") == read("ap", "handover") == []


def test_a_notice_is_taken_down_alone_or_with_its_kind() -> None:
    for name in "abc":
        post("app", "configuration", name, {"name": name})
    post("app", "handover", "a", {})
    remove("app", "configuration", "b")
    remove("app", "configuration", "unknown")
    assert {notice["name"] for notice in read("app", "configuration")} == {"a", "c"}
    clear("app", "configuration")
    assert read("app", "configuration") == [] and len(read("app", "handover")) == 1
