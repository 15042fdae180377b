"""Commands, scripts and settings of README and the documentation, run as printed, page by page."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.common.server import instance
from tests.integration.conftest import alone
from tests.pages import README, ROOT, WRITTEN, Block, blocks_of

pytestmark = [pytest.mark.integration, pytest.mark.long]

PRINTED = "127.0.0.1:8000"
SAME = {"make serve": "warmpath serve"}
"""The first one also installs."""


def is_server(block: Block) -> bool:
    return block.mark == "server" or block.text.strip() in SAME


def server_of(page: Path) -> str:
    """Return the first server of a page, or "" if it starts none."""
    command = next((block.text.strip() for block in blocks_of(page) if is_server(block)), "")
    return SAME.get(command, command)


PAGES = sorted((page for page in (README, *WRITTEN) if any(block.runs for block in blocks_of(page))), key=server_of)
"""Pages that begin with equal servers follow each other, and share one."""


class Reader:
    """Follows the pages in a clone, as a reader does. One server runs at a time, for as long as pages ask for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = ExitStack()
        self.started: tuple[str, Path | None] = "", None
        self.url = ""
        for name in ("LICENSE", "cluster", "examples", "docs", ".venv"):
            (folder / name).symlink_to(ROOT / name)

    def does(self, block: Block) -> None:
        """Write a file, start a server, or run a command or a script; fail if that fails."""
        text = block.text.replace(PRINTED, self.url.removeprefix("http://"))
        if block.file_name:
            (self.folder / block.file_name).write_text(text)
        elif is_server(block):
            self._serve(SAME.get(text.strip(), text.strip()))
        else:
            program = ["bash", "-euo", "pipefail", "-c"] if block.language == "bash" else [sys.executable, "-c"]
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            env = {**os.environ, "PATH": path, "WARMPATH_URL": self.url, "PYTHONPATH": str(ROOT)}
            done = subprocess.run(
                [*program, text], cwd=self.folder, env=env, capture_output=True, text=True, check=False, timeout=300
            )
            assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"

    def _serve(self, command: str) -> None:
        program, *arguments = shlex.split(command)
        assert program == "warmpath" and arguments[0] == "serve", command
        files = [argument for argument in arguments if (self.folder / argument).exists()]
        as_it_was = self.folder if files else None  # a server with a page's own files serves only that page
        if (command, as_it_was) == self.started:
            return
        self.server.close()
        places = [str(self.folder / argument) if argument in files else argument for argument in arguments[1:]]
        self.url = self.server.enter_context(alone(instance(*places)))
        self.started = command, as_it_was


@pytest.fixture(scope="module")
def running() -> Iterator[list[Reader]]:
    """The reader of the previous page, with its server."""
    readers: list[Reader] = []
    yield readers
    for reader in readers:
        reader.server.close()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_works_as_printed(page: Path, tmp_path: Path, running: list[Reader]) -> None:
    """Every block works, except those with the comment `not run: REASON`."""
    reader = Reader(tmp_path)
    if running:
        before = running.pop()
        reader.server, reader.started, reader.url = before.server, before.started, before.url
    running.append(reader)
    for block in blocks_of(page):
        if block.runs:
            reader.does(block)
