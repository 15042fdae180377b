"""Runs what CI's time allows of `make test-long` and `make test-vllm`; `.ci/run` runs all the rest before.

First come the files that were left the last time, then those that the change can touch by imports, then the others.
No file begins after an hour, and what was not run is named at the end. Usage: `.ci/rest.py SECONDS`, those since CI
began. What each file's last run gave is kept in the user's cache (``$XDG_CACHE_HOME/warmpath/ci.json``); without it,
the change is what was committed in the last twelve hours.
"""

import ast
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath

FILES_UNTIL_S, TESTS_UNTIL_S, END_S = 60 * 60, 64 * 60, 69 * 60
"""No file begins after the first, no test after the second, and what runs at the last is ended."""
PREPARED = {"test-long": "venv", "test-vllm": "venv-vllm"}
PACKAGES = ("router", "serve_app", "cluster", "benchmarks", "tests")
EVERYTHING = (
    "pyproject.toml",
    "constraints.txt",
    "Makefile",
    ".ci/run",
    ".ci/clock.py",
    ".ci/rest.py",
    "tests/conftest.py",
)
"""A change there can touch every test."""
RECENT_S = 12 * 3600
PAGE, PAGE_MODULE = "serve_app/ingress/page/", "serve_app/ingress/routes/page.py"
"""The module serves the files of the folder, whatever they are called."""


@dataclass
class Last:
    """The last run of a test file. ``passed``: the commit at which all of it passed."""

    passed: str = ""
    duration_s: float = 0.0
    left: bool = False


class Tree:
    """The checkout: its files, and how far each test file is from the others by imports."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = self._git("ls-files").splitlines()
        self._python = {path for path in self.files if path.endswith(".py") and path.split("/")[0] in PACKAGES}
        self._data: defaultdict[str, list[str]] = defaultdict(list)
        for path in self.files:
            if path not in self._python:
                self._data[PurePosixPath(path).name].append(path)

    def _git(self, *arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=self.root, capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else ""

    @cached_property
    def head(self) -> str:
        """The commit that is checked out."""
        return self._git("rev-parse", "HEAD").strip()

    @cached_property
    def recent(self) -> str:
        """The newest commit that is not recent, or the oldest there is."""
        now_s = int(self._git("log", "-1", "--format=%ct") or 0)
        base = self._git("rev-list", "-1", f"--before={now_s - RECENT_S}", "HEAD").strip()
        return base or self._git("rev-list", "--max-parents=0", "HEAD").split("\n")[0]

    def changed_since(self, commit: str) -> set[str] | None:
        """Return the files that differ from a commit; None if it is not known here."""
        if not commit or not self._git("rev-parse", "--verify", f"{commit}^{{commit}}"):
            return None
        return {line for line in self._git("diff", "--name-only", commit).splitlines() if line}

    def text(self, path: str) -> str:
        """Return a file's text."""
        return (self.root / path).read_text(errors="replace")

    def distances(self, path: str) -> dict[str, int]:
        """Return the files that a test file can run, by the number of imports to them."""
        found, wave, away = {path: 0}, [path], 0
        while wave:
            away += 1
            wave = [used for user in wave for used in self._used(user) if used not in found]
            found |= dict.fromkeys(wave, away)
        return found

    def _used(self, path: str) -> set[str]:
        if path not in self._uses:
            self._uses[path] = self._find_used(path) if path in self._python else set()
        return self._uses[path]

    @cached_property
    def _uses(self) -> dict[str, set[str]]:
        return {}

    def _find_used(self, path: str) -> set[str]:
        used = {str(folder / "__init__.py") for folder in PurePosixPath(path).parents}
        if PurePosixPath(path).name.startswith("test_"):
            used |= {str(folder / "conftest.py") for folder in PurePosixPath(path).parents}
        for node in ast.walk(ast.parse(self.text(path))):
            if isinstance(node, ast.Import):
                used.update(module for name in node.names for module in self._modules(name.name))
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for name in node.names:
                    used.update(self._modules(f"{node.module}.{name.name}"))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200:
                # A module that another process runs, and a file that is read, are whole strings.
                if re.fullmatch(r"\w+(\.\w+)+(:\w+)?", node.value):
                    used.update(self._modules(node.value))
                if "." in node.value or "/" in node.value:
                    used.update(self._data.get(PurePosixPath(node.value).name, ()))
        if path == PAGE_MODULE:
            used |= {data for data in self.files if data.startswith(PAGE)}
        return used & set(self.files)

    def _modules(self, name: str) -> Iterable[str]:
        """Yield the files of a dotted name: of a module, of the module that has it, and of the packages above."""
        parts = name.replace(":", ".").split(".")
        if parts[0] in PACKAGES:
            for end in range(1, len(parts) + 1):
                yield "/".join(parts[:end]) + ".py"
                yield "/".join((*parts[:end], "__init__.py"))


def suites(tree: Tree) -> dict[str, list[str]]:
    """Return the test files of each make target."""
    tests = [path for path in tree.files if re.fullmatch(r"tests/(.*/)?test_\w+\.py", path)]
    vllm = [path for path in tests if path.startswith("tests/vllm/")]
    long = [path for path in tests if path not in vllm and re.search(r"\bmark\.long\b", tree.text(path))]
    return {"test-long": long, "test-vllm": [path for path in vllm if "gpu_benchmark" not in path]}


def touched(tree: Tree, path: str, last: Last) -> int | None:
    """Return how near a test file is to what changed since it passed; None if it cannot be touched."""
    changed = tree.changed_since(last.passed)
    if changed is None:
        changed = tree.changed_since(tree.recent) or set()
    if any(each.startswith(EVERYTHING) for each in changed):
        return 1
    distances = tree.distances(path)
    return min((distances[each] for each in changed if each in distances), default=None)


def ordered(tree: Tree, paths: Sequence[str], history: Mapping[str, Last]) -> tuple[list[str], list[str]]:
    """Return the files that come first, and the others, each in their order; among equals the longest is first."""
    first: list[tuple[int, float, str]] = []
    rest: list[tuple[float, str]] = []
    for path in paths:
        last = history.get(path, Last())
        near = touched(tree, path, last)
        if last.left or near is not None:
            first.append((-1 if last.left else near or 0, -last.duration_s, path))
        else:
            rest.append((-last.duration_s, path))
    return [path for *_, path in sorted(first)], [path for *_, path in sorted(rest)]


@dataclass(frozen=True)
class Moments:
    """Seconds since the epoch: no file begins after the first, no test after the second, all is over at the last."""

    files_until_s: float
    tests_until_s: float
    end_s: float


@dataclass(frozen=True)
class Run:
    """One run of a target. ``whole``: files whose tests all ended, by their seconds; ``failed``: with a failure."""

    good: bool
    whole: dict[str, float]
    failed: set[str]


def call(command: Sequence[str], root: Path, environment: Mapping[str, str], end_s: float) -> bool | None:
    """Run a command in a group of processes of its own; return whether it succeeded, None if its time was over."""
    process = subprocess.Popen(command, cwd=root, env=environment, start_new_session=True)
    try:
        return process.wait(max(end_s - time.time(), 1.0)) == 0
    except subprocess.TimeoutExpired:
        for sent, patience_s in ((signal.SIGINT, 20.0), (signal.SIGKILL, 5.0)):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, sent)
                process.wait(patience_s)
                break
        return None


def run(root: Path, target: str, paths: Sequence[str], moments: Moments) -> Run:
    """Run the files of a target in their order."""
    with tempfile.TemporaryDirectory(prefix="warmpath-ci-") as made:
        folder = Path(made)
        (folder / "order").write_text("\n".join(paths))
        environment = {
            **os.environ,
            "WARMPATH_CI_FOLDER": made,
            "WARMPATH_CI_FILES_UNTIL": str(moments.files_until_s),
            "WARMPATH_CI_TESTS_UNTIL": str(moments.tests_until_s),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(root / ".ci"), os.environ.get("PYTHONPATH")))),
        }
        ended = call(["make", target, f"ARGS=-p clock {' '.join(paths)}"], root, environment, moments.end_s)
        return read(folder, paths, good=ended is not False)


def read(folder: Path, paths: Sequence[str], *, good: bool) -> Run:
    """Return what the workers of a run have told in a folder."""
    seconds, ended, collected = Counter[str](), Counter[str](), Counter[str]()
    failed: set[str] = set()
    for report in folder.glob("*.jsonl"):
        for path, what, amount in map(json.loads, report.read_text().splitlines()):
            if what == "collected":
                collected[path] = int(amount)
            elif what == "ended":
                ended[path] += 1
            else:
                seconds[path] += amount
                failed |= {path} if what == "failed" else set()
    # A file of which nothing was collected, by marks, has nothing to run.
    whole = {path: seconds[path] for path in paths if collected and ended[path] >= collected[path]}
    return Run(good and not failed, whole, failed)


def main() -> int:
    """Run the suites, and return CI's exit status."""
    began_s = time.time() - float(sys.argv[1])
    root = Path(__file__).resolve().parents[1]
    tree = Tree(root)
    kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "warmpath" / "ci.json"
    history = {path: Last(**last) for path, last in json.loads(kept.read_text()).items()} if kept.exists() else {}
    parts = {target: ordered(tree, paths, history) for target, paths in suites(tree).items()}
    left = {target: [*first, *rest] for target, (first, rest) in parts.items()}
    good = True
    for part, target in [(part, target) for part in (0, 1) for target in parts]:
        asked = [path for path in left[target] if part or path in parts[target][0]]
        after = [other for other in list(parts)[list(parts).index(target) + 1 :] if not part and parts[other][0]]
        now_s, last_s = time.time(), began_s + FILES_UNTIL_S
        moments = Moments(now_s + (last_s - now_s) / (1 + len(after)), began_s + TESTS_UNTIL_S, began_s + END_S)
        if not asked or now_s >= moments.files_until_s:
            continue
        print(f"{target}: {len(asked)} files{'' if part else ' that come first'}", flush=True)
        prepared = call(["make", PREPARED[target]], root, os.environ, last_s)
        ran = run(root, target, asked, moments) if prepared else Run(prepared is None, {}, set())
        good &= ran.good
        for path, duration_s in ran.whole.items():
            passed = tree.head if path not in ran.failed else history.get(path, Last()).passed
            history[path] = Last(passed, duration_s, left=path in ran.failed)
        left[target] = [path for path in left[target] if path not in ran.whole]
    for path in (path for paths in left.values() for path in paths):
        history[path] = replace(history.get(path, Last()), left=True)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps({path: asdict(last) for path, last in sorted(history.items())}, indent=1))
    print(f"CI took {(time.time() - began_s) / 60:.0f} minutes")
    for target, paths in left.items():
        if paths:
            print(f"not run for want of time, first the next time ({target}): {' '.join(paths)}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
