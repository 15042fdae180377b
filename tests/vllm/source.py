"""Check what this project needs of another release of vLLM, from its wheel's Python files: `make test-vllm-source`.

The rest of the environment is that of `make venv-vllm`; the wheel's compiled parts are not tried. Tests that are named
run with these files over the compiled parts of the installed CPU build, as long as both fit.
"""

import importlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from serve_app.checkpoints.model_cache import default_cache_dir

ROOT = Path(__file__).parents[2]
_READ = (".py", ".json", ".jinja")


def fetched(version: str, cache: Path) -> Path:
    """Return the folder of a release's Python files, fetched and unpacked if needed."""
    target = cache / version
    if not target.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as place:
            pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "-d", place]
            platform = ["--only-binary", ":all:", "--platform", "manylinux_2_28_x86_64", "--python-version", "3.12"]
            subprocess.run([*pip, *platform, f"vllm=={version}"], check=True)  # pip itself
            (wheel,) = Path(place).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                files = [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(_READ)]
                archive.extractall(Path(place, "unpacked"), files)
            Path(place, "unpacked").rename(target)
    return target


def arguments() -> None:
    """Check that vLLM has all arguments that it is given."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from serve_app.engine.vllm.event_endpoints import EventEndpoints
    from serve_app.engine.vllm.settings import VllmSettings, engine_arguments

    settings = VllmSettings("m", num_blocks=9, block_bytes=1, copies=True, lora=True)
    given = engine_arguments(settings, EventEndpoints(Path("/run")), on_cpu=True)
    inspect.signature(AsyncEngineArgs).bind(**given)
    importlib.import_module("serve_app.engine.vllm.executor")


def requests() -> None:
    """Check that requests and their sampling have the form that vLLM takes."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

    from serve_app.engine.vllm.sampling.params import vllm_sampling
    from tests.serve_app.engine.tiny import request

    prompt = tokens_input([1], cache_salt="salt")
    for exact in (True, False):
        params = SamplingParams(**vllm_sampling(request("r", [1], 1, seed=7), {"warmpath.tenant": "a"}, exact=exact))
    lora = LoRARequest(lora_name="a", lora_int_id=1, lora_path="/a")
    inspect.signature(AsyncLLM.generate).bind(None, prompt, params, "r", lora_request=lora, priority=0)
    inspect.signature(AsyncLLM.from_vllm_config).bind(None, stat_loggers=[], disable_log_stats=True)


def parsers() -> None:
    """Check that answers can be read with vLLM's parsers."""
    from serve_app.engine.vllm.parsers import differences

    if wrong := differences():
        raise TypeError(wrong)


STARTS: dict[str, Callable[[], None]] = {"arguments": arguments, "requests": requests, "parsers": parsers}
"""Without these nothing is served, or nothing by vLLM's parsers."""


def told() -> dict[str, str]:
    """Return each check of the imported vLLM with what fails, "" if nothing."""
    from serve_app.engine.vllm.scheduling import hooks

    checks: list[tuple[str, Callable[[], None]]] = [("isolation", hooks.isolation), *hooks.CHECKS.items()]
    return {name: hooks.failure(check) for name, check in (*checks, *STARTS.items())}


def told_of(*sources: Path) -> dict[str, str]:
    """Return ``told`` of the vLLM in ``sources``, by default the installed one, from a process of its own."""
    path = os.pathsep.join(map(str, (*sources, ROOT)))
    environment = {**os.environ, "PYTHONPATH": path, "VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"}
    program = "import json; from tests.vllm.source import told; print(json.dumps(told()))"
    done = subprocess.run(  # our own program
        [sys.executable, "-c", program], env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def tested(version: str, source: Path, tests: Sequence[str]) -> int:
    """Run tests with a release's Python files over the installed build's compiled parts; return pytest's status."""
    for part in Path(importlib.import_module("vllm").__path__[0]).glob("*.so"):
        link = source / "vllm" / part.name
        link.unlink(missing_ok=True)
        link.symlink_to(part)
    about = source / f"vllm-{version}.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (source, ROOT))), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-m", "vllm", *tests]
    return subprocess.run(command, env=environment, cwd=ROOT).returncode  # our own tests


def main(version: str, *tests: str) -> int:
    """Print a line for each check of a release, and run ``tests``; return 1 if what the installed one allows fails."""
    source = fetched(version, default_cache_dir().with_name("vllm"))
    installed, found = told_of(), told_of(source)
    for name, why in found.items():
        print(f"{name:15} {why or 'ok'}" + f" (as in the installed vLLM: {installed[name]})" * bool(installed[name]))
    worse = [name for name, why in found.items() if why and not installed[name]]
    print(f"vLLM {version}: " + (f"{', '.join(worse)} differ" if worse else "all that the installed one allows"))
    return 1 if worse else tested(version, source, tests) if tests else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
