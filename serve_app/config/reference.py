"""The settings as Markdown tables: ``python -m serve_app.config.reference > docs/settings.md``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from serve_app.config.app import AppConfig
from serve_app.config.autoscaling import AutoscalingConfig
from serve_app.config.cache import MIB, CacheSection
from serve_app.config.engine import EngineSection, LoraSection
from serve_app.config.lifecycle import LifecycleSection
from serve_app.config.live import LIVE
from serve_app.config.prompts import PublicPromptConfig
from serve_app.config.routing import RoutingSection
from serve_app.config.tenants import TenantConfig, TenantsSection

_INTRODUCTION = f"""\
# Settings

Made from the descriptions in `serve_app/config/` by `python -m serve_app.config.reference > docs/settings.md`.

Give a setting as `--set NAME=VALUE`, or in a YAML file with `warmpath serve --config FILE`; in `args:` of a Serve
config file; or as `serve run serve_app.app:build_app NAME=VALUE`. Unknown names are errors. Names that vLLM also has
mean the same. Units are in the names: `_s` seconds, `_tokens`, `_blocks`, `_bytes`; all are plain numbers. Relative
paths start where the command runs.

These are live: as `user_config` in a Serve config file ([clusters](cluster.md#user_config)) they change without
a restart:
{", ".join(f"`{name}`" for name in sorted(LIVE))}.
"""

SECTIONS: dict[str, type[BaseModel]] = {
    "Engine": EngineSection,
    "KV cache": CacheSection,
    "LoRA adapters": LoraSection,
    "Routing": RoutingSection,
    "Joining and leaving": LifecycleSection,
    "Tenants and keys": TenantsSection,
}
ENTRIES: dict[str, type[BaseModel]] = {
    "The fields of `autoscaling`": AutoscalingConfig,
    "An entry of `tenants`": TenantConfig,
    "An entry of `public_prompts`": PublicPromptConfig,
}


def settings_page() -> str:
    """Return the page, with a table for each section."""
    in_sections = {name for section in SECTIONS.values() for name in section.model_fields}
    own = [name for name in AppConfig.model_fields if name not in in_sections]
    parts = [_INTRODUCTION, _table("Deployment and requests", AppConfig, own)]
    parts += [_table(title, model, model.model_fields) for title, model in (SECTIONS | ENTRIES).items()]
    return "\n".join(parts)


def _table(title: str, model: type[BaseModel], names: Iterable[str]) -> str:
    properties = model.model_json_schema()["properties"]
    rows = [_row(name, properties[name], required=model.model_fields[name].is_required()) for name in names]
    return "\n".join([f"## {title}", "", "| name | type | default | meaning |", "|---|---|---|---|", *rows, ""])


def _row(name: str, schema: dict[str, Any], *, required: bool) -> str:
    default = "required" if required else _value(schema.get("default"), name)
    cells = [f"`{name}`", _type(schema, name), default, schema["description"]]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(schema: dict[str, Any], name: str) -> str:
    """Return a field's type and bounds: ``integer, 1 to 1024``."""
    [kind] = [kind for kind in schema.get("anyOf", [schema]) if kind.get("type") != "null"]
    if "enum" in kind:
        return " or ".join(f"`{choice}`" for choice in kind["enum"])
    if "const" in kind:
        return f"`{kind['const']}`"
    if kind.get("format") == "path":
        return "path"
    if "$ref" in kind:
        return "map"
    word = {"object": "map", "array": "list"}.get(kind["type"], kind["type"])
    bounds = _bounds(kind, name)
    return f"{word}, {bounds}" if bounds else word


def _bounds(kind: dict[str, Any], name: str) -> str:
    least, most = kind.get("minimum"), kind.get("maximum")
    if "exclusiveMinimum" in kind:
        above = f"above {_value(kind['exclusiveMinimum'], name)}"
        return f"{above}, at most {_value(most, name)}" if most is not None else above
    if least is not None and most is not None:
        return f"{_value(least, name)} to {_value(most, name)}"
    return f"at least {_value(least, name)}" if least is not None else ""


def _value(value: Any, name: str) -> str:
    """Return a default or bound as a settings file takes it; whole MiB are named beside the bytes."""
    if value is None or value in ({}, []):
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and name.endswith("_bytes") and value and value % MIB == 0:
        return f"{value} ({value // MIB} MiB)"
    return f"{value:g}" if isinstance(value, float) else str(value) if isinstance(value, int) else f"`{value}`"


if __name__ == "__main__":
    sys.stdout.write(settings_page())
