"""Shares and saves on disk: the tenants that lose files, the end of a save, and the effect of a restart on both."""

import math
import shutil
from pathlib import Path

import pytest

from serve_app.cache.prefix_digest import TierBlock
from serve_app.cache.tiers.disk import DISK_ACTIVE_S, BlockFiles, DiskTier
from serve_app.cache.tiers.tier_index import UNKNOWN, account_key
from tests.serve_app.cache.tiers.test_disk import FILE
from tests.serve_app.cache.tiers.tier_blocks import FORMAT, content, held, path

SHARES = {"a": 1.0, "b": 1.0}


class Disk:
    """A tier of ten files, with blocks named by tenant and number."""

    def __init__(self, directory: Path, files: int = 10, save_ttl_s: float | None = None, now_s: float = 0.0) -> None:
        self.now_s = now_s
        self.tier = DiskTier(
            BlockFiles(directory, FORMAT),
            files * FILE,
            shares=SHARES,
            save_ttl_s=save_ttl_s,
            clock=lambda: self.now_s,
            wall_clock=lambda: self.now_s,
        )

    def block(self, tenant: str, number: int) -> TierBlock:
        return path(number, tenant=tenant)[0]

    def seen(self, *tenants: str) -> None:
        for tenant in tenants:
            self.tier.index.touch(account_key(tenant))

    def store(self, tenant: str, *numbers: int, saved_until_s: float | None = None) -> list[bool]:
        blocks = [self.block(tenant, number) for number in numbers]
        return [self.tier.store(block, content(block), saved_until_s) for block in blocks]

    def held(self, *, saved: bool | None = None) -> list[int]:
        hashes = held(self.tier.index, saved=saved)
        return [number for number in range(100) if self.block("", number).block_hash in hashes]


def test_a_save_of_an_earlier_life_ends_with_its_time(tmp_path: Path) -> None:
    """It also ends without a renewal: only the name of its file has its end."""
    disk = Disk(tmp_path, files=3)
    disk.store("a", 1, saved_until_s=100.0)
    disk.store("a", 2, saved_until_s=50.0)
    disk = Disk(tmp_path, files=3, now_s=60.0)
    assert (disk.held(saved=True), disk.held(saved=False)) == ([1], [2])
    disk.store("a", 3, 4)
    assert disk.held() == [1, 3, 4]
    disk.now_s = 101.0
    disk.store("a", 5, 6, 7)
    assert disk.held() == [5, 6, 7]


def test_a_save_that_begins_again_ends_when_its_engine_says_so(tmp_path: Path) -> None:
    """Reads renew it, and only the engine knows of them."""
    Disk(tmp_path).store("a", 1, saved_until_s=100.0)
    disk = Disk(tmp_path, files=2, now_s=60.0)
    disk.store("a", 1, saved_until_s=100.0)
    disk.now_s = 200.0
    disk.store("a", 2, 3, 4)
    assert disk.held() == [1, 4]


@pytest.mark.parametrize("until_s", [math.inf, 10_000.0])
def test_the_setting_bounds_saves_of_an_earlier_life(until_s: float, tmp_path: Path) -> None:
    """It ends this long after the first restart that found it, regardless of its file's own end. (docs: caching)"""
    Disk(tmp_path).store("a", 1, saved_until_s=until_s)
    assert Disk(tmp_path, now_s=1000.0, save_ttl_s=300.0).held(saved=True) == [1]
    assert Disk(tmp_path, now_s=1200.0, save_ttl_s=300.0).held(saved=True) == [1]
    assert Disk(tmp_path, now_s=1301.0, save_ttl_s=300.0).held(saved=True) == []


def test_files_from_before_they_had_owners_are_read_and_go_first(tmp_path: Path) -> None:
    """Their header has no owner; their account has no requests that would keep a share. (docs: caching)"""
    files = BlockFiles(tmp_path, FORMAT)
    former = [TierBlock(*(getattr(block, name) for name in TierBlock.__slots__[:-1]), UNKNOWN) for block in path(0, 1)]
    for block in reversed(former):
        encoded = files.encode(block, content(block))
        assert b"owner" not in encoded
        files.write(block.block_hash, encoded, None, 10)
    disk = Disk(tmp_path, files=4)
    assert [disk.tier.load(block.block_hash) is not None for block in former] == [True, True]
    disk.seen("a")
    disk.store("a", 20, 21, 22, 23)
    assert disk.held() == [20, 21, 22, 23]


def test_shares_hold_after_a_restart_too(tmp_path: Path) -> None:
    """Shares, not age, decide the files for a smaller bound; a tenant inactive for a day loses its files first."""
    disk = Disk(tmp_path)
    disk.store("b", 20, 21)
    disk.store("a", *range(8))
    now_s = 1e-9 * max(file.stat().st_mtime_ns for file in tmp_path.iterdir())
    later = Path(shutil.copytree(tmp_path, tmp_path.with_name("later")))
    disk = Disk(tmp_path, files=4, now_s=now_s)
    assert disk.held() == [6, 7, 20, 21]
    assert disk.tier.index.used_bytes == sum(file.stat().st_size for file in tmp_path.iterdir()) == 4 * FILE
    disk = Disk(later, now_s=now_s + DISK_ACTIVE_S + 1)
    disk.seen("a")
    disk.store("a", 10, 11, 12)
    assert disk.held() == [1, 2, 3, 4, 5, 6, 7, 10, 11, 12]
