"""`warmpath tenants` and `warmpath keys` against a running ingress: each command changes what its words say."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest
from starlette.types import ASGIApp
from typer.testing import CliRunner

from serve_app.cli.admin_client import WORDS
from serve_app.cli.main import app
from tests.pages import ROOT
from tests.serve_app.ingress.scripted import Loopback, ReadCheckpoint
from tests.serve_app.ingress.several import Several
from tests.serve_app.ingress.test_models import OPERATOR, checkpoint, config_of, digest, key_of, tenants

__all__ = ["checkpoint"]

INGRESS = ROOT / "serve_app" / "ingress"
SPEAKING = [
    INGRESS / "prompts.py", INGRESS / "tenant_admin.py", INGRESS / "address.py",
    *(ROOT / "serve_app" / "tenancy").glob("*.py"),
]  # fmt: skip
"""The modules whose refusals these commands show."""


@dataclass
class AdminCommands:
    """Runs commands about one server, which they read from the environment, with the key of an operator."""

    url: str

    def __call__(self, words: str, *more: str, status: int = 0, key: str = OPERATOR) -> str:
        runner = CliRunner(env={"WARMPATH_URL": self.url, "WARMPATH_OPERATOR_KEY": key})
        result = runner.invoke(app, [*words.split(), *more], terminal_width=200)
        assert result.exit_code == status, result.output
        return result.output

    def let_in(self, key: str) -> bool:
        return httpx.get(f"{self.url}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200


@pytest.fixture
def run(checkpoint: ReadCheckpoint) -> Iterator[AdminCommands]:
    declared = tenants(acme=None)
    config = config_of("m0", tenants=declared, operator_key_sha256=[digest(OPERATOR)])

    async def application() -> ASGIApp:
        return (await Several.open(checkpoint, config)).application

    with Loopback(application) as running:
        yield AdminCommands(running.url)


def test_a_tenant_and_its_keys_from_the_command_line(run: AdminCommands) -> None:
    run("tenants add zeta tokens_per_minute=60000", "budget={tokens: 5000000, period: day}")
    listed = run("tenants list").splitlines()
    assert listed[0] == "acme  settings  1 key"
    words = "zeta  database  0 keys  tokens_per_minute=60000  budget={tokens: 5000000, period: day, hard: true}"
    assert listed[1] == words
    made = run("keys new zeta --expires 90d --label build --url", run.url)
    key, name = re.findall(r"key: (wp-\S+)\n(key_\w+)  zeta  database  active  until \S+Z  \(build\)", made)[0]
    assert run.let_in(key)
    turned = run(f"keys rotate {name} --overlap 0")
    newer, other = re.findall(r"key: (wp-\S+)\n(key_\w+) ", turned)[0]
    assert run.let_in(newer) and not run.let_in(key) and f"{name}  zeta  database  expired" in turned
    run(f"keys disable {other}")
    assert not run.let_in(newer)
    run(f"keys enable {other}")
    assert run.let_in(newer)
    assert "until 2100-01-01T00:00:00Z" in run(f"keys expire {other} 2100-01-01T00:00:00Z")
    assert run("keys list zeta").count("\n") == 2 and newer not in run("keys list")
    run(f"keys delete {name}")
    assert name not in run("keys list")
    assert "(changed: models)" in run("tenants set acme models=[m1]")
    assert "changed" not in run("tenants reset acme")
    run("tenants set zeta disabled=true")
    assert not run.let_in(newer)
    run("tenants remove zeta")
    assert run("tenants list") == "acme  settings  1 key\n" and run.let_in(key_of("acme"))
    told = run("tenants changes --limit 3").splitlines()
    assert [line.split()[2] for line in told] == ["tenant.removed", "tenant.changed", "tenant.reset"]
    assert all(f"operator_{digest(OPERATOR)[:16]}" in line for line in told)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("tenants add zeta tokens_per_minute", "has no value; write FIELD=VALUE"),
        ("tenants add zeta tokens_per_minute=-1", "must be at least 1"),
        ("tenants add acme", "There is a tenant 'acme' already"),
        ("tenants remove acme", "is in the settings"),
        ("tenants set none disabled=true", "There is no tenant 'none'"),
        ("tenants set acme budget={token:5}", "budget.token:5: there is no such setting; did you mean tokens?\n"),
        ("keys disable key_1", "There is no key 'key_1'; `warmpath keys list` lists them."),
        ("tenants set none disabled=true", "`warmpath tenants list` lists them."),
        ("tenants add zeta key_sha256=x", "`warmpath keys new` makes a key."),
        ("keys expire key_1 soon", "AT takes a duration"),
        ("keys rotate key_1 --overlap long", "--overlap takes a duration"),
        ("keys expire key_1 2001-01-01T00:00:00Z", "future"),
    ],
)
def test_mistakes_say_what_to_do(run: AdminCommands, words: str, sentence: str) -> None:
    assert sentence in run(words, status=2)


def test_refusals_speak_of_commands_and_not_of_routes() -> None:
    """Each route that a message names is translated, and nothing else is."""
    text = "".join(path.read_text() for path in SPEAKING)
    named = set(re.findall(r"(?:\b(?:GET|POST|DELETE) /v1/[\w/]+ \w+|in the URL: \?\w+=\w+|send \w+: true)", text))
    assert named == set(WORDS)


def test_a_url_without_its_scheme_or_with_the_clients_path_is_understood(run: AdminCommands) -> None:
    address = run.url.removeprefix("http://")
    assert run(f"tenants list --url {address}") == run(f"tenants list --url {run.url}/v1/") == run("tenants list")


def test_a_tenants_key_changes_nothing(run: AdminCommands) -> None:
    assert "operator key" in run("tenants list", status=2, key=key_of("acme"))
    assert "--label needs --url" in run("keys new acme --label x", status=2, key=key_of("acme"))
