"""`warmpath keys`: make API keys. A key is printed once and stored nowhere; files hold its SHA-256."""

from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer
from pydantic import AwareDatetime, TypeAdapter, ValidationError

from serve_app.cli.console import Commands, fail
from serve_app.config.quantities import Seconds
from serve_app.config.tenants import TenantConfig
from serve_app.tenants import make_api_key

app = typer.Typer(cls=Commands, add_completion=False)


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
        str | None, typer.Option(help="the key's lifetime (90d, 12h) or its end (2027-01-31T00:00:00Z)")
    ] = None,
) -> None:
    """Make a tenant's key, and print the settings for it. The key is shown only once, and no file is changed."""
    try:
        TenantConfig.model_validate({"name": tenant, "key_sha256": ["0" * 64]})
    except ValidationError:
        fail("a tenant's name has 1 to 64 letters, digits and _ . - and begins with a letter or digit")
    moment = _moment(expires) if expires is not None else None
    key, digest = make_api_key()
    entry = f'{{sha256: "{digest}", expires: "{moment}"}}' if moment else f'"{digest}"'
    print(f"key: {key}\n\n# in the settings; for an existing tenant only the last line, below its other keys:")
    print(f"tenants:\n  - name: {tenant}\n    key_sha256:\n      - {entry}")


def _moment(text: str) -> str:
    """Return a time, or the end of a duration from now, in RFC 3339 with UTC and whole seconds."""
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
