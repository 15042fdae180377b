"""docs: settings is generated from the settings' own descriptions; reading them imports nothing slow."""

import subprocess
import sys
from pathlib import Path

import yaml

from serve_app.config.app import AppConfig
from serve_app.config.files import load_settings
from serve_app.config.reference import EXAMPLES, LEFT_OUT, SECTIONS, settings_page, settings_text, settings_yaml

FILE = Path(__file__).parents[3] / "docs" / "reference" / "settings.yaml"
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "settings.md"


def test_page_and_settings_file_are_current() -> None:
    """To write them again, see ``serve_app/config/reference.py``. A row of each kind is checked."""
    page = settings_page()
    assert PAGE.read_text() == page
    assert FILE.read_text() == settings_yaml()
    for row in (
        "| `block_size` | integer, 1 to 1024 | 16 | tokens in a KV block; vLLM on a CPU: 32 |",
        "| `max_body_bytes` | bytes, at least 1KiB | 8MiB | larger bodies",
        "| `save_ttl_s` | seconds, above 0 | none | ",
        "| `enable_prefix_caching` | boolean | true | ",
        "| `engine` | `torch` or `vllm` or `simulated` | `torch` | ",
        "## An entry of `tenants`",
    ):
        assert row in page


def test_the_settings_file_holds_every_setting_with_its_default() -> None:
    """An unchanged copy changes no setting; the model is only a comment, because it would have to exist."""
    assert set(yaml.safe_load(FILE.read_text())) == set(AppConfig.model_fields) - LEFT_OUT
    assert load_settings(FILE, []) == AppConfig()
    assert f"# model: {AppConfig().model}\n" in FILE.read_text()


def test_the_examples_in_the_settings_file_can_be_used() -> None:
    """Each differs from the default, and all of them work together."""
    text = FILE.read_text()
    examples = "\n".join(f"{name}: {example}" for name, example in EXAMPLES.items())
    assert all(f"#   {line}".rstrip() in text for line in examples.splitlines())
    found = AppConfig.model_validate(yaml.safe_load(examples)).to_json()
    assert {name for name in EXAMPLES if found[name] == AppConfig().to_json()[name]} == set()


def test_the_list_for_a_terminal_is_searched_by_words() -> None:
    assert "  max_pulls: integer, 1 to 64; default 4\n      prefixes" in settings_text(["PULL", "once"])
    assert settings_text().count("\n  ") // 2 >= len(AppConfig.model_fields)
    assert settings_text(["no-such-word"]).startswith("no setting has")


def test_no_setting_is_in_two_sections() -> None:
    """Otherwise the order of base classes would choose one of the two definitions."""
    names = [name for section in SECTIONS.values() for name in section.model_fields]
    assert len(names) == len(set(names))
    assert not set(names) & set(AppConfig.__annotations__)


def test_importing_the_settings_loads_no_model_library_and_no_other_package() -> None:
    """A mistyped command line gets its error at once, and every package may import the settings."""
    script = "import sys, serve_app; old = {*sys.modules}; import serve_app.config.app; print(*{*sys.modules} - old)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"torch", "transformers", "ray", "numpy"}
    ours = {name for name in loaded if name.partition(".")[0] in ("router", "serve_app")}
    assert {name for name in ours if not name.startswith("serve_app.config")} <= {"router", "router.settings"}
