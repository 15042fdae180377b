"""Rules of the adapters in memory: which ones stay, which are evicted first, and which may still be used."""

import pytest

from serve_app.engine.adapter_slots import LoadedAdapters
from serve_app.engine.protocol import AdapterSpec, QueueFull, UnknownAdapter


def slots(max_loras: int = 2, max_cpu_loras: int = 3) -> tuple[LoadedAdapters[str], list[str]]:
    loads: list[str] = []

    def note(spec: AdapterSpec) -> str:
        loads.append(spec.name)
        return spec.path

    return LoadedAdapters(note, max_loras=max_loras, max_cpu_loras=max_cpu_loras), loads


def spec(name: str) -> AdapterSpec:
    return AdapterSpec(name, "0", f"/{name}")


def test_the_least_recently_used_adapter_goes_first_and_never_one_with_live_requests() -> None:
    """A live request keeps its adapter in memory; if all are kept, a new one is refused with Retry-After."""
    held, loads = slots()
    for name in "abc":
        held.load(spec(name))
    held.load(spec("a"))
    assert loads == ["a", "b", "c"], "a loaded adapter is not read again"
    held.pin("b@0")
    held.load(spec("d"))
    assert held.loaded == ("a@0", "b@0", "d@0"), "c was the least recently used idle one"
    held.pin("a@0")
    held.pin("d@0")
    with pytest.raises(QueueFull, match="max_cpu_loras is reached"):
        held.load(spec("e"))
    held.unpin("b@0")
    held.load(spec("e"))
    assert set(held.loaded) == {"a@0", "d@0", "e@0"}
    with pytest.raises(UnknownAdapter):
        held.pin("b@0")


def test_an_unloaded_adapter_serves_its_live_requests_and_no_new_ones() -> None:
    """If it is loaded again while they run, it is available again."""
    held, loads = slots()
    held.load(spec("a"))
    held.pin("a@0")
    assert held.unload("a@0")
    assert held.loaded == ()
    assert held.weights("a@0") == "/a"
    with pytest.raises(UnknownAdapter):
        held.pin("a@0")
    held.load(spec("a"))
    assert loads == ["a"]
    held.unpin("a@0")
    assert held.loaded == ("a@0",)
    held.pin("a@0")
    assert held.unload("a@0")
    held.unpin("a@0")
    with pytest.raises(KeyError):
        held.weights("a@0")


def test_sizes_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="max_cpu_loras"):
        slots(max_loras=4, max_cpu_loras=3)
    with pytest.raises(ValueError, match="max_loras"):
        slots(max_loras=0)
