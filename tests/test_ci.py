"""CI keeps a clock: what a change can touch runs first, no file begins too late, and what was left is named."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / ".ci"))
import rest  # noqa: E402

TESTS = {
    "test_a.py": "def test_one(): pass\ndef test_two(): pass\n",
    "test_b.py": "def test_one(): assert False\n",
    "test_z.py": "def test_one(): pass\n",
}


def session(folder: Path, order: list[str], files_until_s: float, tests_until_s: float, *workers: str) -> Any:
    """Run pytest with the clock over these files, and return what became of them."""
    told = folder / "told"
    told.mkdir()
    (told / "order").write_text("\n".join(order))
    env = os.environ | {
        "WARMPATH_CI_FOLDER": str(told),
        "WARMPATH_CI_FILES_UNTIL": str(files_until_s),
        "WARMPATH_CI_TESTS_UNTIL": str(tests_until_s),
        "PYTHONPATH": str(ROOT / ".ci"),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "clock", "-p", "no:cacheprovider", *workers, *sorted(TESTS)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    return done.returncode, rest.read(told, order, good=True)


@pytest.mark.parametrize(
    "workers", [(), ("-n", "1", "--dist", "loadfile", "--no-loadscope-reorder")], ids=["alone", "xdist"]
)
def test_no_file_begins_after_its_moment(tmp_path: Path, workers: tuple[str, ...]) -> None:
    """Files run in the given order; one that has begun is ended, others are left; failures are told."""
    for name, text in TESTS.items():
        (tmp_path / name).write_text(text)
    order = ["test_z.py", "test_b.py", "test_a.py"]
    code, ran = session(tmp_path, order, time.time() + 600, time.time() + 600, *workers)
    assert (code, ran.good, ran.failed, set(ran.whole)) == (1, False, {"test_b.py"}, set(order))


def test_what_begins_too_late_is_left(tmp_path: Path) -> None:
    for name, text in TESTS.items():
        (tmp_path / name).write_text(text)
    code, ran = session(tmp_path, sorted(TESTS), 0.0, time.time() + 600)
    assert (code, ran.good, ran.whole) == (0, True, {})


def test_a_test_that_begins_too_late_leaves_its_file(tmp_path: Path) -> None:
    """Each file begins in time, but only the first test of each."""
    for name, text in TESTS.items():
        (tmp_path / name).write_text(text)
    _, ran = session(tmp_path, sorted(TESTS), time.time() + 600, 0.0)
    assert set(ran.whole) == {"test_b.py", "test_z.py"}


def test_a_command_is_ended_at_its_end(tmp_path: Path) -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    assert rest.call([sys.executable, "-c", script], tmp_path, os.environ, time.time()) is None
    assert rest.call([sys.executable, "-c", ""], tmp_path, os.environ, time.time() + 60) is True


@pytest.fixture
def tree(tmp_path: Path) -> rest.Tree:
    """A checkout in which one test imports what another one does not."""
    files = {
        "router/__init__.py": "",
        "router/core.py": "from router import block\n",
        "router/block.py": "",
        "serve_app/__init__.py": "",
        "serve_app/cli.py": "def main():\n    import serve_app.engine\n",
        "serve_app/engine.py": "",
        "serve_app/notes.txt": "",
        "cluster/serve.yaml": "",
        "tests/__init__.py": "",
        "tests/conftest.py": "",
        "tests/integration/conftest.py": "COMMAND = ['python', '-m', 'serve_app.cli']\n",
        "tests/integration/test_server.py": "import pytest\npytestmark = pytest.mark.long\n",
        "tests/router/test_core.py": "import router.core\nlong = pytest.mark.long\n",
        "tests/cluster/test_files.py": "FILE = 'cluster/serve.yaml'  # mark.long\n",
        "tests/vllm/test_engine.py": "from serve_app import engine\n",
        "tests/router/test_short.py": "import router.core\n",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    commit(tmp_path)
    return rest.Tree(tmp_path)


def commit(root: Path) -> None:
    name = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    for command in (["init", "-q"], ["add", "-A"], [*name, "commit", "-qm", "x", "--allow-empty"]):
        subprocess.run(["git", *command], cwd=root, check=True)


SERVER, CORE, FILES = "tests/integration/test_server.py", "tests/router/test_core.py", "tests/cluster/test_files.py"


def test_the_files_of_each_target(tree: rest.Tree) -> None:
    assert rest.suites(tree) == {"test-long": sorted([SERVER, CORE, FILES]), "test-vllm": ["tests/vllm/test_engine.py"]}


@pytest.mark.parametrize(
    ("changed", "first"),
    [
        ("router/block.py", {CORE}),
        ("serve_app/engine.py", {SERVER}),
        ("tests/integration/conftest.py", {SERVER}),
        ("cluster/serve.yaml", {FILES}),
        ("serve_app/notes.txt", set()),
        ("tests/conftest.py", {SERVER, CORE, FILES}),
        ("pyproject.toml", {SERVER, CORE, FILES}),
    ],
)
def test_what_a_change_can_touch_comes_first(tree: rest.Tree, changed: str, first: set[str]) -> None:
    """By imports, also inside functions, by modules that a command runs, and by files that a test names."""
    passed = {path: rest.Last(tree.head, 1.0) for path in (SERVER, CORE, FILES)}
    assert rest.ordered(tree, [*passed], passed) == ([], [*sorted(passed)])
    (tree.root / changed).write_text("# new\n")
    commit(tree.root)
    found, others = rest.ordered(rest.Tree(tree.root), [*passed], passed)
    assert (set(found), set(others)) == (first, {*passed} - first)


def test_what_was_left_comes_before_all_and_the_longest_before_others(tree: rest.Tree) -> None:
    passed = {SERVER: rest.Last(tree.head, 1.0), CORE: rest.Last(tree.head, 5.0), FILES: rest.Last("", 3.0, left=True)}
    assert rest.ordered(tree, [*passed], passed) == ([FILES], [CORE, SERVER])
    (tree.root / "router/core.py").write_text("")
    commit(tree.root)
    assert rest.ordered(rest.Tree(tree.root), [*passed], passed) == ([FILES, CORE], [SERVER])


def test_without_a_history_the_change_is_what_is_recent(tree: rest.Tree) -> None:
    """A first commit is all there is; a commit that this clone does not have counts as unknown."""
    assert tree.changed_since("0" * 40) is None
    assert tree.recent == tree.head
    assert rest.ordered(tree, [CORE], {CORE: rest.Last("0" * 40, 2.0)}) == ([], [CORE])


def test_the_history_is_kept_as_it_is(tree: rest.Tree) -> None:
    last = rest.Last("abc", 2.5, left=True)
    assert rest.Last(**json.loads(json.dumps(rest.asdict(last)))) == last
