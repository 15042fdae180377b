"""Settings from files, flags and NAME=VALUE; errors that say what to change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serve_app.cli import main
from serve_app.cli.main import app, load_settings
from serve_app.cli.supervisor import Launch, Supervisor
from serve_app.config.app import AppConfig


def test_later_sources_win(tmp_path: Path) -> None:
    """File, then assignments, then flags."""
    file = tmp_path / "settings.yaml"
    file.write_text("model: small\nreplicas: 3\npolicy: round_robin\n")
    settings = load_settings(file, ["replicas=4", "kv_cache_bytes=2097152"], model=None, replicas=5)
    assert (settings.model, settings.replicas, settings.policy) == ("small", 5, "round_robin")
    assert settings.kv_cache_bytes == 2097152


@pytest.mark.parametrize(
    ("assignment", "word"),
    [
        ("replicas", "NAME=VALUE"),
        ("replicas=0", "replicas"),
        ("repplicas=2", "repplicas"),
        ("policy=best", "policy"),
        ("tenants=[{name: a}]", "key_sha256"),
    ],
)
def test_bad_settings_name_the_setting(assignment: str, word: str) -> None:
    """A typo is an error with the setting's name, never a default."""
    with pytest.raises(ValueError, match=word):
        load_settings(None, [assignment])


def test_settings_survive_json() -> None:
    """What travels to a replica is what was configured."""
    settings = AppConfig(model="demo", replicas=7, policy="lmetric")
    assert AppConfig.model_validate(json.loads(json.dumps(settings.to_json()))) == settings


def test_serve_refuses_what_it_cannot_start() -> None:
    """Wrong flags end with status 2 and a sentence, before anything is started."""
    runner = CliRunner()
    for arguments in (["--port", "99999"], ["--set", "nonsense"], ["--config", "no-such-file.yaml"]):
        result = runner.invoke(app, ["serve", *arguments])
        assert result.exit_code == 2, result.output
        assert result.output.startswith("error: "), result.output


def test_keys_prints_a_pair_that_fits() -> None:
    """The printed digest is that of the printed key, and a settings file takes it."""
    lines = dict(line.split() for line in CliRunner().invoke(app, ["keys"]).output.splitlines())
    settings = AppConfig.model_validate({"tenants": [{"name": "acme", "key_sha256": [lines["sha256"]]}]})
    assert settings.tenants[0].name == "acme"
    assert lines["key"].startswith("wp-")


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
