"""The command `warmpath`: its subcommands and flags, and replacements for other servers' flags.

Modules of commands import only what their signatures need, the rest when they run: each import costs all commands time.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperCommand

from router import __version__
from serve_app.cli.commands import bench, keys, prompts, tenants, traffic
from serve_app.cli.commands.check import check, doctor
from serve_app.cli.commands.infer import infer
from serve_app.cli.commands.plan import plan
from serve_app.cli.commands.replay import replay
from serve_app.cli.commands.stop import stop
from serve_app.cli.console import Commands, console, fail
from serve_app.cli.supervisor import (
    IDLE_TIMEOUT_S,
    MAX_CONNECTIONS_PER_ADDRESS,
    Launch,
    Supervisor,
    giving_up,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from serve_app.config.app import AppConfig

_INSTEAD = {
    "--data-parallel-size": "use --replicas: each one is a separate engine, and requests follow their cached prefix",
    "--api-key": "keys belong to tenants: `warmpath keys new NAME` makes one, and prints the settings for it",
    "--enable-auto-tool-choice": "tool calls are on; --tool-parser names their format",
    "--tool-call-parser": "use --tool-parser NAME",
    "--enable-lora": "use --lora-adapters '{NAME: PATH}', or --allow-runtime-lora",
    "--lora-modules": "use --lora-adapters '{NAME: PATH}'",
    "--worker-urls": "use --engine remote --worker URL, once for each",
}
"""The equivalents of flags of `vllm serve` and other servers."""


class _ServeCommand(TyperCommand):
    """A command that also accepts every setting as a flag, and names the equivalents of other servers' flags."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        from serve_app.config.app import AppConfig
        from serve_app.config.engine import SPEC_ARGS
        from serve_app.config.sentences import unknown_setting

        own = {flag for parameter in self.params for flag in (*parameter.opts, *parameter.secondary_opts)}
        left, rewritten = list(args), []
        while left:
            argument = left.pop(0)
            flag, equals, value = argument.partition("=")
            flag = "--speculative-config" if flag == "-sc" else flag
            if (instead := _INSTEAD.get(flag)) is not None:
                raise typer.BadParameter(f"there is no {flag}: {instead}")
            field = AppConfig.model_fields.get(name := flag.removeprefix("--").replace("-", "_"))
            if flag in own or not flag.startswith("--") or flag == "--help":
                rewritten.append(argument)
                continue
            if field is None and name not in SPEC_ARGS:
                wrong = unknown_setting(name, {*AppConfig.model_fields, *(one.lstrip("-") for one in own)})
                raise typer.BadParameter(f"{flag}: {wrong} (arguments of vLLM: --engine-arg NAME=VALUE)")
            if (
                not equals
                and field is not None
                and field.annotation is bool
                and (not left or left[0] not in ("true", "false"))
            ):
                value = "true"
            elif not equals:
                if not left:
                    raise typer.BadParameter(f"{flag} needs a value: {flag} VALUE")
                value = left.pop(0)
            rewritten += ["--engine-arg" if name in SPEC_ARGS else "--set", f"{name}={value}"]
        return super().parse_args(ctx, rewritten)


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
TENANTS, TROUBLE, PLANNING = "Tenants and prompts", "When something is wrong", "Measuring and planning"
app.add_typer(keys.app, name="keys", rich_help_panel=TENANTS)
app.add_typer(tenants.app, name="tenants", rich_help_panel=TENANTS)
app.add_typer(prompts.app, name="prompts", rich_help_panel=TENANTS)
app.add_typer(bench.app, name="bench", rich_help_panel=PLANNING)
app.add_typer(traffic.app, name="traffic", rich_help_panel=PLANNING)
app.command(rich_help_panel="Serving")(stop)
app.command(rich_help_panel="Serving")(infer)
app.command(rich_help_panel=PLANNING)(plan)
app.command(rich_help_panel=PLANNING)(replay)
app.command(rich_help_panel=TROUBLE)(doctor)


def _print_version(print_it: bool) -> None:
    if print_it:
        print(f"warmpath {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Cache-aware LLM serving: a request goes to the replica that holds its prefix's KV."""


@app.command(cls=_ServeCommand, rich_help_panel="Serving")
def serve(
    model: Annotated[
        str | None,
        typer.Argument(help="'smollm2' (the default), 'demo', 'small', a directory, a GGUF file or a hub id"),
    ] = None,
    replicas: Annotated[int | None, typer.Option(help="engine replicas")] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="torch, vllm, remote (servers that run), or simulated (a cost model instead of a forward)"),
    ] = None,
    worker: Annotated[
        list[str] | None,
        typer.Option(
            help="with --engine remote: http://HOST:PORT of a server, file:PATH or dns+http://...; repeatable"
        ),
    ] = None,
    engine_arg: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE, an argument of vLLM with its value as YAML or JSON; repeatable"),
    ] = None,
    port: Annotated[int, typer.Option(help="HTTP port")] = 8000,
    host: Annotated[str, typer.Option(help="HTTP address; 0.0.0.0 opens the port to the network")] = "127.0.0.1",
    config: Annotated[Path | None, typer.Option(help="YAML or JSON file of settings")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE, a setting of `warmpath settings`; repeatable")
    ] = None,
    haproxy: Annotated[bool, typer.Option(help="HAProxy in front (Ray Serve's fast path)")] = True,
    max_connections_per_address: Annotated[
        int, typer.Option(help="requests in flight per client address; more get a 429", min=1)
    ] = MAX_CONNECTIONS_PER_ADDRESS,
    keep_alive_timeout_s: Annotated[
        int, typer.Option(help="seconds that an idle connection stays open; more than those of a proxy in front", min=1)
    ] = IDLE_TIMEOUT_S,
    verbose: Annotated[bool, typer.Option(help="show the logs of Ray and the replicas, and whole tracebacks")] = False,
) -> None:
    """Start an instance on this machine and serve until Ctrl-C.

    Every setting of `warmpath settings` is also a flag: --kv-cache-bytes 4GiB, --tensor-parallel-size 2.
    """
    from serve_app.config.files import load_settings

    if model is not None and any(one.startswith("model=") for one in setting or ()):
        fail(f"two models are named, {model} and the setting `model`; name one")
    if haproxy and ":" in host:
        fail(f"HAProxy does not reach Serve's ingresses over IPv6: add --no-haproxy to listen on {host}")
    flags = {"model": model, "replicas": replicas, "engine": engine, "workers": worker or None}
    settings = _checked(partial(load_settings, config, setting or [], engine_arg or [], **flags), host, port)
    with giving_up(console):
        settings = with_model(settings)
        given = settings.model_dump(mode="json", exclude_unset=True)
        launch = Launch(given, host, port, haproxy, max_connections_per_address, verbose, keep_alive_timeout_s)
        status = Supervisor(console, settings.shutdown_timeout_s).run(launch)
    raise typer.Exit(status)


def _checked(load: "Callable[..., AppConfig]", host: str, port: int) -> "AppConfig":
    """Return the settings with what workers and GPUs of this machine add; exit with 2 if they cannot be used here."""
    from serve_app.cli.checks.finding import Look
    from serve_app.cli.checks.run import findings
    from serve_app.cli.checks.workers import settings_by_workers

    try:
        settings = load()
        if reported := settings_by_workers(settings):
            load = partial(load, **reported)
            settings = load()
        for finding in findings(Look("start", settings, (host, port)), "names", "database", "settings", "port"):
            if finding.state == "problem":
                fail(finding.sentence)
        settings = _with_gpus(load, settings)
    except ValueError as error:
        fail(str(error))
    if settings.allowed_hosts is None and not settings.tenants and host in ("127.0.0.1", "localhost", "::1"):
        # Pages of any site run in this machine's browser; only the name in Host distinguishes them from ours.
        settings.allowed_hosts = []
    return settings


def _with_gpus(load: "Callable[..., AppConfig]", settings: "AppConfig") -> "AppConfig":
    """Return the settings with the GPUs of each model's replicas; exit with 2 if this machine has too few."""
    from serve_app.cli.checks.machine import gpu_count, replica_gpus

    gpus: dict[int, int] = {}
    for number, one in enumerate(settings.served().values()):
        count, finding = replica_gpus(one, gpu_count)
        if finding.state == "problem":
            fail(finding.sentence)
        if finding.found:
            console.print(finding.found)
        if count:
            gpus[number] = count
    if gpus and not settings.models:
        return load(replica_num_gpus=gpus[0])
    for number, count in gpus.items():
        settings.models[number]["replica_num_gpus"] = count
    return settings


def with_model(settings: "AppConfig") -> "AppConfig":
    """Find, fetch or build the model; return the settings with it, or exit with 2 if they cannot be used."""
    from serve_app.checkpoints.checkpoint import CheckpointError
    from serve_app.checkpoints.sources import resolve_model, with_local_models
    from serve_app.cli.checks.finding import Look
    from serve_app.cli.checks.run import findings

    try:
        settings = with_local_models(settings, console.print)
    except CheckpointError as error:
        fail(str(error))
    wrong = [finding.sentence for finding in findings(Look("start", settings), "model", "files")]
    if wrong:
        fail("\nerror: ".join(wrong))
    for finding in findings(Look("start", settings), "workers"):
        if finding.state != "ok":
            spared = "; it gets no requests" if finding.state == "problem" else ""
            console.print(f"{finding.subject}: {finding.sentence}{spared}", style="yellow")
    for name, one in settings.served().items():
        console.print(f"[1/4] model {name}: {resolve_model(one.model)}")
    return settings


@app.command("settings", rich_help_panel="Serving")
def list_settings(
    words: Annotated[list[str] | None, typer.Argument(help="only settings with these words in name or meaning")] = None,
    yaml: Annotated[bool, typer.Option("--yaml", help="print a settings file with all defaults and comments")] = False,
) -> None:
    """List all settings with type, bounds, default and meaning. `--set` and settings files accept them."""
    from serve_app.config.reference import settings_text, settings_yaml

    print(settings_yaml() if yaml else settings_text(words or []), end="")


app.command(rich_help_panel=TROUBLE)(check)
