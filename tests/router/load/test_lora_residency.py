"""Requests go to a replica with their adapter in memory, while that is faster than loading it elsewhere."""

from math import inf, nan
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core import RoutingCore
from router.load import LoadTable, LoraResidency
from router.protocol.events import KEY_BYTES, MAX_KEYS, LoadReport, pack_adapters
from router.protocol.request import RoutedRequest
from tests.router.cores import ask, core_of, decided, load

STYLE = "style@1"


def report(adapters: tuple[str, ...] = (), load_s: float = 0.0, queued: int = 0) -> LoadReport:
    """``queued``: tokens that nobody overtakes."""
    about = {"committed_prefill_tokens": queued, "adapters": pack_adapters(adapters), "adapter_load_s": load_s}
    return load(queued, 0, int(queued > 0), **about)


def adapted(number: int, adapter: str = STYLE, chain: bytes = b"", tokens: int = 100) -> RoutedRequest:
    return ask(number, chain, tokens, Random(number).randbytes(16), adapter=adapter)


def chosen(core: RoutingCore, request: RoutedRequest) -> str:
    core.release(decision := decided(core, request))
    return decision.replica_id


def test_cold_prompts_go_where_their_adapter_is_and_others_anywhere() -> None:
    """Rendezvous order spreads requests without an adapter, or for one that is in no memory."""
    core = core_of({"a": report(), "b": report((STYLE, "x@2"), 0.2), "c": report(("x@2",), 0.2)})
    assert {chosen(core, adapted(number)) for number in range(30)} == {"b"}
    assert {chosen(core, adapted(number, "x@2")) for number in range(30)} == {"b", "c"}
    for adapter in ("", "never@3", "style@2"):
        assert {chosen(core, adapted(number, adapter)) for number in range(30)} == {"a", "b", "c"}


@pytest.mark.parametrize(("queued", "expected"), [(150, "b"), (250, "a")])
def test_a_load_weighs_as_much_as_the_work_of_its_time(queued: int, expected: str) -> None:
    """0.2 s of loading compete with a queue at 1,000 tokens/s."""
    core = core_of({"a": report(("x@2",), 0.2), "b": report((STYLE,), 0.2, queued)})
    assert chosen(core, adapted(1)) == expected


def test_kv_that_saves_more_than_the_load_wins() -> None:
    """The replica that holds the prefix of 320 tokens has evicted the adapter."""
    chain = Random(0).randbytes(16 * 20)
    for load_s, expected in ((0.5, "a"), (0.8, "b")):
        core = core_of({"a": report((), load_s), "b": report((STYLE,), load_s)}, {"a": chain})
        assert chosen(core, adapted(1, chain=chain, tokens=325)) == expected


def test_the_estimate_has_the_load_in_it() -> None:
    """It is in the decision and in an explanation, even for a policy that ignores adapters."""
    core = core_of({"a": report((), 0.3), "b": report((STYLE,), 0.3, queued=8000)})
    decision = decided(core, adapted(1))
    assert (decision.replica_id, decision.estimated_ttft_s) == ("a", pytest.approx(0.4))
    core.release(decision)
    said = core.explain(adapted(1), ["least_loaded", "estimated_ttft"])
    by_id = {replica["replica_id"]: replica for replica in said["replicas"]}
    assert (by_id["a"]["adapter_load_s"], by_id["b"]["adapter_load_s"]) == (0.3, 0.0)
    assert by_id["a"]["estimated_ttft_s"] == pytest.approx(0.4)


def test_a_missing_load_time_is_assumed_usual_and_nonsense_is_ignored() -> None:
    """A replica's nonsense at most makes that replica expensive."""
    loads, places = LoadTable("me"), LoraResidency()
    for name, load_s in {"a": 0.0, "b": 0.1, "c": 0.3, "d": 1e30, "e": nan, "f": -1.0, "g": inf, "h": 0.2}.items():
        loads.add_replica(name)
        places.report(name, report((STYLE,) if name == "h" else (), load_s))
    found = places.wait_s(STYLE, loads)
    assert found is not None
    assert found.tolist() == [0.3, 0.1, 0.3, 600.0, 0.3, 0.3, 0.3, 0.0]
    places.report("h", load(adapters=b"seven b"))
    assert places.wait_s(STYLE, loads) is None
    many = Random(1).randbytes(KEY_BYTES * (MAX_KEYS + 50))
    places.report("h", load(adapters=many))
    assert len(places._holders) == MAX_KEYS


names, keys = st.sampled_from("abc"), st.sampled_from(["x", "y", "z"])


@settings(max_examples=60)
@given(st.lists(st.tuples(names, st.one_of(st.none(), st.sets(keys))), max_size=20))
def test_places_are_those_of_the_latest_reports(news: list[tuple[str, set[str] | None]]) -> None:
    """Earlier reports and departed replicas (None) leave nothing; adapters without a holder take no memory."""
    loads, places, latest = LoadTable("me"), LoraResidency(), {name: set[str]() for name in "abc"}
    for name in latest:
        loads.add_replica(name)
    for name, held in news:
        if held is None:
            places.forget(name)
        else:
            places.report(name, report(tuple(held), 0.5))
        latest[name] = held or set()
    measured = {name for name, held in news if held is not None}
    for key in "xyz":
        holders = {name for name in latest if key in latest[name]}
        found = places.wait_s(key, loads)
        if holders and measured:
            assert found is not None
            assert {name for name, load_s in zip("abc", found, strict=True) if not load_s} == holders
        else:
            assert found is None
    assert len(places._holders) == len(set().union(*latest.values()))
