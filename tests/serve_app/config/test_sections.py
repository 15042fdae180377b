"""The settings: each is described, and reading them needs nothing that is slow to import."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import BaseModel

from serve_app.config.app import AppConfig
from serve_app.config.reference import ENTRIES, SECTIONS


@pytest.mark.parametrize("model", [AppConfig, *ENTRIES.values()])
def test_every_setting_is_described(model: type[BaseModel]) -> None:
    """The description is what ``docs/settings.md`` shows."""
    assert [name for name, field in model.model_fields.items() if not field.description] == []


def test_no_setting_is_in_two_sections() -> None:
    """Else one of the two definitions would win by the order of base classes."""
    names = [name for section in SECTIONS.values() for name in section.model_fields]
    assert len(names) == len(set(names))
    assert not set(names) & set(AppConfig.__annotations__)


def test_importing_the_settings_loads_no_model_library_and_no_other_room() -> None:
    """A command line that is mistyped answers at once, and every room may import the settings."""
    script = "import sys, serve_app; old = {*sys.modules}; import serve_app.config.app; print(*{*sys.modules} - old)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"torch", "transformers", "ray", "numpy"}
    ours = {name for name in loaded if name.partition(".")[0] in ("router", "serve_app")}
    assert {name for name in ours if not name.startswith("serve_app.config")} <= {"router", "router.settings"}
