"""The pages that people write and read, and their blocks of code."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
WRITTEN = sorted(page for page in DOCS.rglob("*.md") if page.parent.name != "reference")
"""The other pages are generated from the code."""
_BLOCK = re.compile(r"^(?:<!-- (?P<mark>.*?) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block. ``mark``: the comment on the line before it: "server", or "not run: REASON"."""

    language: str
    text: str
    mark: str

    @property
    def file_name(self) -> str:
        """Return the file that a YAML block stands for, by its first line; "" for none."""
        named = re.match(r"# ([\w.-]+)\n", self.text)
        return named[1] if named and self.language == "yaml" else ""

    @property
    def runs(self) -> bool:
        """Return whether the test of the pages runs or writes it."""
        return not self.mark.startswith("not run: ") and (self.language in ("bash", "python") or bool(self.file_name))


def blocks_of(page: Path) -> list[Block]:
    """Return a page's blocks, in order."""
    return [Block(found["language"], found["text"], found["mark"] or "") for found in _BLOCK.finditer(page.read_text())]
