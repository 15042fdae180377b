"""Keys on the command line: what is printed lets the tenant in, and lists show nothing that does."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from serve_app.cli.main import app
from serve_app.config.app import AppConfig
from serve_app.errors import AuthenticationFailed
from serve_app.tenants.tenants import Tenants, make_api_key


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["keys", *arguments])


def opened_by(key: str, settings: str, now_s: float) -> str:
    """Return who comes in with a key, by settings as YAML."""
    config = AppConfig.model_validate(yaml.safe_load(settings))
    return Tenants(config.tenants, b"s" * 32, now_s=lambda: now_s).authenticate(f"Bearer {key}").name


def test_keys_prints_a_pair_that_fits() -> None:
    """The printed digest is that of the printed key, and a settings file takes it."""
    lines = dict(line.split() for line in run().output.splitlines()[:2])
    assert opened_by(lines["key"], f"tenants: [{{name: acme, key_sha256: [{lines['sha256']}]}}]", 0.0) == "acme"
    assert lines["key"].startswith("wp-")


def test_the_printed_lines_are_settings_and_do_not_hold_the_key() -> None:
    """They let the key in until it expires, and whoever reads them cannot come in."""
    first, *lines = run("new", "acme", "--expires", "2099-01-31T01:00:00+01:00").output.splitlines()
    key, settings = first.removeprefix("key: "), "\n".join(lines)
    assert key not in settings
    end_s = 4073500800.0
    assert opened_by(key, settings, end_s - 1) == "acme"
    with pytest.raises(AuthenticationFailed, match="expired"):
        opened_by(key, settings, end_s)


def test_a_tenant_that_is_there_gets_one_more_key(tmp_path: Path) -> None:
    """The line goes below its others; the file stays as it is."""
    file = tmp_path / "settings.yaml"
    text = f'tenants:\n  - name: acme\n    key_sha256:\n      - "{"a" * 64}"\n'
    file.write_text(text)
    first, *lines = run("new", "acme", "--expires", "90d", "--settings", str(file)).output.splitlines()
    assert opened_by(first.removeprefix("key: "), text + lines[-1], 0.0) == "acme"
    assert file.read_text() == text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("new", "a b"), "name"),
        (("new", "acme", "--expires", "soon"), "duration"),
        (("new", "acme", "--expires", "2001-01-01T00:00:00Z"), "future"),
        (("new", "acme", "--expires", "inf"), "duration"),
        (("list", "/nowhere"), "cannot read"),
    ],
)
def test_mistakes_make_no_key(arguments: tuple[str, ...], sentence: str) -> None:
    """A sentence says what to change."""
    result = run(*arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert "wp-" not in result.output


def test_a_list_shows_ids_and_ends_in_any_kind_of_file(tmp_path: Path) -> None:
    """Of a Serve config and a RayService too; equal tenants of several deployments are shown once."""
    (_, good), (_, old), (_, gone) = make_api_key(), make_api_key(), make_api_key()
    keys = [good, {"sha256": old, "expires": "2001-01-01T00:00:00Z"}, {"sha256": gone, "revoked": True}]
    live = {"tenants": [{"name": "acme", "key_sha256": keys}]}
    deployments = [{"name": name, "user_config": live} for name in ("Ingress", "Replica")]
    serve = {"applications": [{"args": {"replicas": 2}, "deployments": deployments}]}
    service = {"kind": "RayService", "spec": {"serveConfigV2": yaml.safe_dump(serve)}}
    file = tmp_path / "config.yaml"
    for values in (live, serve, service):
        file.write_text(yaml.safe_dump(values))
        output = run("list", str(file)).output
        assert [line.split()[:3] for line in output.splitlines()] == [
            ["acme", good[:12], "never"],
            ["acme", old[:12], "expired"],
            ["acme", gone[:12], "revoked"],
        ]
        assert not any(digest in output for digest in (good, old, gone))


def test_keys_alone_says_whose_key_it_makes() -> None:
    """An operator's, with the line for the settings; and how a tenant's is made."""
    printed = run().output
    digest = printed.split("sha256", 1)[1].split()[0]
    assert f'operator_key_sha256: ["{digest}"]' in printed
    assert "warmpath keys new NAME" in printed
