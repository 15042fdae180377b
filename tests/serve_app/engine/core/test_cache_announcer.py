"""An engine's digests equal its events, in pool and tiers; after lost events it announces everything again."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from router.feed.sequencer import FeedSequencer
from router.protocol.events import CacheCleared, CacheDigest, Event
from serve_app.cache.tiers.tiers import TierSettings
from serve_app.engine.core.engine import TorchEngine
from serve_app.replica.reporter import tell_caches
from tests.serve_app.engine.simulated import GatedRunner, MakeSimulated
from tests.serve_app.engine.tiny import prompt, request, run_all


class Feed:
    """A feed that may lose its events; its ``sequencer`` is the mirror."""

    def __init__(self) -> None:
        self.sequencer = FeedSequencer()
        self.losing = False
        self.events: list[Event] = []

    def __call__(self, events: Sequence[Event]) -> None:
        if not self.losing:
            self.events.extend(events)
            self.sequencer.publish(events)

    def blocks(self) -> dict[str, int]:
        """Return the last digest's blocks by tier; the disk's thread may have announced more since."""
        last = next(event for event in reversed(self.events) if isinstance(event, CacheDigest))
        return {of.tier: of.blocks for of in last.tiers}


@pytest.fixture
def made(tmp_path: Path, make_simulated: MakeSimulated) -> tuple[Feed, TorchEngine]:
    """A small pool over a small host memory and a disk."""
    feed, size = Feed(), GatedRunner().block_bytes
    below = TierSettings(host_cache_bytes=12 * size, disk_cache_bytes=1000 * size, disk_cache_dir=tmp_path)
    return feed, make_simulated(sink=feed, num_blocks=24, max_num_seqs=4, max_num_batched_tokens=256, tiers=below)


def traffic(engine: TorchEngine, seed: int, requests: int = 8) -> None:
    rng = Random(seed)
    for number in range(requests):
        run_all(engine, [request(f"{seed}-{number}", prompt(rng.randrange(20, 220), rng.randrange(12)), 2)])


@pytest.mark.parametrize("reset", [False, True])
def test_the_digest_is_that_of_the_events(made: tuple[Feed, TorchEngine], reset: bool) -> None:
    """It holds through evictions, spills, a disk with its own thread, and resets, at any moment."""
    feed, engine = made
    for seed in range(6):
        traffic(engine, seed)
        if reset and seed == 3:
            engine.reset_prefix_cache(tiers=False)
        engine.tell_cache()
        assert feed.sequencer.mirror_drifts == 0
    held = feed.blocks()
    assert held["pool"] > 0 and held["host"] == 12 and held["disk"] > 0
    engine.reset_prefix_cache()
    engine.tell_cache()
    assert feed.sequencer.mirror_drifts == 0 and set(feed.blocks().values()) == {0}


def test_events_lost_before_the_feed_are_announced_again(made: tuple[Feed, TorchEngine]) -> None:
    """The next digest reveals the loss; ``anew`` repairs the mirror and the routers that follow it. (docs: routing)"""
    feed, engine = made
    traffic(engine, 0)
    feed.losing = True
    traffic(engine, 1)
    feed.losing = False
    engine.tell_cache()
    assert feed.sequencer.mirror_drifts == 1
    engine.tell_cache(anew=True)
    engine.tell_cache()
    assert feed.sequencer.mirror_drifts == 1
    assert feed.blocks().keys() == {"pool", "host", "disk"}
    cleared = [at for at, event in enumerate(feed.events) if event == CacheCleared()]
    anew = FeedSequencer()
    assert len(anew.publish(feed.events[cleared[-1] :])) > 0
    assert anew.mirror_drifts == 0, "it begins with a cleared cache"


def test_a_replica_tells_its_caches_from_time_to_time_and_anew_after_drift() -> None:
    """The repeats become ever rarer, so an engine that always contradicts its feed does not flood the routers."""
    feed, done = SimpleNamespace(mirror_drifts=0), threading.Event()
    calls: list[bool] = []

    def tell_cache(*, anew: bool) -> None:
        calls.append(anew)
        feed.mirror_drifts += len(calls) > 2
        if len(calls) == 60:
            done.set()

    async def main() -> None:
        engine: Any = SimpleNamespace(tell_cache=tell_cache)
        task = asyncio.create_task(tell_caches(engine, feed, 0.001))
        assert await asyncio.to_thread(done.wait, 60)
        task.cancel()

    asyncio.run(main())
    assert calls[:3] == [False, False, False]
    assert calls[3]
    assert 2 <= sum(calls) <= 12
