"""Keys on the command line: the printed settings let the tenant in."""

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from serve_app.cli.main import app
from serve_app.config.app import AppConfig
from serve_app.errors import AuthenticationFailed
from serve_app.tenants import Tenants


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["keys", *arguments])


def opened_by(key: str, settings: str, now_s: float) -> str:
    """Return the tenant that a key belongs to, by settings as YAML."""
    config = AppConfig.model_validate(yaml.safe_load(settings))
    return Tenants(config.tenants, b"s" * 32, now_s=lambda: now_s).authenticate(f"Bearer {key}").name


def test_keys_alone_makes_an_operators_key_and_says_so() -> None:
    printed = run().output
    lines = dict(line.split(": ") for line in printed.splitlines()[:2])
    assert opened_by(lines["key"], f"tenants: [{{name: acme, key_sha256: [{lines['sha256']}]}}]", 0.0) == "acme"
    assert lines["key"].startswith("wp-")
    assert f'operator_key_sha256: ["{lines["sha256"]}"]' in printed
    assert "warmpath keys new NAME" in printed


@pytest.mark.parametrize("there", [False, True])
def test_the_printed_lines_are_settings_and_do_not_hold_the_key(there: bool) -> None:
    """They accept the key until it expires, as a new tenant or as one more key; they do not reveal the key."""
    first, *lines = run("new", "acme", "--expires", "2099-01-31T01:00:00+01:00").output.splitlines()
    key, settings = first.removeprefix("key: "), "\n".join(lines)
    assert key not in settings
    if there:
        settings = f'tenants:\n  - name: acme\n    key_sha256:\n      - "{"a" * 64}"\n{lines[-1]}'
    end_s = 4073500800.0
    assert opened_by(key, settings, end_s - 1) == "acme"
    with pytest.raises(AuthenticationFailed, match="expired"):
        opened_by(key, settings, end_s)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("new", "a b"), "name"),
        (("new", "acme", "--expires", "soon"), "duration"),
        (("new", "acme", "--expires", "2001-01-01T00:00:00Z"), "future"),
        (("new", "acme", "--expires", "inf"), "duration"),
    ],
)
def test_mistakes_make_no_key(arguments: tuple[str, ...], sentence: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert "wp-" not in result.output
