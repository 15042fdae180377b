"""The settings as plain text, as a settings file, and as Markdown.

``python -m serve_app.config.reference > docs/settings.md; warmpath settings --yaml > docs/settings.yaml``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from textwrap import wrap
from typing import Any

from pydantic import BaseModel

from serve_app.config.app import AppConfig
from serve_app.config.autoscaling import AutoscalingConfig
from serve_app.config.cache import CacheSection
from serve_app.config.engine import EngineSection, LoraSection
from serve_app.config.lifecycle import LifecycleSection
from serve_app.config.live import LIVE
from serve_app.config.prompts import PublicPromptConfig
from serve_app.config.quantities import shown_bytes, shown_seconds
from serve_app.config.routing import RoutingSection
from serve_app.config.tenants import ApiKeyConfig, TenantConfig, TenantsSection
from serve_app.config.usage import PricesConfig, UsageSection

_INTRODUCTION = f"""\
# Settings

Made from the descriptions in `serve_app/config/` by `python -m serve_app.config.reference > docs/settings.md`.

Give a setting as `--set NAME=VALUE`, or in a YAML file with `warmpath serve --config FILE`; in `args:` of a Serve
config file; or as `serve run serve_app.app:build_app NAME=VALUE`. Unknown names are errors. Names that vLLM also has
mean the same. `warmpath settings` prints this list, `warmpath settings pin` what has to do with pins.
[settings.yaml](settings.yaml) is a file with all of them.

Units are in the names: `_tokens`, `_blocks`; `_bytes` takes a number of bytes or a size such as `64MiB` (`MB` is a
million), `_s` a number of seconds or a duration such as `5m` or `1h30m`. Relative paths in a settings file start where
the file lies, all others where the command runs.

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
    "Usage": UsageSection,
}
ENTRIES: dict[str, type[BaseModel]] = {
    "The fields of `autoscaling`": AutoscalingConfig,
    "An entry of `tenants`": TenantConfig,
    "An entry of `key_sha256`": ApiKeyConfig,
    "An entry of `public_prompts`": PublicPromptConfig,
    "The fields of `prices`": PricesConfig,
}


def settings_page() -> str:
    """Return the page, with a table for each section."""
    return "\n".join([_INTRODUCTION, *(_table(title, model, names) for title, model, names in _tables())])


EXAMPLES = {
    "autoscaling": "{min_replicas: 2, max_replicas: 8, target_ttft_s: 2s}",
    "allowed_hosts": "[chat.example.com]",
    "speculative_model": "./draft",
    "kv_cache_bytes": "4GiB",
    "host_cache_bytes": "8GiB",
    "disk_cache_bytes": "100GiB",
    "disk_cache_dir": "kv",
    "save_ttl_s": "1h",
    "lora_adapters": "{pirate: adapters/pirate}",
    "allow_runtime_lora": "true",
    "lora_root": "adapters",
    "tenants": f"""
  - name: acme
    key_sha256: [{"a" * 64}]  # from `warmpath keys`
    cache_share: 2.0
  - name: globex
    key_sha256: [{"b" * 64}]""",
    "public_prompts": """
  - name: clerk
    version: "3"
    text: You are a helpful clerk.  # or file: prompts/clerk.txt""",
    "prompts_dir": "prompts",
    "operator_key_sha256": f"[{'c' * 64}]  # from `warmpath keys`",
    "secret_file": "secret",
    "usage_file": "usage.sqlite",
    "otlp_endpoint": "http://127.0.0.1:4318",
    "prices": "{input_per_million: 3, output_per_million: 15}",
}
"""What to write in place of defaults that say little."""

LEFT_OUT = frozenset({"model"})
"""Settings that mean more where they are written: a model that is named must be had, the default may be replaced."""

_YAML_HEAD = """\
# All settings of warmpath with their defaults; made by `warmpath settings --yaml`. Keep the lines you change.
# warmpath serve --config settings.yaml     warmpath check settings.yaml
# Relative paths start where this file lies. Sizes: 64MiB, or bytes. Durations: 5m, 1h30m, or seconds.
"""


def settings_yaml() -> str:
    """Return a settings file of all defaults, with comments; ``EXAMPLES`` are comments too."""
    defaults = AppConfig().to_json()
    lines = [_YAML_HEAD.rstrip()]
    for title, model, names in _tables():
        if title in ENTRIES:
            continue
        lines += ["", f"# ---- {title}"]
        properties = model.model_json_schema()["properties"]
        for name in names:
            _, kind, default, meaning = _cells(name, properties[name], required=False)
            lines += [f"# {line}" for line in wrap(f"{meaning} ({kind})".replace("`", ""), 110)]
            written = json.dumps(defaults[name]) if default == "none" else default.replace("`", "")
            lines.append(f"{'# ' * (name in LEFT_OUT)}{name}: {written}")
            if name in EXAMPLES:
                lines += [f"#   {line}".rstrip() for line in f"{name}: {EXAMPLES[name]}".splitlines()]
    return "\n".join(lines) + "\n"


def settings_text(words: Sequence[str] = ()) -> str:
    """Return the list for a terminal: of all settings, or of those with all ``words`` in name or meaning."""
    parts = []
    for title, model, names in _tables():
        properties = model.model_json_schema()["properties"]
        rows = [_cells(name, properties[name], required=model.model_fields[name].is_required()) for name in names]
        entry = title if title in ENTRIES else ""
        lines = [
            f"  {name}: {kind}; " + (f"default {default}" if default != "required" else default) + f"\n      {meaning}"
            for name, kind, default, meaning in rows
            if all(word.lower() in f"{entry} {name} {meaning}".lower() for word in words)
        ]
        parts += ["\n".join([title.replace("`", ""), *lines]) + "\n"] if lines else []
    return "\n".join(parts).replace("`", "") or "no setting has all of these words in its name or meaning\n"


def _tables() -> Iterator[tuple[str, type[BaseModel], Iterable[str]]]:
    in_sections = {name for section in SECTIONS.values() for name in section.model_fields}
    yield "Deployment and requests", AppConfig, [name for name in AppConfig.model_fields if name not in in_sections]
    for title, model in (SECTIONS | ENTRIES).items():
        yield title, model, model.model_fields


def _table(title: str, model: type[BaseModel], names: Iterable[str]) -> str:
    properties = model.model_json_schema()["properties"]
    rows = [_row(name, properties[name], required=model.model_fields[name].is_required()) for name in names]
    return "\n".join([f"## {title}", "", "| name | type | default | meaning |", "|---|---|---|---|", *rows, ""])


def _row(name: str, schema: dict[str, Any], *, required: bool) -> str:
    first, *others = _cells(name, schema, required=required)
    cells = [f"`{first}`", *others]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _cells(name: str, schema: dict[str, Any], *, required: bool) -> tuple[str, str, str, str]:
    default = "required" if required else _value(schema.get("default"), name)
    return name, _type(schema, name), default, schema["description"]


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
    word = {"object": "map", "array": "list", "string": "text"}.get(kind["type"], kind["type"])
    word = "bytes" if name.endswith("_bytes") else "seconds" if _is_duration(name) else word
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


def _is_duration(name: str) -> bool:
    return name.endswith("_s") and not name.endswith("_per_s")


def _value(value: Any, name: str) -> str:
    """Return a default or bound as a settings file takes it."""
    if value is None or value in ({}, []):
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"`{value}`"
    if name.endswith("_bytes"):
        return shown_bytes(value)
    return shown_seconds(value) if _is_duration(name) else f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.stdout.write(settings_page())
