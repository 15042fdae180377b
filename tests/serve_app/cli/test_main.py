"""The words of `warmpath`; errors that say what to change."""

from __future__ import annotations

import json
from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from serve_app.cli import main
from serve_app.cli.main import app
from serve_app.cli.supervisor import Launch, Supervisor
from serve_app.config.app import AppConfig


def test_settings_survive_json() -> None:
    """What travels to a replica is what was configured."""
    settings = AppConfig(model="demo", replicas=7, policy="lmetric")
    assert AppConfig.model_validate(json.loads(json.dumps(settings.to_json()))) == settings


def test_serve_refuses_what_it_cannot_start() -> None:
    """Wrong flags end with status 2 and a sentence, before anything is started."""
    runner = CliRunner()
    for arguments in (
        ["--port", "99999"],
        ["--set", "nonsense"],
        ["--config", "no-such-file.yaml"],
        ["--set", "prompts_dir=/nowhere/at/all"],
    ):
        result = runner.invoke(app, ["serve", *arguments])
        assert result.exit_code == 2, result.output
        assert result.output.startswith("error: "), result.output


def test_the_version_and_the_settings_are_told() -> None:
    """And nothing is started."""
    runner = CliRunner()
    assert runner.invoke(app, ["--version"]).output == f"warmpath {version('warmpath-serve')}\n"
    assert "max_pulls: integer, 1 to 64; default 4" in runner.invoke(app, ["settings", "pull"]).output
    assert "replicas: 2" in runner.invoke(app, ["settings", "--yaml"]).output


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        ([], []),
        (["--host", "0.0.0.0"], None),
        (["--set", "allowed_hosts=[chat.example]"], ["chat.example"]),
        (["--set", f"tenants=[{{name: a, key_sha256: [{'a' * 64}]}}]"], None),
    ],
    ids=["alone", "network", "configured", "tenants"],
)
def test_pages_of_any_name_may_post_only_where_that_may_be_meant(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], allowed: list[str] | None
) -> None:
    """On loopback without tenants no name leads here but by DNS rebinding, unless it is configured."""
    launched: list[Launch] = []
    monkeypatch.setattr(main, "check_address", lambda *_: None)
    monkeypatch.setattr(Supervisor, "run", lambda _, launch: launched.append(launch) or 0)
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 0, result.output
    assert launched[0].settings.get("allowed_hosts") == allowed
