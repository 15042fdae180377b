"""`warmpath tenants`: an instance's tenants, changed while it runs."""

from typing import Annotated, Any

import typer

from serve_app.cli.admin_client import LOCAL, Url, ask, part
from serve_app.cli.console import Commands, fail

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    help="An instance's tenants: list, add, set, reset, remove; who changed them.",
)

Name = Annotated[str, typer.Argument(help="the tenant's name")]
Fields = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FIELD=VALUE...",
        help="fields of a tenant in the settings, with values as YAML: tokens_per_minute=60000 "
        "budget='{tokens: 5000000, period: day}'; null: no such limit",
    ),
]
_PATH = "/v1/admin/tenants"
_SHOWN = ("object", "name", "id", "source", "overrides", "created_at", "keys")
_USUAL = {"disabled": False, "store_kv": True, "cache_share": 1.0}
"""Values that need no words."""


@app.command("list")
def list_tenants(url: Url = LOCAL) -> None:
    """Show each tenant, where it comes from, its keys and what differs from the defaults."""
    for tenant in ask(url, "GET", _PATH)["data"]:
        _show(tenant)


@app.command()
def add(name: Name, fields: Fields = None, url: Url = LOCAL) -> None:
    """Add a tenant; `warmpath keys new NAME --url URL` makes its first key."""
    _show(ask(url, "POST", _PATH, body={"name": name, **_values(fields)}))


@app.command("set")
def set_fields(name: Name, fields: Fields = None, url: Url = LOCAL) -> None:
    """Set fields of a tenant, also of one in the settings. `disabled=true` refuses all its keys."""
    _show(ask(url, "POST", f"{_PATH}/{part(name)}", body=_values(fields)))


@app.command()
def reset(name: Name, url: Url = LOCAL) -> None:
    """Go back to the fields of a tenant in the settings; its keys stay as they are."""
    _show(ask(url, "POST", f"{_PATH}/{part(name)}/reset"))


@app.command()
def remove(name: Name, url: Url = LOCAL) -> None:
    """Remove a tenant that was added so, and its keys."""
    ask(url, "DELETE", f"{_PATH}/{part(name)}")
    print(f"{name}: removed, with its keys")


@app.command()
def changes(limit: Annotated[int, typer.Option(help="how many", min=1, max=1000)] = 20, url: Url = LOCAL) -> None:
    """Show who changed tenants and keys, the newest first."""
    for one in ask(url, "GET", "/v1/admin/changes", query={"limit": str(limit)})["data"]:
        told = ", ".join(f"{name}: {_as_yaml(old)} -> {_as_yaml(new)}" for name, (old, new) in one["changes"].items())
        print(f"{one['at']}  {one['operator']}  {one['action']}  {one['tenant']} {one['key']}".rstrip(), told, sep="  ")


def _values(fields: list[str] | None) -> dict[str, Any]:
    from serve_app.config.files import NotYaml, read_yaml

    found: dict[str, Any] = {}
    for field in fields or ():
        name, equals, value = field.partition("=")
        if not equals:
            fail(f"{field} has no value; write FIELD=VALUE, such as tokens_per_minute=60000")
        try:
            found[name.replace("-", "_")] = read_yaml(value)
        except NotYaml:
            fail(f"the value of {name} is no YAML; put it in quotes")
    return found


def _show(tenant: dict[str, Any]) -> None:
    told = [f"{name}={_as_yaml(value)}" for name, value in tenant.items() if name not in _SHOWN and _tells(name, value)]
    changed = f"  (changed: {', '.join(tenant['overrides'])})" if tenant["overrides"] else ""
    keys = f"{len(tenant['keys'])} key{'s' if len(tenant['keys']) != 1 else ''}"
    name = tenant["name"] if tenant["id"] == tenant["name"] else f"{tenant['name']} ({tenant['id']})"
    print(f"{name}  {tenant['source']}  {keys}  {'  '.join(told)}".rstrip() + changed)


def _as_yaml(value: Any) -> str:
    """Return a value as it may be given to ``set``, without what a map leaves open."""
    import yaml

    if isinstance(value, dict):
        value = {name: inner for name, inner in value.items() if inner is not None}
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000).removesuffix("...\n").strip()


def _tells(name: str, value: Any) -> bool:
    return value is not None and value != _USUAL.get(name)
