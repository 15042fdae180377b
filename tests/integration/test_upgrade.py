"""From one release to another, under streams that compare every answer: a rolling update, or two applications.

docs: upgrade
"""

import asyncio
import io
import json
import shutil
import subprocess
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import mean
from typing import Any

import httpx
import pytest

from cluster.local import LocalCluster, application
from router import __version__
from serve_app.replay.client import RequestFailed, stream_answer
from tests.integration.conftest import HTTP, alone, clients, eventually, metric, wait_until_cached
from tests.integration.scaling.stage import CHAT, HELD_TOKENS, ask_at_once, body, texts

pytestmark = [pytest.mark.integration, pytest.mark.long]

ROOT = Path(__file__).parents[2]
LATER = f"{__version__}.post1"
REPLICAS, INGRESSES = 2, 2
SURGE = {"max_surge_percent": 100}
SHORT, LONG = 5, 200
"""Tokens of answers: most are short; the long ones, of 4 seconds, outlive the replica that began them."""
SETTINGS: dict[str, Any] = {
    "model": "demo",
    "engine": "simulated",
    "replicas": REPLICAS,
    "ingress_replicas": INGRESSES,
    "num_blocks": 2000,
    "simulated_prefill_tokens_per_s": 8000,
    "simulated_decode_step_s": 0.02,
    "graceful_shutdown_timeout_s": 7,  # a long answer has to move
    "disk_cache_bytes": "64MiB",
}
PARTS = ("before", "update", "after", "rollback", "back")
LAST_TAG = "6c8755c8"
"""The commit of 0.2.0, whose messages have another version."""
SWITCH = ("before", "beside", "switched", "after", "alone")


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of this release and of a later one with the same version of messages, by the release's name."""
    made = {}
    for release in (__version__, LATER):
        folder = made[release] = tmp_path_factory.mktemp("release")
        for package in ("router", "serve_app"):
            shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
        told = folder / "router" / "__init__.py"
        told.write_text(told.read_text().replace(f'"{__version__}"', f'"{release}"'))
    return made


@pytest.fixture(scope="module")
def last_tag(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of 0.2.0; a shallow clone gets this release with other messages in its place."""
    folder = tmp_path_factory.mktemp("last")
    wanted = ["git", "-C", str(ROOT), "archive", LAST_TAG, "router", "serve_app"]
    archive = subprocess.run(wanted, capture_output=True, check=False)
    if archive.returncode == 0:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
        told = folder / "warmpath-0.2.0.dist-info" / "METADATA"  # 0.2.0 reads its version there
        told.parent.mkdir()
        told.write_text("Metadata-Version: 2.1\nName: warmpath\nVersion: 0.2.0\n")
        return folder
    for package in ("router", "serve_app"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    told = folder / "router" / "protocol" / "version.py"
    told.write_text(told.read_text().replace("WIRE_VERSION = ", "WIRE_VERSION = 1000 + "))
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("elsewhere"))  # Ray lets workers import from its driver's folder first
        with alone(LocalCluster(1)) as made:
            yield made


@dataclass
class Clients:
    """Six short and two long answers at a time, about ten prompts that are saved. ``part``: what happens meanwhile.

    ``prefix``: of the application that they ask.
    """

    url: str
    prefix: str = ""
    systems: list[str] = field(default_factory=lambda: texts(10, 900))
    part: str = ""
    hits: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in (*PARTS, *SWITCH)})
    cut: list[str] = field(default_factory=list)
    asking: Counter[str] = field(default_factory=Counter)
    """Answers under way, by prefix."""
    whole: dict[tuple[str, int, int], str] = field(default_factory=dict)
    """The undisturbed answer to each prompt, by prefix, prompt and length."""

    def warm(self, prefix: str = "") -> None:
        """Save every prompt and note the undisturbed answers."""
        url = self.url + prefix
        ask_at_once(url, (body(system, save_system_prompt_kv_cache=True) for system in self.systems))
        for system in self.systems:
            wait_until_cached(url, body(system), HELD_TOKENS, ingresses=INGRESSES)
        turns = [(number, SHORT) for number in range(len(self.systems))] + [(number, LONG) for number in range(2)]
        asked = ask_at_once(url, (body(self.systems[number], max_tokens=tokens) for number, tokens in turns))
        self.whole |= {(prefix, *turn): text for turn, (text, _) in zip(turns, asked, strict=True)}

    def during(self, story: Callable[[], None]) -> None:
        """Ask again and again until ``story``, which names the parts, is over."""

        async def run() -> None:
            happens = asyncio.create_task(asyncio.to_thread(story))
            # Each request has its own connection, which may reach either ingress.
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
            async with clients(self.url, limits=limits) as client:
                turns = count()
                asking = [self._client(client, happens, lambda: (next(turns) % 10, SHORT)) for _ in range(6)]
                asking += [self._client(client, happens, lambda number=number: (number, LONG)) for number in range(2)]
                await asyncio.gather(*asking)
            await happens

        asyncio.run(run())

    async def _client(
        self, client: httpx.AsyncClient, happens: asyncio.Task[None], turn: Callable[[], tuple[int, int]]
    ) -> None:
        while not happens.done():
            (number, tokens), part, prefix = turn(), self.part, self.prefix
            self.asking[prefix] += 1
            try:
                answer = await stream_answer(client, prefix + CHAT, body(self.systems[number], max_tokens=tokens))
            except (httpx.HTTPError, RequestFailed) as error:
                self.cut.append(f"{part}: {error!r}")
                continue
            finally:
                self.asking[prefix] -= 1
            if answer.text != self.whole[prefix, number, tokens]:
                self.cut.append(f"{part}: another answer, of {answer.completion_tokens} tokens")
            self.hits[part].append(answer.cached_tokens / answer.prompt_tokens)

    def wait_for(self, part: str, requests: int) -> None:
        """Wait until this many more answers have come to requests of a part that begins now."""
        self.part = part
        eventually(lambda: len(self.hits[part]) >= requests)


def names(cluster: LocalCluster) -> set[str]:
    return {process["name"] for process in cluster.processes() if process["kind"] in ("Replica", "Ingress")}


def test_a_rolling_update_and_a_rollback_cut_no_answer_and_stay_warm(
    cluster: LocalCluster, releases: dict[str, Path], tmp_path: Path
) -> None:
    """Old and new ingresses and replicas serve each other, and new replicas begin with the old ones' KV."""

    def deploy(release: str) -> None:
        """Replace every process by one of this release, and wait until the last old one is gone."""
        before = names(cluster)
        path = {"PYTHONPATH": str(releases[release])}
        wanted = application({**SETTINGS, "disk_cache_dir": str(tmp_path)}, {"Replica": SURGE, "Ingress": SURGE})
        cluster.deploy({**wanted, "runtime_env": {"env_vars": path}}, 0 if before else 300)
        eventually(lambda: not before & names(cluster) and len(names(cluster)) == REPLICAS + INGRESSES, 300)
        eventually(lambda: metric(cluster.url, "warmpath_build_info", f'version="{release}"') == INGRESSES)

    deploy(__version__)
    load = Clients(cluster.url)
    load.warm()
    took: dict[str, float] = {}

    def story() -> None:
        load.wait_for("before", 60)
        for release, parts in ((LATER, PARTS[1:3]), (__version__, PARTS[3:])):
            load.part, begun_s = parts[0], time.monotonic()
            deploy(release)
            took[parts[0]] = time.monotonic() - begun_s
            load.wait_for(parts[1], 140)

    load.during(story)
    # After each update, the first 100 answers are left out.
    rates = {part: mean(load.hits[part][100 * (part in ("after", "back")) :]) for part in PARTS}
    told = {"cut": len(load.cut), "requests": {part: len(load.hits[part]) for part in PARTS}, "rates": rates}
    print(json.dumps({**told, "took_s": took}))
    assert load.cut == []
    assert rates["after"] >= 0.95 * rates["before"]
    assert rates["back"] >= 0.95 * rates["before"]


def test_two_applications_switch_between_releases_that_do_not_mix(cluster: LocalCluster, last_tag: Path) -> None:
    """The new one starts beside the old one and is warmed; clients move to it, and the old one is removed."""

    def one(name: str, prefix: str, folder: Path) -> dict[str, Any]:
        path = {"runtime_env": {"env_vars": {"PYTHONPATH": str(folder)}}}
        names = {"name": name, "route_prefix": prefix or "/", "import_path": "serve_app.app:build_app"}
        settings = {name: value for name, value in SETTINGS.items() if name != "disk_cache_bytes"}
        return {**application(settings), **names, **path}

    old, new, moved = one("warmpath", "", last_tag), one("next", "/next", ROOT), "/next"
    cluster.deploy(old, 300)
    load = Clients(cluster.url)
    load.warm()
    took: dict[str, float] = {}

    def story() -> None:
        load.wait_for("before", 60)
        load.part, begun_s = "beside", time.monotonic()
        cluster.deploy(old, 0, new)
        eventually(lambda: HTTP.get(f"{cluster.url}{moved}/health").status_code == 200, 300)
        load.warm(moved)
        took["start and warming"] = time.monotonic() - begun_s
        load.part, load.prefix = "switched", moved
        eventually(lambda: len(load.hits["switched"]) >= 100)
        eventually(lambda: not load.asking[""])
        load.wait_for("after", 140)
        cluster.deploy(new, 0)
        eventually(lambda: HTTP.get(f"{cluster.url}/health").status_code == 404, 300)
        load.wait_for("alone", 60)

    load.during(story)
    rates = {part: mean(load.hits[part]) for part in SWITCH}
    told = {"cut": len(load.cut), "requests": {part: len(load.hits[part]) for part in SWITCH}, "rates": rates}
    print(json.dumps({**told, "took_s": took}))
    assert load.cut == []
    assert rates["after"] >= 0.95 * rates["before"]
    assert rates["alone"] >= 0.95 * rates["before"]
