"""Settings that can change without a restart, in ``user_config`` of a Serve config file, which overrides ``args:``."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from serve_app.config.app import AppConfig
from serve_app.config.sentences import sentence, unknown_setting

LIVE = frozenset(
    {
        "policy",
        "autoscaling",
        "no_replica_wait_s",
        "tenants",
        "operator_key_sha256",
        "metrics_public",
        "public_prompts",
        "allowed_hosts",
        "enable_docs",
        "max_queued_requests",
        "max_body_bytes",
        "default_max_tokens",
        "request_timeout_s",
        "strict",
    }
)
"""The names of settings that may change without a restart."""

NO_TENANTS = "without any, every client has access; that needs a restart, with none under args: either"

Location = tuple[int | str, ...]


class BadSettings(ValueError):
    """Settings cannot be used. ``found``: places in them, each with a sentence about the required change."""

    def __init__(self, found: list[tuple[Location, str]]) -> None:
        self.found = found
        super().__init__("; ".join(f"{'.'.join(map(str, where))}: {why}" if where else why for where, why in found))


def app_config(values: Any) -> AppConfig:
    """Read settings from ``args:`` or a settings file. Raises BadSettings."""
    if not isinstance(values, Mapping):
        raise BadSettings([((), "settings are pairs of NAME: VALUE")])
    try:
        return AppConfig.model_validate(values)
    except ValidationError as error:
        raise BadSettings([(problem["loc"], sentence(problem, AppConfig)) for problem in error.errors()]) from None


def overlaid(args: AppConfig, user_config: Any) -> AppConfig:
    """Return ``args`` overridden by the values of ``user_config``. Raises BadSettings.

    A list replaces the whole list of ``args``; ``autoscaling`` is merged value by value. An empty list of tenants is
    refused if ``args`` has any, because every client would then have access.
    """
    if not user_config:
        return args
    if not isinstance(user_config, Mapping):
        raise BadSettings([((), "a user_config is pairs of NAME: VALUE")])
    restarts = "changes with a restart only; put it under args:"
    refused: list[tuple[Location, str]] = [
        ((name,), restarts if name in AppConfig.model_fields else unknown_setting(str(name), LIVE))
        for name in user_config
        if name not in LIVE
    ]
    if "autoscaling" in user_config and (args.autoscaling is None) != (user_config["autoscaling"] is None):
        why = "is switched on or off with a restart only; put it under args:, its values may change here"
        refused.append((("autoscaling",), why))
    if args.tenants and "tenants" in user_config and not user_config["tenants"]:
        refused.append((("tenants",), NO_TENANTS))
    if refused:
        raise BadSettings(refused)
    base, live = args.to_json(), dict(user_config)
    if isinstance(live.get("autoscaling"), Mapping):
        live["autoscaling"] = {**base["autoscaling"], **live["autoscaling"]}
    return app_config({**base, **live})


def changed_salts(before: AppConfig, after: AppConfig) -> list[str]:
    """Return the tenants with a changed trust group, which lose their cached KV."""
    groups = {tenant.name: tenant.trust_group for tenant in before.tenants}
    return [t.name for t in after.tenants if groups.get(t.name, t.trust_group) != t.trust_group]
