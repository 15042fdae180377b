"""`warmpath keys`: new API keys. A key is printed once and kept nowhere; files hold its SHA-256."""

from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer
from pydantic import AwareDatetime, TypeAdapter, ValidationError

from serve_app.cli.console import fail
from serve_app.config.quantities import Seconds
from serve_app.config.tenants import TenantConfig
from serve_app.tenants.tenants import make_api_key

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
) -> None:
    """Make a key for a tenant, and print the lines that let it in. The key is shown this once; no file is changed."""
    try:
        TenantConfig.model_validate({"name": tenant, "key_sha256": ["0" * 64]})
    except ValidationError:
        fail("a tenant's name has 1 to 64 letters, digits and _ . - and begins with a letter or digit")
    moment = _moment(expires) if expires is not None else None
    key, digest = make_api_key()
    entry = f'{{sha256: "{digest}", expires: "{moment}"}}' if moment else f'"{digest}"'
    print(f"key: {key}\n\n# in the settings; of a tenant that is there, the last line alone, below its other keys:")
    print(f"tenants:\n  - name: {tenant}\n    key_sha256:\n      - {entry}")


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
