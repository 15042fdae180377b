"""The disk tier's promises: blocks are private, bounded, never wrong, and found again after a restart."""

import logging
import math
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from router.protocol.block_hash import split_chain
from router.protocol.events import BlocksRemoved, BlocksStored
from serve_app.cache.kv_chain import KvFormat
from serve_app.cache.prefix_digest import TierBlock
from serve_app.cache.tiers.disk import BlockFiles, DiskSlot, DiskTier, DiskTierError
from serve_app.cache.tiers.tier import TierParts
from serve_app.cache.tiers.tier_queue import TierQueue
from tests.harness.tiers import tier_settings
from tests.serve_app.cache.tiers.tier_blocks import BYTES, FORMAT, content, held, path, wanted

FILE = len(BlockFiles(Path(), FORMAT).encode(path(1)[0], content(path(1)[0])))


def tier(directory: Path, blocks: int = 100, kv_format: KvFormat = FORMAT) -> DiskTier:
    return DiskTier(BlockFiles(directory, kv_format), blocks * FILE)


def queue_of(disk: DiskTier, blocks: int, wake: Callable[[], None] = lambda: None) -> TierQueue:
    return TierQueue(disk, blocks * BYTES, TierParts(tier_settings(), FORMAT, BYTES, wake, start=False))


def fill(disk: DiskTier, blocks: list[TierBlock], *, saved: bool = False) -> None:
    for block in reversed(blocks):
        assert disk.store(block, content(block), math.inf if saved else None)


def on_disk(directory: Path) -> int:
    return sum(entry.stat().st_size for entry in directory.iterdir())


def test_stored_blocks_are_loaded_and_private(tmp_path: Path) -> None:
    os.umask(previous := os.umask(0))
    try:
        slot = DiskSlot(tmp_path / "cache")
        disk = tier(slot.path)
        fill(disk, path(1, 2, 3))
    finally:
        os.umask(previous)
    for block in path(1, 2, 3):
        found = disk.load(block.block_hash)
        assert found is not None
        assert found[0] == block
        assert np.array_equal(found[1], content(block))
    assert stat.S_IMODE(slot.path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in slot.path.iterdir()} == {0o600}
    assert disk.index.used_bytes == on_disk(slot.path) == 3 * FILE


def test_engines_of_one_machine_keep_apart_and_find_their_slot_again(tmp_path: Path) -> None:
    first, second = DiskSlot(tmp_path), DiskSlot(tmp_path)
    assert first.path != second.path
    first.release()
    again = DiskSlot(tmp_path)
    assert again.path == first.path
    again.path.chmod(0o755)
    again.release()
    assert stat.S_IMODE(DiskSlot(tmp_path).path.stat().st_mode) == 0o700
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskTierError, match="disk_cache_dir"):
        DiskSlot(tmp_path / "file")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "slot-0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DiskTierError, match="not a directory of this user"):
        DiskSlot(tmp_path / "links")


def test_a_restart_finds_blocks_order_and_marks(tmp_path: Path) -> None:
    disk = tier(tmp_path)
    fill(disk, path(1, 2))
    fill(disk, path(3, 4))
    fill(disk, path(5), saved=True)
    disk.touch(block.block_hash for block in reversed(path(1, 2)))
    again = tier(tmp_path)
    assert held(again.index) == held(disk.index)
    assert held(again.index, saved=True) == {path(5)[0].block_hash}
    (event,) = again.index.take_events()
    assert isinstance(event, BlocksStored)
    told = list(split_chain(event.hashes))
    assert told.index(path(1, 2)[0].block_hash) < told.index(path(1, 2)[1].block_hash)
    small = tier(tmp_path, blocks=3)
    assert held(small.index) == {path(5)[0].block_hash, *(block.block_hash for block in path(1, 2))}
    assert on_disk(tmp_path) == small.index.used_bytes == 3 * FILE


def test_the_scan_is_bounded_in_time(tmp_path: Path) -> None:
    """If reading headers takes too long, the remaining files are dropped, so that the bound in bytes holds."""
    fill(tier(tmp_path), path(*range(10)))
    now = iter(range(1000))
    slow = DiskTier(BlockFiles(tmp_path, FORMAT), 100 * FILE, clock=lambda: next(now), scan_limit_s=4.5)
    assert 0 < len(slow.index) < 10
    assert on_disk(tmp_path) == slow.index.used_bytes
    assert path(0)[0].block_hash in held(slow.index), "the head of the prefix was used last and is kept"


@pytest.mark.parametrize("length", [0, 1, 19, 20, 21, 100, FILE - BYTES, FILE - 1, FILE + 1])
def test_a_torn_file_is_dropped_with_a_warning(tmp_path: Path, length: int, caplog: pytest.LogCaptureFixture) -> None:
    """A file may be torn at a scan, or while the tier is running."""
    disk = tier(tmp_path)
    fill(disk, path(1, 2))
    victim = path(1, 2)[1].block_hash
    file = tmp_path / f"{victim.hex()}.kv"
    whole = file.read_bytes()
    file.write_bytes((whole + b"\0")[:length])
    with caplog.at_level(logging.WARNING):
        again = tier(tmp_path)
    assert "dropped" in caplog.text
    assert held(again.index) == {path(1, 2)[0].block_hash}
    assert not file.exists()
    file.write_bytes((whole + b"\0")[:length])
    disk.index.take_events()
    assert disk.load(victim) is None
    assert disk.index.take_events() == [BlocksRemoved(victim, "disk")]
    assert not file.exists()
    assert (disk.refused_files, again.refused_files) == (1, 1)


def test_foreign_files(tmp_path: Path) -> None:
    """Another model's blocks and an exchanged file are dropped; files unlike ours are left alone."""
    fill(tier(tmp_path, kv_format=KvFormat("other", FORMAT.block_size, FORMAT.parts)), path(1))
    disk = tier(tmp_path)
    assert len(disk.index) == 0
    fill(disk, path(2))
    (tmp_path / "README").write_text("mine")
    (tmp_path / f"{'0' * 32}.tmp").write_text("torn")
    mine = tmp_path / f"{path(2)[0].block_hash.hex()}.kv"
    mine.rename(tmp_path / f"{path(3)[0].block_hash.hex()}.kv")
    again = tier(tmp_path)
    assert len(again.index) == again.index.used_bytes == 0
    assert [file.name for file in tmp_path.iterdir()] == ["README"]


def test_a_write_that_fails_costs_the_block_only(tmp_path: Path) -> None:
    directory = tmp_path / "gone"
    directory.mkdir()
    disk = tier(directory)
    directory.rmdir()
    assert not disk.store(path(1)[0], content(path(1)[0]))
    assert (disk.index.used_bytes, disk.index.take_events()) == (0, [])


_WRITER = """
import sys
from pathlib import Path
from serve_app.cache.tiers.disk import BlockFiles
from tests.serve_app.cache.tiers.tier_blocks import FORMAT, content, held, path
from tests.serve_app.cache.tiers.test_disk import tier
disk = tier(Path(sys.argv[1]), blocks=50)
i = 0
while True:
    i += 1
    if i == 3:  # six blocks are there: from now on it may be killed
        print("ready", flush=True)
    for block in reversed(path(i, i, i)):
        disk.store(block, content(block))
"""


def test_a_killed_writer_leaves_no_lie(tmp_path: Path) -> None:
    """SIGKILL in the middle of writing, three times: every block found afterwards is whole and right."""
    for delay_s in (0.01, 0.05, 0.1):
        writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        time.sleep(delay_s)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        disk = tier(tmp_path, blocks=50)
        assert len(disk.index) > 3
        assert disk.index.used_bytes == on_disk(tmp_path) <= 50 * FILE
        assert disk.refused_files == 0
        for block_hash in held(disk.index):
            found = disk.load(block_hash)
            assert found is not None
            assert np.array_equal(found[1], content(found[0]))


def test_the_queue_drops_excess_blocks_and_serves_pending_ones(tmp_path: Path) -> None:
    woken: list[None] = []
    queue = queue_of(tier(tmp_path), 2, lambda: woken.append(None))
    blocks = path(1, 2, 3)
    assert [queue.offer(block, content(block)) for block in blocks] == [True, True, False]
    assert (queue.counts.drops, queue.pending_blocks, queue.room()) == (1, 2, 0)
    load = queue.load(wanted(blocks))
    assert queue.run()
    assert load.done
    assert list(load.blocks) == [block.block_hash for block in blocks[:2]]
    assert len(woken) == 1
    assert not any(tmp_path.iterdir())
    queue.close(math.inf)
    assert (queue.counts.stores, queue.pending_blocks) == (2, 0)
    assert not queue.offer(blocks[2], content(blocks[2]))
    assert len(tier(tmp_path).index) == 2


@pytest.mark.parametrize("moment", ["encode", "write", "offered"])
def test_a_reset_while_a_block_is_on_its_way_to_disk_leaves_no_trace_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    disk = tier(tmp_path)
    queue = queue_of(disk, 100)
    owner, name = (disk, "store") if moment == "offered" else (disk._files, moment)
    begin = getattr(owner, name)

    def reset_meanwhile(*args: object, **named: object) -> object:
        monkeypatch.setattr(owner, name, begin)
        queue.clear()
        return begin(*args, **named)

    monkeypatch.setattr(owner, name, reset_meanwhile)
    (block,) = path(1)
    queue.offer(block, content(block))
    while queue.run():
        pass
    assert (len(disk.index), queue.counts.stores, disk.index.take_events()) == (0, 0, [])
    assert not any(tmp_path.iterdir())
    queue.offer(block, content(block))
    assert queue.run()
    assert held(disk.index) == {block.block_hash}
