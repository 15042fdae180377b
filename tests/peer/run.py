"""Run vLLM's own server tests (OpenAI's and Anthropic's APIs) against this server: `make test-peer`.

The tests come from vLLM's source distribution, which is fetched once into the user's cache; none is kept here. A
model's name in them stands for SmolLM2 or for a small model that is trained here (`model.py`). Further arguments go to
pytest.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from urllib.parse import urljoin

import httpx

from benchmarks.common.random_adapters import make_adapters
from serve_app.checkpoints.model_cache import default_cache_dir
from serve_app.checkpoints.sources import resolve_model
from tests.clients import model
from tests.peer.model import talker

ROOT = Path(__file__).parents[2]
VERSION = "0.33.0"
INDEX = "https://pypi.org/simple/vllm/"
JSON = "application/vnd.pypi.simple.v1+json"
PLUGINS = ("pytest-asyncio==1.5.0", "tblib==3.2.2", "orjson==3.13.0")
"""What vLLM's tests import beyond the packages of `make venv-vllm`."""
FOLDERS = ("openai", "anthropic")
_MODEL = re.compile(r'^\w*MODEL\w*\s*=\s*"([\w.-]+/[\w.-]+)"', re.MULTILINE)
_ADAPTER = re.compile(r'snapshot_download\(\s*(?:repo_id=)?"([\w.-]+/[\w.-]+)"')


def fetched(cache: Path) -> Path:
    """Return the folder of vLLM's sources, fetched and unpacked if needed."""
    target = cache / f"vllm-{VERSION}"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    listing = httpx.get(INDEX, headers={"accept": JSON}, follow_redirects=True, timeout=60).raise_for_status()
    file = next(each for each in listing.json()["files"] if each["filename"] == f"vllm-{VERSION}.tar.gz")
    print(f"fetching {file['filename']} ({file.get('size', 0) / 1e6:.0f} MB)", flush=True)
    data = httpx.get(urljoin(str(listing.url), file["url"]), follow_redirects=True, timeout=600).raise_for_status()
    if sha256(data.content).hexdigest() != file["hashes"]["sha256"]:
        raise SystemExit(f"error: {file['filename']} is not the file that the index lists")
    archive, unpacked = cache / file["filename"], cache / "unpacked"
    archive.write_bytes(data.content)
    shutil.rmtree(unpacked, ignore_errors=True)
    wanted = tuple(f"{target.name}/{part}" for part in ("tests/", "vllm/", "pyproject.toml"))  # others would hide ours
    with tarfile.open(archive) as tar:
        tar.extractall(unpacked, [each for each in tar if each.name.startswith(wanted)], filter="data")
    (unpacked / target.name).rename(target)
    return target


def plugins(cache: Path) -> Path:
    """Return a folder with ``PLUGINS``, installed if needed."""
    target = cache / ("lib-" + sha256("".join(PLUGINS).encode()).hexdigest()[:8])
    if not target.is_dir():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", str(target.with_suffix(".part")), *PLUGINS], check=True)
        target.with_suffix(".part").rename(target)
    return target


def trained_stand_in(cache: Path) -> Path:
    """Return the checkpoint that tests talk to, trained if needed."""
    recipe = Path(__file__).with_name("model.py").read_bytes() + Path(model.__file__).read_bytes()
    folder = cache / ("model-" + sha256(recipe).hexdigest()[:8])
    if not folder.is_dir():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        talker(resolve_model("smollm2"), part)
        make_adapters(resolve_model("smollm2"), part, 1)
        part.rename(folder)
    return folder


def as_hub(hub: Path, stand_in: Path, tests: Path) -> Path:
    """Return a hub's cache in which each model that vLLM's tests name is the stand-in, and each adapter a random one.

    So tokenizers and configurations load without a network.
    """
    shutil.rmtree(hub, ignore_errors=True)
    talks, adapter = stand_in / "talker", stand_in / "adapter-0"
    text = "\n".join(path.read_text() for path in tests.rglob("*.py"))
    for name, source in _repositories(text, talks, adapter):
        folder = hub / f"models--{name.replace('/', '--')}"
        commit = sha256(name.encode()).hexdigest()[:40]
        (folder / "refs").mkdir(parents=True)
        (folder / "refs/main").write_text(commit)
        (folder / "snapshots").mkdir()
        (folder / "snapshots" / commit).symlink_to(source)
    return hub


def _repositories(text: str, checkpoint: Path, adapter: Path) -> Iterator[tuple[str, Path]]:
    models = set(_MODEL.findall(text))
    yield from ((name, checkpoint) for name in sorted(models))
    yield from ((name, adapter) for name in sorted(set(_ADAPTER.findall(text)) - models))


def main() -> int:
    """Fetch what is missing, then run the tests."""
    cache = default_cache_dir().parent / "peer"
    sources = fetched(cache)
    tests = sources / "tests/entrypoints"
    stand_in = trained_stand_in(cache)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (plugins(cache), sources, ROOT, ROOT / "tests/peer"))),
        "PEER_TALKER": str(stand_in / "talker"),
        "PEER_WRITER": str(resolve_model("smollm2")),
        "HF_HUB_CACHE": str(as_hub(cache / "hub", stand_in, tests)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_TARGET_DEVICE": "cpu",
    }
    chosen = sys.argv[1:] if any("/" in each for each in sys.argv[1:]) else [*map(str, map(tests.joinpath, FOLDERS))]
    options = ["-p", "plugin", "-p", "no:cacheprovider", "-q", "--tb=short", f"--confcutdir={tests}"]
    options += ["--timeout=180", "-o", "timeout_func_only=true"]
    more = [each for each in sys.argv[1:] if each not in chosen]
    command = [sys.executable, "-m", "pytest", f"--rootdir={sources}", "-c", str(sources / "pyproject.toml"), *options]
    return subprocess.run(
        [*command, "--continue-on-collection-errors", *chosen, *more], env=environment, cwd=sources
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
