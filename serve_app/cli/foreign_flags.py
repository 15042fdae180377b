"""Flags that people know from `vllm serve` and others: what does the same here, in a sentence."""

from __future__ import annotations

import typer
from typer.core import TyperCommand

from serve_app.config.app import AppConfig

INSTEAD = {
    "--tensor-parallel-size": "a replica computes on one device, there is no tensor parallelism; choose a model that "
    "fits one GPU, and more of them with --replicas",
    "--pipeline-parallel-size": "a replica computes on one device; choose a model that fits one GPU",
    "--data-parallel-size": "use --replicas: each is an engine of its own, and requests go where their prefix is",
    "--api-key": "keys belong to tenants: `warmpath keys new NAME` makes one, and says what to set",
    "--enable-prefix-caching": "prefix caching is on; --set enable_prefix_caching=false switches it off",
    "--enable-auto-tool-choice": "tool calls are on; the setting tool_parser names their format",
    "--tool-call-parser": "use --set tool_parser=NAME",
    "--enable-lora": "use --set 'lora_adapters={NAME: PATH}', or --set allow_runtime_lora=true",
    "--lora-modules": "use --set 'lora_adapters={NAME: PATH}'",
}


def instead_of(flag: str) -> str | None:
    """Return what to do in place of a flag that is none; None where nothing is known of it."""
    if instead := INSTEAD.get(flag):
        return f"there is no {flag}: {instead}"
    name = flag.removeprefix("--").replace("-", "_")
    return f"there is no {flag}: use --set {name}=VALUE" if name in AppConfig.model_fields else None


class ServeCommand(TyperCommand):
    """A command whose unknown flags are answered with what does the same here."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse. Raises typer.BadParameter."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # NoSuchOption is click's, or that of typer's own copy
            instead = instead_of(getattr(error, "option_name", None) or "")
            if instead is None:
                raise
            raise typer.BadParameter(instead) from None
