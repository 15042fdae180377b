"""The settings as plain text, as a settings file, and as Markdown.

`make docs` writes both to docs/reference/.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import Any, NamedTuple

from pydantic import BaseModel

from serve_app.config.app import AppConfig, AutoscalingConfig, RoutingSection
from serve_app.config.cache import CacheSection, LifecycleSection
from serve_app.config.engine import EngineSection, LoraSection
from serve_app.config.live import LIVE
from serve_app.config.prompts import PublicPromptConfig
from serve_app.config.quantities import is_duration, shown_value
from serve_app.config.tenants import ApiKeyConfig, TenantConfig, TenantsSection

_INTRODUCTION = f"""\
# Settings

Made from the descriptions in `serve_app/config/` by `make docs`.

Give a setting as `--set NAME=VALUE`, or in a YAML file with `warmpath serve --config FILE`; in `args:` of a Serve
config file; or as `serve run serve_app:build_app NAME=VALUE`. Unknown names are errors. Names that vLLM also has
mean the same. `warmpath settings` prints this list, `warmpath settings pin` those about pins.
[settings.yaml](settings.yaml) is a file with all of them.

Units are in the names: `_tokens`, `_blocks`; `_bytes` takes a number of bytes or a size such as `64MiB` (`MB` is a
million), `_s` a number of seconds or a duration such as `5m` or `1h30m`. Relative paths in a settings file start where
the file lies, all others where the command runs.

These are live: as `user_config` in a Serve config file ([clusters](../tutorials/cluster.md#change-settings)) they
change without a restart:
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
    "An entry of `key_sha256`": ApiKeyConfig,
    "An entry of `public_prompts`": PublicPromptConfig,
}


class _Row(NamedTuple):
    """One setting. ``default``: as a settings file takes it, "none" or "required"."""

    name: str
    kind: str
    default: str
    meaning: str


def settings_page() -> str:
    """Return the page, with a table for each section."""
    parts = [_INTRODUCTION]
    for title, rows in _tables():
        parts += [f"## {title}", "", "| name | type | default | meaning |", "|---|---|---|---|"]
        for row in rows:
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in (f"`{row.name}`", *row[1:])) + " |")
        parts.append("")
    return "\n".join(parts)


EXAMPLES = {
    "autoscaling": "{min_replicas: 2, max_replicas: 8, target_ttft_s: 2s}",
    "allowed_hosts": "[chat.example.com]",
    "lora_adapters": "{pirate: adapters/pirate}",
    "tenants": f"""
  - name: acme
    key_sha256: [{"a" * 64}]  # from `warmpath keys`
    cache_share: 2.0
  - name: globex
    key_sha256: [{"b" * 64}]""",
    "public_prompts": """
  - name: clerk
    version: "3"
    text: You are a helpful clerk.""",
    "operator_key_sha256": f"[{'c' * 64}]  # from `warmpath keys`",
}
"""Values for defaults that tell little of their form."""

LEFT_OUT = frozenset({"model"})
"""Settings that mean more where they are given: a given model must be had, the default may be replaced."""

_YAML_HEAD = """\
# All settings of warmpath with their defaults; made by `warmpath settings --yaml`. Keep the lines you change.
# warmpath serve --config settings.yaml     warmpath check settings.yaml
# Relative paths start where this file lies. Sizes: 64MiB, or bytes. Durations: 5m, 1h30m, or seconds.
"""


def settings_yaml() -> str:
    """Return a settings file of all defaults, with comments; ``EXAMPLES`` are comments too."""
    defaults = AppConfig().to_json()
    lines = [_YAML_HEAD.rstrip()]
    for title, rows in _tables():
        if title in ENTRIES:
            continue
        lines += ["", f"# ---- {title}"]
        for name, kind, default, meaning in rows:
            lines += [f"# {line}" for line in wrap(f"{meaning} ({kind})".replace("`", ""), 110)]
            written = json.dumps(defaults[name]) if default == "none" else default.replace("`", "")
            lines.append(f"{'# ' * (name in LEFT_OUT)}{name}: {written}")
            if name in EXAMPLES:
                lines += [f"#   {line}".rstrip() for line in f"{name}: {EXAMPLES[name]}".splitlines()]
    return "\n".join(lines) + "\n"


def settings_text(words: Sequence[str] = ()) -> str:
    """Return the settings with all ``words`` in name or meaning, for a terminal."""
    parts = []
    for title, rows in _tables():
        entry = title if title in ENTRIES else ""
        lines = [
            f"  {name}: {kind}; {'' if default == 'required' else 'default '}{default}\n      {meaning}"
            for name, kind, default, meaning in rows
            if all(word.lower() in f"{entry} {name} {meaning}".lower() for word in words)
        ]
        parts += ["\n".join([title, *lines]) + "\n"] if lines else []
    return "\n".join(parts).replace("`", "") or "no setting has all of these words in its name or meaning\n"


def _tables() -> Iterator[tuple[str, list[_Row]]]:
    """Yield every section and kind of entry, with its settings."""
    models: dict[str, type[BaseModel]] = {"Deployment and requests": AppConfig, **SECTIONS, **ENTRIES}
    in_sections = {name for section in SECTIONS.values() for name in section.model_fields}
    for title, model in models.items():
        properties = model.model_json_schema()["properties"]
        names = [name for name in model.model_fields if model is not AppConfig or name not in in_sections]
        yield title, [_row(name, properties[name], model.model_fields[name].is_required()) for name in names]


def _row(name: str, schema: dict[str, Any], required: bool) -> _Row:
    default = schema.get("default")
    if required:
        shown = "required"
    elif default is None or default in ({}, []):
        shown = "none"
    else:
        shown = f"`{default}`" if isinstance(default, str) else shown_value(default, name)
    return _Row(name, _type(schema, name), shown, schema["description"])


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
    word = "bytes" if name.endswith("_bytes") else "seconds" if is_duration(name) else word
    bounds = _bounds(kind, name)
    return f"{word}, {bounds}" if bounds else word


def _bounds(kind: dict[str, Any], name: str) -> str:
    shown = {bound: shown_value(value, name) for bound, value in kind.items() if "inimum" in bound or "aximum" in bound}
    least, most, above = (shown.get(bound) for bound in ("minimum", "maximum", "exclusiveMinimum"))
    if above is not None:
        return f"above {above}, at most {most}" if most is not None else f"above {above}"
    if least is not None:
        return f"{least} to {most}" if most is not None else f"at least {least}"
    return ""


if __name__ == "__main__":
    sys.stdout.write(settings_page())
