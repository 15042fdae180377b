"""The wheel has all files of the tree, with data files, and works without the tree.

`make lint` refuses mistakes that break a fresh clone, the name of another project on PyPI, and two types of one name.
"""

import os
import runpy
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import msgspec
import pytest

import router

ROOT = Path(__file__).parents[1]
PACKAGES = ("router", "serve_app")
LIBRARY = """
from router.core import RoutingCore
from router.protocol.request import RoutedRequest
from router.vllm_events.batches import BlockStored, KvEventBatch
from router.vllm_events.pool import FollowedPool
core, pool, root = RoutingCore("r"), FollowedPool(16, 10), bytes(16)
core.update_replicas(["b", "a"])
stored = BlockStored([b"x"], None, [*range(16)], 16, extra_keys=[(root.hex(),)])
core.apply("a", pool.translate(KvEventBatch(0, [stored])))
(chain,) = pool
print(core.decide(RoutedRequest("1", chain, 20, root)).replica_id)
assert not {"ray", "torch", "vllm"} & set(sys.modules)
"""
"""A small example of the purpose of the router's own distribution."""
UNINSTALLED = """
from importlib import metadata
found = metadata.Distribution.from_name
def missing(name):
    if name == "warmpath-serve":
        raise metadata.PackageNotFoundError(name)
    return found(name)
metadata.Distribution.from_name = missing
import serve_app.app, serve_app.ingress.routes.application, serve_app.replica.replica
from serve_app.cli.main import app
app(["--version"])
"""
"""Starts of the processes of an instance, where only the clone is there."""

CHECK = runpy.run_path(str(ROOT / ".ci/check_tree.py"))


def in_tree() -> set[str]:
    """Return the packages' files, as paths."""
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*") if file.is_file())
    made = ("__pycache__", "build", "warmpath_router.egg-info")  # by `pip install ./router`, too
    paths = (str(file.relative_to(ROOT)) for file in files if not set(made) & set(file.parts))
    return {path for path in paths if not path.endswith((".pyc", "pyproject.toml"))}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built by the installed setuptools from a copy of the necessary files."""
    copy, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    return build_wheel(copy, built)


def build_wheel(source: Path, built: Path) -> Path:
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", build, str(built)], cwd=source, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's contents in a separate directory."""
    place = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    return place


def run(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with only the wheel's packages and their dependencies."""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=installed, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def test_the_wheel_holds_exactly_the_trees_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == in_tree()
    assert {"serve_app/ingress/page/index.html", "serve_app/replay/page.html"} <= held


def test_it_has_pyprojects_version_and_a_command(installed: Path) -> None:
    version = router.__version__
    assert run(installed, "-m", "serve_app.cli.entry", "--version").stdout == f"warmpath {version}\n"
    entry_points = next(installed.glob(f"warmpath_serve-{version}.dist-info/entry_points.txt")).read_text()
    assert "warmpath = serve_app.cli.entry:main" in entry_points
    where = run(installed, "-c", "import serve_app, router; print(serve_app.__file__)").stdout
    assert where.strip() == str(installed / "serve_app" / "__init__.py")


def test_a_clone_runs_without_an_installation() -> None:
    """Nothing asks for the distribution's metadata: on a machine without a network, the clone is only on PYTHONPATH."""
    done = subprocess.run([sys.executable, "-c", UNINSTALLED], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == f"warmpath {router.__version__}\n", done.stderr


def test_serve_deploy_accepts_the_commands_output(installed: Path) -> None:
    """The output of `warmpath settings --yaml` makes an application, without the clone."""
    written = run(installed, "-m", "serve_app.cli.entry", "settings", "--yaml").stdout
    (installed / "settings.yaml").write_text(written)
    done = run(installed, "-m", "serve_app.cli.entry", "check", "settings.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    build = "import yaml; from serve_app.app import build_app; build_app(yaml.safe_load(open('settings.yaml')) or {})"
    built = run(installed, "-c", build)
    assert built.returncode == 0, built.stderr[-2000:]


def test_the_router_is_a_distribution_that_needs_neither_ray_nor_torch(tmp_path: Path) -> None:
    """Installed in an empty environment with only its dependencies, it decides by vLLM's events."""
    source = shutil.copytree(ROOT / "router", tmp_path / "router", ignore=shutil.ignore_patterns("__pycache__"))
    wheel = build_wheel(source, tmp_path)
    venv.create(tmp_path / "empty")
    (site,) = (tmp_path / "empty" / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    here = Path(msgspec.__file__).parents[1]
    for name in ("numpy", "numpy.libs", "msgspec", "zmq", "pyzmq.libs", "xxhash"):
        if (here / name).exists():
            (site / name).symlink_to(here / name)
    rooms = {file.parent.name for file in source.rglob("*.py")} - {"serve"}
    assert {file.parent.name for file in (site / "router").rglob("*.py")} == rooms
    metadata = next(site.glob("warmpath_router-*.dist-info/METADATA")).read_text()
    assert f"Version: {router.__version__}\n" in metadata
    assert metadata.count("Requires-Dist:") <= 6
    python = tmp_path / "empty" / "bin" / "python"
    script = "import sys, router.feed\nfrom router.vllm_events.subscriber import EventSubscriber\n" + LIBRARY
    done = subprocess.run([python, "-I", "-c", script], capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout == "a\n", done.stderr


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with one plain file."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "fine.md").write_text("pip install . && pip install warmpath-serve; warmpath serve\n")
    add(tmp_path)
    return tmp_path


def add(clone: Path, *flags: str) -> list[str]:
    subprocess.run(["git", "add", "--all", *flags], cwd=clone, check=True)
    return list(CHECK["problems"](clone))


def test_a_clean_tree_has_no_problems(clone: Path) -> None:
    assert add(clone) == []


def test_links_and_ignored_files_are_refused(clone: Path) -> None:
    (clone / ".venv-vllm").symlink_to("/of/one/machine")
    (clone / "notes.log").write_text("x")
    (clone / ".gitignore").write_text("*.log\n")
    link, ignored = add(clone, "--force")
    assert link.startswith(".venv-vllm: a tracked link")
    assert ignored.startswith("notes.log: tracked, though .gitignore names it")


@pytest.mark.parametrize(
    "line", ["pip install {}", "python -m pip install -U '{}[vllm]'", 'pip install "{}==0.2"', "`pip install {}`"]
)
def test_another_projects_name_is_refused(clone: Path, line: str) -> None:
    (clone / "page.md").write_text(f"\n{line.format('warmpath')}\n")
    [problem] = add(clone)
    assert problem.startswith("page.md:2: PyPI's warmpath is another project")


def test_a_public_types_name_is_used_once(clone: Path) -> None:
    for package, source in (("router", "class Row: ...\nclass _Own: ..."), ("tests", "class Row: ...")):
        (clone / package).mkdir()
        (clone / package / "rows.py").write_text(source)
    assert add(clone) == []
    (clone / "serve_app").mkdir()
    (clone / "serve_app" / "table.py").write_text("class _Own: ...\nclass Table:\n    class Row: ...\nROWS = row = 1\n")
    (clone / "serve_app" / "view.py").write_text("ROWS = row = 1\nTable = dict[str, int]\n")
    nested, alias = add(clone)
    assert nested.startswith("serve_app/table.py:3: router/rows.py:1 has a type Row, too")
    assert alias.startswith("serve_app/view.py:2: serve_app/table.py:2 has a type Table, too")
