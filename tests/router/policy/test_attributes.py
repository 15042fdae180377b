"""Attributes of replicas arrive with their load reports, and a policy by price is one rule and one name."""

import math

import msgspec
import pytest

from router import settings
from router.candidates import Candidate, RoutingView, scored, uncached_tokens
from router.policies import POLICIES, Policy
from router.protocol.events import LoadReport
from serve_app.config.app import AppConfig
from serve_app.replica.reporter import attributes_of
from tests.router.cores import CHAIN, ask, core_of, decided, load


def cheapest(view: RoutingView, limit: int | None = None) -> list[Candidate]:
    """Rank by the price of the uncached tokens and of those before them."""
    uncached = uncached_tokens(view)
    return scored((view.loads.queued_tokens + uncached) * view.attribute("price", 1.0), uncached, view, limit)


@pytest.fixture
def by_price(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(POLICIES, "cheapest", Policy(cheapest))
    monkeypatch.setattr(settings, "POLICY_NAMES", (*settings.POLICY_NAMES, "cheapest"))
    return "cheapest"


@pytest.mark.parametrize(
    ("prices", "held", "expected"),
    [
        ({"a": 3.0, "b": 2.0, "c": 2.5}, "", "b"),
        ({"a": 3.0, "b": 2.0, "c": 2.5}, "a", "a"),
        ({"a": 3.0, "b": "cheap", "c": 2.5}, "", "b"),
        ({"a": 3.0, "b": 2.5, "c": math.nan}, "", "c"),
    ],
)
def test_a_policy_by_price_takes_the_cheapest_way(
    prices: dict[str, float | str], held: str, expected: str, by_price: str
) -> None:
    """The price is the replica's own; one that tells none, or nonsense, has the default."""
    reports = {name: load(attributes={"price": prices[name]} if name in prices else {}) for name in "abc"}
    for report in reports.values():
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=LoadReport).attributes.keys() <= {"price"}
    core = core_of(reports, {held: CHAIN} if held else None, policy=by_price)
    assert core.explain(ask(), [by_price])["winners"][by_price]["replica_id"] == expected
    assert decided(core, ask()).replica_id == expected


def test_operators_see_attributes_with_the_load() -> None:
    core = core_of({"a": load(attributes={"zone": "x", "price": 2.5}), "b": load()})
    for document in (core.state(), core.explain(ask(), ["estimated_ttft"])):
        told = {replica["replica_id"]: replica["attributes"] for replica in document["replicas"]}
        assert told == {"a": {"zone": "x", "price": 2.5}, "b": {}}


def test_nonsense_in_a_report_is_dropped_and_its_size_bounded() -> None:
    many: dict[str, str | float] = {f"n{number}": 1.0 for number in range(100)}
    bad: dict[str, str | float] = {"nan": math.nan, "inf": math.inf, "long": "x" * 100_000, "zone": "x"}
    core = core_of({"a": load(attributes=many), "b": load(attributes=bad)})
    told = {replica["replica_id"]: replica["attributes"] for replica in core.state()["replicas"]}
    assert len(told["a"]) == settings.MAX_ATTRIBUTES
    assert told["b"] == {"zone": "x"}


def test_attributes_are_the_settings_and_the_labels_of_the_node() -> None:
    """Numbers are numbers, as labels are text; a setting wins over a label."""
    config = AppConfig.model_validate({"replica_attributes": {"zone": "a", "price": 2}})
    labels = {"ray.io/node-id": "f00", "ray.io/accelerator-type": "H100", "price": "9.5", "watts": "700"}
    assert attributes_of(config.replica_attributes, labels) == {
        "zone": "a",
        "price": 2,
        "ray.io/accelerator-type": "H100",
        "watts": 700.0,
    }
    with pytest.raises(ValueError, match="replica_attributes"):
        AppConfig.model_validate({"replica_attributes": {"price": math.inf}})
