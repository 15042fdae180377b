"""The commands of `warmpath`, and errors that name a remedy."""

import json
import os
import re
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest
from typer.testing import CliRunner

from router import __version__
from serve_app.cli import main
from serve_app.cli.checks.run import findings
from serve_app.cli.instance import greeting, refusal_without_key
from serve_app.cli.local_ray import held_port
from serve_app.cli.main import app
from serve_app.cli.supervisor import Launch, Supervisor
from serve_app.config.app import AppConfig
from serve_app.config.files import load_settings
from serve_app.config.sentences import OPTIONS
from serve_app.config.tenants import TenantConfig
from serve_app.ingress.routes.application import make_application
from serve_app.tenants import make_api_key
from tests.harness.programs import programs_here
from tests.pages import ROOT
from tests.serve_app.ingress.routes.test_application import address_of
from tests.serve_app.ingress.scripted import Loopback


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """The starts that `warmpath serve` would make; the port is not checked."""
    launches: list[Launch] = []
    monkeypatch.setattr("serve_app.cli.checks.run.findings", lambda look, *_: findings(look, "settings"))
    monkeypatch.setattr(main, "with_model", lambda settings: settings)
    monkeypatch.setattr(Supervisor, "run", lambda _, launch: launches.append(launch) or 0)
    return launches


@pytest.mark.parametrize("flag", ["--port=99999", "--set=nonsense", "--config=no.yaml", "--set=prompts_dir=/nowhere"])
def test_serve_refuses_settings_it_cannot_use(flag: str) -> None:
    result = CliRunner().invoke(app, ["serve", flag])
    assert result.exit_code == 2, result.output
    assert result.output.startswith("error: "), result.output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("top", "the page at / shows it"),
        ("sevre", "did you mean serve?"),
        ("keys nwe", "did you mean new?"),
        ("prompts unheard-of", "there are "),
    ],
)
def test_a_command_that_is_not_there_leads_to_one_that_is(words: str, told: str) -> None:
    result = CliRunner().invoke(app, words.split(), terminal_width=200)
    assert result.exit_code == 2
    assert told in " ".join(result.output.replace("│", " ").split())


def test_the_version_and_the_settings_are_told() -> None:
    runner = CliRunner()
    assert runner.invoke(app, ["--version"]).output == f"warmpath {__version__}\n"
    assert "max_pulls: integer, 1 to 64; default 4" in runner.invoke(app, ["settings", "pull"]).output
    assert "replicas: 2" in runner.invoke(app, ["settings", "--yaml"]).output
    listed = runner.invoke(app, ["settings", "autoscaling"]).output
    assert "min_replicas: integer" in listed and "max_replicas: integer" in listed


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
    launched: list[Launch], arguments: list[str], allowed: list[str] | None
) -> None:
    """On loopback without tenants only DNS rebinding leads a name here, unless the name is configured."""
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 0, result.output
    assert launched[0].settings.get("allowed_hosts") == allowed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tensor-parallel-size", "2"], "computes on one device"),
        (["--data-parallel-size", "2"], "use --replicas"),
        (["--api-key", "k"], "warmpath keys new NAME"),
        (["--enable-lora"], "use --lora-adapters '{NAME: PATH}'"),
        (["--max-model-len"], "--max-model-len needs a value"),
        (["demo", "--dtype", "float8"], "dtype"),
        (["demo", "--model", "small"], "two models are named"),
        (["--host", "::1"], "add --no-haproxy"),
        (["--prot", "1"], "did you mean port?"),
        (["--kv-cache-dtype", "fp8"], "--engine-arg NAME=VALUE"),
    ],
)
def test_flags_of_other_servers_are_answered_with_our_way(arguments: list[str], words: str) -> None:
    answered = CliRunner().invoke(app, ["serve", *arguments], env={"TERMINAL_WIDTH": "300"})
    assert answered.exit_code == 2
    assert words in " ".join(answered.output.replace("\u2502", " ").split())


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("localhost", "http://localhost:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::1", "http://[::1]:80"),
        ("::", "http://[::1]:80"),
    ],
)
def test_an_address_is_a_url_that_clients_take(launched: list[Launch], host: str, url: str) -> None:
    """The start requests its /health, and it is printed."""
    assert CliRunner().invoke(app, ["serve", "demo", "--host", host, "--port", "80", "--no-haproxy"]).exit_code == 0
    assert launched[0].url == url
    assert launched[0].settings["model"] == "demo", "a model may be named without its flag"


@pytest.mark.parametrize(("flags", "seconds"), [([], 30), (["--keep-alive-timeout-s", "75"], 75)])
def test_idle_connections_stay_open_as_long_as_asked(launched: list[Launch], flags: list[str], seconds: int) -> None:
    """A proxy in front needs them to stay longer than its own do."""
    assert CliRunner().invoke(app, ["serve", "demo", *flags]).exit_code == 0
    assert launched[0].keep_alive_timeout_s == seconds
    assert CliRunner().invoke(app, ["serve", "demo", "--keep-alive-timeout-s", "0"]).exit_code == 2


def test_printed_requests_do_not_sample() -> None:
    text = greeting(AppConfig(model="demo", engine="simulated"), "http://127.0.0.1:8000")
    [body] = re.findall(r"-d '(.*)'", text)
    assert json.loads(body)["temperature"] == 0
    assert re.search(r"completions\.create\([^)]*temperature=0\b", text)


@pytest.mark.parametrize("place", ["nowhere", "settings", "database", "nowhere, but required"])
def test_the_greeting_says_who_is_answered(place: str) -> None:
    """As the server is asked, not as the settings are read: tenants may be in its database, or be required."""
    tenant = TenantConfig(name="acme", key_sha256=[make_api_key()[1]])
    config = AppConfig(model="demo", tenants=[tenant] if place == "settings" else [])
    address = address_of(config)
    refusal = "This server has no tenants yet." if "required" in place else ""
    tenants = [tenant] if place in ("settings", "database") else []
    address.tenants.configure(tenants, [], refusal=refusal)
    with Loopback(lambda: make_application(address)) as running:
        text = greeting(config, running.url, refusal_without_key(running.url))
    is_open = place == "nowhere"
    assert ("No API keys are configured" in text) == is_open
    assert ("-H 'Authorization: Bearer YOUR_KEY'" in text) == ('api_key="YOUR_KEY"' in text) == (not is_open)
    assert ("with an operator key" in text) == (not is_open)
    assert (refusal in text and "warmpath tenants add NAME" in text) == bool(refusal) or is_open


@pytest.mark.parametrize("tenants", [0, 1])
def test_the_greeting_of_a_server_that_does_not_tell_is_by_its_settings(tenants: int) -> None:
    config = AppConfig(tenants=[TenantConfig(name="acme", key_sha256=[make_api_key()[1]])] * tenants)
    with held_port() as port:
        text = greeting(config, "http://h", refusal_without_key(f"http://127.0.0.1:{port}"))
    assert ("YOUR_KEY" in text, "No API keys are configured" in text) == (bool(tenants), not tenants)


@pytest.mark.parametrize(("gpus", "block_size"), [(0, 32), (2, 16)])
def test_vllm_takes_the_gpus_of_the_machine(
    launched: list[Launch], monkeypatch: pytest.MonkeyPatch, gpus: int, block_size: int
) -> None:
    """The start reports this; its blocks are those of the device."""
    monkeypatch.setattr("serve_app.cli.checks.run.findings", lambda *_: ())
    monkeypatch.setattr("serve_app.cli.checks.machine.gpu_count", lambda: gpus)
    flags = ["--replicas=1", "--tensor-parallel-size=2", "--engine-arg=kv-cache-dtype=fp8"]
    told = CliRunner().invoke(app, ["serve", "demo", "--engine", "vllm", *flags])
    assert told.exit_code == 0, told.output
    assert ("2 GPUs are seen here: each replica takes 2" if gpus else "no GPU is seen here") in told.output
    settings = AppConfig.model_validate(launched[0].settings)
    assert (settings.replica_num_gpus, settings.ranks, settings.block_size) == (gpus, 2, block_size)
    assert settings.engine_args == {"kv_cache_dtype": "fp8"}


@pytest.mark.parametrize(
    "flags",
    [
        ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'],
        ["-sc", '{"method": "ngram", "num_speculative_tokens": 3}'],
        ["--spec-method", "ngram", "--spec-tokens=3"],
    ],
)
def test_drafts_are_vllms_flags(launched: list[Launch], monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> None:
    monkeypatch.setattr("serve_app.cli.checks.run.findings", lambda *_: ())
    with programs_here():
        told = CliRunner().invoke(app, ["serve", "demo", "--engine", "vllm", *flags])
    assert told.exit_code == 0, told.output
    drafting = AppConfig.model_validate(launched[0].settings).drafting
    assert drafting == {"method": "ngram", "num_speculative_tokens": 3}


def test_every_setting_is_a_flag_too(launched: list[Launch]) -> None:
    """As in `vllm serve`, the value follows, comes after `=`, or is left out for a switch."""
    flags = ["--kv-cache-bytes", "64MiB", "--max-model-len=512", "--strict", "--enable-prefix-caching", "false"]
    told = CliRunner().invoke(app, ["serve", "demo", *flags, "--explain-misses", "--replicas", "3"])
    assert told.exit_code == 0, told.output
    settings = AppConfig.model_validate(launched[0].settings)
    assert (settings.kv_cache_bytes, settings.max_model_len, settings.replicas) == (64 << 20, 512, 3)
    assert settings.strict and settings.explain_misses and not settings.enable_prefix_caching


HEAVY = "ray torch transformers vllm numpy httpx aiohttp starlette tokenizers".split()
RUNTIMES = {"ray", "torch", "transformers", "vllm"}


@pytest.mark.parametrize(
    ("command", "needs"),
    [
        ("--help", set()),
        ("plan --help", set()),
        ("keys --help", set()),
        ("bench --help", set()),
        ("keys new acme", set()),
        ("settings pin", set()),
        ("prompts verify --dir .", set()),
        ("tenants list --url http://127.0.0.1:9", {"httpx"}),
        ("check settings.yaml", set(HEAVY) - RUNTIMES),
        ("plan --model config.json --memory 1GB --prefixes 1 --prefix-tokens 1", set(HEAVY) - RUNTIMES),
    ],
)
def test_commands_import_what_they_need(command: str, needs: set[str], tmp_path: Path) -> None:
    """Each import costs every command its time: those that start or run no model load no engine and no Ray."""
    (tmp_path / "settings.yaml").write_text("replicas: 2\n")
    code = (
        "import atexit, sys; sys.argv[0] = 'warmpath'; "
        f"atexit.register(lambda: print('loaded', *[one for one in {HEAVY} if one in sys.modules])); "
        "from serve_app.cli.entry import main; main()"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, *command.split()],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    last = done.stdout.splitlines()[-1].split()
    assert last[0] == "loaded" and set(last[1:]) <= needs, done.stdout + done.stderr


def test_options_that_are_no_settings_are_known() -> None:
    """A file of settings with one of them gets its name."""
    own = signature(main.serve).parameters.keys() - {"setting", "worker", "engine_arg"}
    assert own - AppConfig.model_fields.keys() == OPTIONS


def test_settings_that_answers_recommend_can_be_set() -> None:
    answers = " ".join(main._INSTEAD.values())
    named = {flag.replace("-", "_") for flag in re.findall(r"--([\w-]+)", answers)}
    assert len(named) >= 4
    assert named <= {*AppConfig.model_fields, *signature(main.serve).parameters}
    assert load_settings(None, ["lora_adapters={style: /a}"]).lora_adapters == {"style": Path("/a")}
