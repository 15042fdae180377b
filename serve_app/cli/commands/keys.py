"""`warmpath keys`: make API keys for settings, or in an instance that runs. A key is printed once, stored nowhere."""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from serve_app.cli.admin_client import LOCAL, URL_HELP, Url, ask, part
from serve_app.cli.console import Commands, fail

app = typer.Typer(cls=Commands, add_completion=False)

Expires = Annotated[str | None, typer.Option(help="the key's lifetime (90d, 12h) or its end (2027-01-31T00:00:00Z)")]
Key = Annotated[str, typer.Argument(help="the key's id, as `keys list` shows it, not the key")]
_PATH = "/v1/admin/keys"


@app.callback(invoke_without_command=True)
def make(context: typer.Context) -> None:
    """Make an operator's key; `keys new NAME` makes a tenant's. The other commands ask an instance that runs."""
    if context.invoked_subcommand is None:
        from serve_app.tenants import make_api_key

        key, digest = make_api_key()
        print(f"key: {key}\nsha256: {digest}")
        print(f'\n# an operator\'s; in the settings:\noperator_key_sha256: ["{digest}"]')
        print("# a tenant's: warmpath keys new NAME")


@app.command()
def new(
    tenant: Annotated[str, typer.Argument(help="the tenant's name")],
    expires: Expires = None,
    label: Annotated[str | None, typer.Option(help="with --url: a word for its readers")] = None,
    url: Annotated[
        str | None, typer.Option(help=f"put the key in force at {URL_HELP}; default: print lines for the settings")
    ] = None,
) -> None:
    """Make a tenant's key, and print the settings for it; with --url, no settings and no deploy are needed.

    The key is shown only once, and no file is changed.
    """
    from pydantic import ValidationError

    from serve_app.config.tenants import TenantConfig

    try:
        TenantConfig.model_validate({"name": tenant, "key_sha256": ["0" * 64]})
    except ValidationError:
        fail("a tenant's name has 1 to 64 letters, digits and _ . - and begins with a letter or digit")
    moment = _moment(expires) if expires is not None else None
    if url is not None:
        _show_made(ask(url, "POST", _PATH, body=_given(tenant=tenant, label=label, expires_at=moment)))
        return
    if label is not None:
        fail("--label needs --url: the settings have no labels of keys")
    from serve_app.tenants import make_api_key

    key, digest = make_api_key()
    entry = f'{{sha256: "{digest}", expires: "{moment}"}}' if moment else f'"{digest}"'
    print(f"key: {key}\n\n# in the settings; for an existing tenant only the last line, below its other keys:")
    print(f"tenants:\n  - name: {tenant}\n    key_sha256:\n      - {entry}")


@app.command("list")
def list_keys(
    tenant: Annotated[str | None, typer.Argument(help="only this tenant's")] = None, url: Url = LOCAL
) -> None:
    """Show an instance's keys: id, tenant, state and end, never the key."""
    for key in ask(url, "GET", _PATH, query={"tenant": tenant})["data"]:
        _show(key)


@app.command()
def rotate(
    key: Key,
    overlap: Annotated[str, typer.Option(help="how long the old key still works; 0 if it has leaked")] = "24h",
    expires: Expires = None,
    url: Url = LOCAL,
) -> None:
    """Make a key in place of another one, and print it once."""
    from pydantic import TypeAdapter

    from serve_app.config.quantities import Seconds

    moment = _moment(expires) if expires is not None else None
    try:
        overlap_s = TypeAdapter[float](Seconds).validate_python(overlap)
    except ValueError:
        fail("--overlap takes a duration such as 24h, or 0")
    made = ask(url, "POST", f"{_PATH}/{part(key)}/rotate", body=_given(overlap_s=overlap_s, expires_at=moment))
    _show_made(made)
    _show(made["replaced"])


@app.command()
def expire(
    key: Key,
    at: Annotated[str, typer.Argument(help="how much longer it works (7d), or its end (2027-01-31T00:00:00Z)")],
    url: Url = LOCAL,
) -> None:
    """Give a key an end."""
    _show(ask(url, "POST", f"{_PATH}/{part(key)}", body={"expires_at": _moment(at, "AT")}))


@app.command()
def disable(key: Key, url: Url = LOCAL) -> None:
    """Refuse a key from now on, one in the settings too."""
    _show(ask(url, "POST", f"{_PATH}/{part(key)}", body={"disabled": True}))


@app.command()
def enable(key: Key, url: Url = LOCAL) -> None:
    """Accept a disabled key again, unless the settings revoke it."""
    _show(ask(url, "POST", f"{_PATH}/{part(key)}", body={"disabled": False}))


@app.command()
def delete(key: Key, url: Url = LOCAL) -> None:
    """Delete a key that an instance made."""
    ask(url, "DELETE", f"{_PATH}/{part(key)}")
    print(f"{key}: deleted")


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _show_made(made: dict[str, Any]) -> None:
    print(f"key: {made['key']}")
    _show(made)


def _show(key: dict[str, Any]) -> None:
    told = [f"until {key['expires_at']}"] if key["expires_at"] else []
    told += [f"({key['label']})"] if key["label"] else []
    print("  ".join([key["id"], key["tenant"], key["source"], key["state"], *told]))


def _moment(text: str, flag: str = "--expires") -> str:
    """Return a time, or the end of a duration from now, in RFC 3339 with UTC and whole seconds."""
    from pydantic import AwareDatetime, TypeAdapter, ValidationError

    from serve_app.config.quantities import Seconds

    try:
        moment = datetime.now(UTC) + timedelta(seconds=TypeAdapter[float](Seconds).validate_python(text))
    except (ValueError, OverflowError):
        try:
            moment = TypeAdapter[datetime](AwareDatetime).validate_python(text)
        except ValidationError:
            fail(f"{flag} takes a duration such as 90d, or a moment with its time zone: 2027-01-31T00:00:00Z")
    if moment <= datetime.now(UTC):
        fail(f"{flag} must lie in the future")
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
