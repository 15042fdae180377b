"""`warmpath keys`: new API keys, and which keys a settings file has.

A key is printed once and kept nowhere; files hold its SHA-256, and lists show the first characters of that alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import AwareDatetime, TypeAdapter, ValidationError

from serve_app.cli.console import fail
from serve_app.config.quantities import Seconds
from serve_app.config.tenants import TenantConfig
from serve_app.tenants.tenants import make_api_key

KEY_ID_CHARS = 12
"""Of a digest, to tell keys apart."""

app = typer.Typer(add_completion=False)


@app.callback(invoke_without_command=True)
def make(context: typer.Context) -> None:
    """Make an operator's key; `keys new NAME` makes a tenant's."""
    if context.invoked_subcommand is None:
        key, digest = make_api_key()
        print(f"key     {key}\nsha256  {digest}")
        print(f'\n# an operator\'s; in the settings:\noperator_key_sha256: ["{digest}"]')
        print("# a tenant's: warmpath keys new NAME")


@app.command()
def new(
    tenant: Annotated[str, typer.Argument(help="the tenant's name")],
    expires: Annotated[
        str | None, typer.Option(help="how long it is good for (90d, 12h), or until when (2027-01-31T00:00:00Z)")
    ] = None,
    settings: Annotated[
        Path | None, typer.Option(help="a settings or Serve config file that may have the tenant already")
    ] = None,
) -> None:
    """Make a key for a tenant, and print the lines that let it in. The key is shown this once; no file is changed."""
    try:
        TenantConfig.model_validate({"name": tenant, "key_sha256": ["0" * 64]})
    except ValidationError:
        fail("a tenant's name has 1 to 64 letters, digits and _ . - and begins with a letter or digit")
    moment = _moment(expires) if expires is not None else None
    known = settings is not None and any(tenant == each.name for each in tenants_in(settings))
    key, digest = make_api_key()
    entry = f'{{sha256: "{digest}", expires: "{moment}"}}' if moment else f'"{digest}"'
    print(f"key: {key}")
    if known:
        print(f"\n# in {settings}, one more under key_sha256 of {tenant}:\n      - {entry}")
    else:
        print(f"\n# in {settings or 'the settings'}, under tenants:\ntenants:")
        print(f"  - name: {tenant}\n    key_sha256:\n      - {entry}")


@app.command("list")
def list_keys(file: Annotated[Path, typer.Argument(help="settings file, Serve config, or KubeRay RayService")]) -> None:
    """Show tenants, the ids of their keys and how long these are good for; no secret is in the file or shown."""
    found = tenants_in(file)
    if not found:
        print(f"{file}: no tenants: whoever reaches the port is the tenant `default`")
    now = datetime.now(UTC)
    for tenant in found:
        for key in tenant.key_sha256:
            until = "never expires"
            if key.revoked:
                until = "revoked"
            elif key.expires is not None:
                until = f"{'expired' if key.expires <= now else 'expires'} {key.expires.isoformat()}"
            print(f"{tenant.name}  {key.sha256[:KEY_ID_CHARS]}  {until}")


def tenants_in(file: Path) -> list[TenantConfig]:
    """Return the tenants of a file, wherever in it they stand; those of ``args:`` and ``user_config:`` once if equal.

    Leaves with status 2 where the file cannot be read, or a tenant in it is none.
    """
    try:
        found = list(_tenant_entries(yaml.safe_load(file.read_text())))
    except (OSError, ValueError, yaml.YAMLError) as error:
        fail(f"cannot read {file}: {error}")
    try:
        return list({repr(tenant): tenant for tenant in map(TenantConfig.model_validate, found)}.values())
    except ValidationError:
        fail(f"{file} has a tenant that cannot be used; run: warmpath check {file}")


def _tenant_entries(values: Any) -> Iterator[Any]:
    if isinstance(values, Mapping):
        for name, value in values.items():
            if name == "tenants" and isinstance(value, list):
                yield from value
            elif name == "serveConfigV2" and isinstance(value, str):
                yield from _tenant_entries(yaml.safe_load(value))
            else:
                yield from _tenant_entries(value)
    elif isinstance(values, list):
        for value in values:
            yield from _tenant_entries(value)


def _moment(text: str) -> str:
    """Return a moment, or the end of a duration from now, as RFC 3339 in UTC and whole seconds."""
    try:
        moment = datetime.now(UTC) + timedelta(seconds=TypeAdapter[float](Seconds).validate_python(text))
    except (ValueError, OverflowError):
        try:
            moment = TypeAdapter[datetime](AwareDatetime).validate_python(text)
        except ValidationError:
            fail("--expires takes a duration such as 90d, or a moment with its time zone: 2027-01-31T00:00:00Z")
    if moment <= datetime.now(UTC):
        fail("--expires must lie in the future")
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
