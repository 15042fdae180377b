"""A real instance to attack: its tenants and keys, what its operator sees, what its ingress takes of memory.

Owns settings and metrics by name. Knows nothing of attacks.
"""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import yaml

from benchmarks.common.prompts import WORDS
from benchmarks.common.server import Checkout, instance
from benchmarks.isolation.hostile.raw_http import Target
from serve_app.tenants.tenants import make_api_key

ATTACKER, WATCHED = "acme", "zeta"
POLITE = (WATCHED, *(f"shop-{number}" for number in range(1, 9)))
"""The nine tenants beside an attacker."""
REPLICAS = 2
LEFT_AFTER_S = 2.0
REPORTED_EVERY_S = 0.5
"""How often replicas tell their counters: what is read so much later is not older than asked for."""
_LEFT_LONGEST_S = 20.0
_LEFT = ("left_running", "left_blocks", "left_told_after_s", "seconds_to_nothing")
_INGRESS = "ServeReplica:warmpath:Ingress"
_SAMPLE = re.compile(r"^(\w+)(\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Stage:
    """One instance. ``keys``: by tenant."""

    url: str
    keys: dict[str, str]
    operator_key: str

    def target(self, tenant: str = ATTACKER) -> Target:
        """Return where and as whom a tenant attacks."""
        parts = urlsplit(self.url)
        assert parts.hostname is not None and parts.port is not None
        return Target(parts.hostname, parts.port, self.keys[tenant])

    async def prefill_tokens_per_s(self) -> float:
        """Return what all replicas prefill a second, as they have measured it."""
        headers = {"authorization": f"Bearer {self.operator_key}"}
        async with httpx.AsyncClient(headers=headers) as client:
            metrics = (await client.get(f"{self.url}/metrics")).raise_for_status().text
        return sum(float(v) for name, _, v in _SAMPLE.findall(metrics) if name == "warmpath_prefill_tokens_per_second")

    async def left(self, ended_s: float) -> dict[str, Any]:
        """Return the sequences and blocks in use ``LEFT_AFTER_S`` after the last client's end, and when none was.

        ``ended_s``: by time.monotonic. ``left_told_after_s`` is larger where the ingress was too busy to tell sooner;
        ``seconds_to_nothing`` None: not within a third of a minute.
        """
        headers = {"authorization": f"Bearer {self.operator_key}"}
        figures: dict[str, Any] = dict.fromkeys(_LEFT)
        async with httpx.AsyncClient(headers=headers, timeout=_LEFT_LONGEST_S) as client:
            while figures["left_running"] is None or figures["seconds_to_nothing"] is None:
                after_s = time.monotonic() - ended_s
                if after_s > _LEFT_LONGEST_S:
                    break
                await asyncio.sleep(0.1)
                try:
                    response = await client.get(f"{self.url}/metrics")
                except httpx.HTTPError:
                    continue
                used, told_s = in_use(response.text), time.monotonic() - ended_s
                if used is not None and figures["left_running"] is None and told_s >= LEFT_AFTER_S + REPORTED_EVERY_S:
                    figures |= dict(zip(_LEFT, (*used, told_s), strict=False))
                if used == (0, 0) and figures["seconds_to_nothing"] is None and after_s > REPORTED_EVERY_S:
                    figures["seconds_to_nothing"] = told_s
        return figures

    def ingress_bytes(self) -> int:
        """Return the resident memory of this instance's ingress. Raises RuntimeError when it is not found."""
        statm = Path(f"/proc/{self.ingress_pid()}/statm").read_text()
        return int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def ingress_pid(self) -> int:
        """Return the id of the ingress' process: below the command that serves this port. Raises RuntimeError."""
        port = f"--port {urlsplit(self.url).port} "
        commands = {int(path.name): _command(path) for path in Path("/proc").iterdir() if path.name.isdecimal()}
        for pid, command in commands.items():
            if _INGRESS in command:
                above: int | None = pid
                while above is not None and above > 1:
                    if port in commands.get(above, "") + " ":
                        return pid
                    above = _parent(above)
        raise RuntimeError("the ingress' process was not found")


@contextmanager
def stage(
    engine: str, checkout: Checkout | None = None, tenants: Sequence[str] = (ATTACKER, *POLITE), **more: Any
) -> Iterator[Stage]:
    """Start an instance of the demo model with those tenants, an operator and public prompts, one of 1 MiB.

    ``more``: settings by name.
    """
    keys = {name: make_api_key() for name in (*tenants, "operator")}
    operator_key, operator_digest = keys.pop("operator")
    long_text = " ".join(WORDS)
    settings = {
        **more,
        "model": "demo",
        "engine": engine,
        "replicas": REPLICAS,
        "tenants": [{"name": name, "key_sha256": [digest]} for name, (_, digest) in keys.items()],
        "operator_key_sha256": [operator_digest],
        "public_prompts": [
            {"name": "clerk", "version": "1", "text": "You are a clerk. Answer briefly, and name your source. " * 8},
            {"name": "long", "version": "1", "text": (long_text * (2**20 // len(long_text) + 1))[: 2**20]},
        ],
    }
    with tempfile.TemporaryDirectory(prefix="warmpath-hostile-") as directory:
        config = Path(directory) / "settings.yaml"
        config.write_text(yaml.safe_dump(settings))
        config.chmod(0o600)
        with instance("--config", str(config), checkout=checkout) as url:
            yield Stage(url, {name: key for name, (key, _) in keys.items()}, operator_key)


def in_use(metrics: str) -> tuple[int, int] | None:
    """Return the sequences that run or wait and the blocks in use on all replicas; None where neither is told."""
    sequences: list[float] = []
    blocks: list[float] = []
    for name, labels, value in _SAMPLE.findall(metrics):
        if name in ("warmpath_num_requests_running", "warmpath_num_requests_waiting"):
            sequences.append(float(value))
        elif name == "warmpath_kv_cache_blocks" and 'state="used"' in labels:
            blocks.append(float(value))
    return (int(sum(sequences)), int(sum(blocks))) if sequences and blocks else None


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None
