"""docs/settings.md is what the settings say of themselves."""

from __future__ import annotations

from pathlib import Path

from serve_app.config.reference import settings_page

PAGE = Path(__file__).parents[3] / "docs" / "settings.md"


def test_the_page_of_settings_is_current() -> None:
    """To write it anew: ``python -m serve_app.config.reference > docs/settings.md``."""
    assert PAGE.read_text() == settings_page()


def test_the_page_shows_type_bounds_default_and_meaning() -> None:
    """One row of each kind."""
    page = settings_page()
    assert "| `block_size` | integer, 1 to 1024 | 16 | tokens in a KV block |" in page
    assert "| `max_body_bytes` | integer, at least 1024 | 8388608 (8 MiB) | larger bodies" in page
    assert "| `save_ttl_s` | number, above 0 | none | " in page
    assert "| `enable_prefix_caching` | boolean | true | " in page
    assert "| `engine` | `torch` or `simulated` | `torch` | " in page
    assert "## An entry of `tenants`" in page
