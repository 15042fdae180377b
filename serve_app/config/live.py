"""Settings that can change without a restart, in ``user_config`` of a Serve config file, which overrides ``args:``."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from serve_app.config.app import SHARED, AppConfig, slug
from serve_app.config.sentences import sentence, unknown_setting
from serve_app.config.tenants import PlacedError

LIVE = frozenset(
    {
        "policy",
        "shadow_policy",
        "autoscaling",
        "no_replica_wait_s",
        "tenants",
        "prices",
        "aliases",
        "operator_key_sha256",
        "metrics_public",
        "vllm_metrics",
        "public_prompts",
        "allowed_hosts",
        "allowed_origins",
        "enable_docs",
        "max_queued_requests",
        "max_body_bytes",
        "default_max_tokens",
        "request_timeout_s",
        "strict",
        "agent_prompt_rules",
        "workers",
        "traffic_log",
    }
)
"""The names of settings that may change without a restart."""

NO_TENANTS = "without any, every client has access; that needs a restart, with none under args: either"

Location = tuple[int | str, ...]

_LIVE_OF_MODELS = LIVE - SHARED


class BadSettings(ValueError):
    """Settings cannot be used. ``found``: places in them, each with a sentence about the required change."""

    def __init__(self, found: list[tuple[Location, str]]) -> None:
        self.found = found
        super().__init__("; ".join(f"{'.'.join(map(str, where))}: {why}" if where else why for where, why in found))


def app_config(values: Any) -> AppConfig:
    """Read settings from ``args:`` or a settings file. Raises BadSettings."""
    if not isinstance(values, Mapping):
        raise BadSettings([((), "settings are pairs of NAME: VALUE")])
    config = _validated(values, ())
    problems = [
        problem for number, entry in enumerate(config.models) for problem in _misplaced(entry, ("models", number))
    ]
    if not problems:
        served = [_validated(entry, ("models", number)) for number, entry in enumerate(config.entries())]
        problems = list(_names(config, served))
    if problems:
        raise BadSettings(problems)
    return config


def _validated(values: Any, place: Location) -> AppConfig:
    try:
        return AppConfig.model_validate(values)
    except ValidationError as error:
        raise BadSettings([((*place, *_place_of(one)), sentence(one, AppConfig)) for one in error.errors()]) from None


def _place_of(error: ErrorDetails) -> Location:
    raised = error.get("ctx", {}).get("error")
    return (*error["loc"], *raised.place) if isinstance(raised, PlacedError) else error["loc"]


def _misplaced(entry: Mapping[str, Any], place: Location) -> Iterator[tuple[Location, str]]:
    """Yield the settings in an entry of ``models`` that are not a model's own."""
    for name in entry:
        if name in SHARED:
            yield (*place, name), "all models have it in common; put it outside of models"
        elif name not in AppConfig.model_fields:
            yield (*place, name), unknown_setting(str(name), set(AppConfig.model_fields) - SHARED)


def _names(config: AppConfig, served: Sequence[AppConfig]) -> Iterator[tuple[Location, str]]:
    """Yield the names of models, adapters, aliases and fallbacks that are given twice, or mean nothing."""
    taken: dict[str, Location] = {}
    slugs: dict[str, str] = {}
    for number, one in enumerate(served):
        place: Location = ("models", number)
        adapters = ((name, (*place, "lora_adapters")) for name in one.lora_adapters)
        for name, at in ((one.model_name, (*place, "model")), *adapters):
            if name in taken:
                yield at, f"the name {name!r} is given twice; give each model its own served_model_name"
            taken[name] = at
        if (other := slugs.setdefault(slug(one.model_name), one.model_name)) != one.model_name:
            shared = f"{one.model_name!r} and {other!r} would both be deployed as {slug(other)}"
            yield (*place, "model"), f"{shared}; give one another served_model_name, and the name to aliases"
    prompts = [one.prompts_dir for one in served if one.prompts_dir is not None]
    if len(set(prompts)) < len(prompts):
        yield ("prompts_dir",), "the current versions in it are one model's; give each entry of models its own"
    models = {one.model_name for one in served}
    for number, one in enumerate(served):
        if one.fallback is not None and one.fallback not in models - {one.model_name}:
            yield ("models", number, "fallback"), f"must be another of the models: {', '.join(sorted(models))}"
    if config.fallback is not None:
        yield ("fallback",), "belongs into an entry of models"
    if served and config.served_model_name is not None:
        yield ("served_model_name",), "belongs into an entry of models"
    if not served:
        taken = dict.fromkeys((config.model_name, *config.lora_adapters), ())
    later = any(one.allow_runtime_lora for one in served or [config])
    for alias, name in config.aliases.items():
        if alias in taken:
            yield ("aliases", alias), "is a model's or an adapter's own name; choose another"
        elif name not in taken and not (later and name not in config.aliases):
            yield ("aliases", alias), f"must be the name of a model or adapter: {', '.join(sorted(taken))}"


def overlaid(args: AppConfig, user_config: Any) -> AppConfig:
    """Return ``args`` overridden by the values of ``user_config``. Raises BadSettings.

    A list replaces the whole list of ``args``; ``autoscaling`` is merged value by value, and so is each entry of
    ``models``. An empty list of tenants is refused if ``args`` has any, because every client would then have access.
    """
    if not user_config:
        return args
    if not isinstance(user_config, Mapping):
        raise BadSettings([((), "a user_config is pairs of NAME: VALUE")])
    restarts = "changes with a restart only; put it under args:"
    refused: list[tuple[Location, str]] = [
        ((name,), restarts if name in AppConfig.model_fields else unknown_setting(str(name), LIVE))
        for name in user_config
        if name not in LIVE and not (name == "models" and args.models)
    ]
    if "autoscaling" in user_config and (args.autoscaling is None) != (user_config["autoscaling"] is None):
        why = "is switched on or off with a restart only; put it under args:, its values may change here"
        refused.append((("autoscaling",), why))
    if args.tenants and "tenants" in user_config and not user_config["tenants"]:
        refused.append((("tenants",), NO_TENANTS))
    if refused:
        raise BadSettings(refused)
    base, live = args.to_json(), dict(user_config)
    if "models" in live:
        live["models"] = _changed_models(args, live["models"])
    if isinstance(live.get("autoscaling"), Mapping):
        live["autoscaling"] = {**base["autoscaling"], **live["autoscaling"]}
    return app_config({**base, **live})


def of_model(user_config: Any, model: str) -> Any:
    """Return the part of a ``user_config`` for several models that is for the replicas of one; the rest is others'."""
    if not isinstance(user_config, Mapping):
        return user_config
    own = {name: value for name, value in user_config.items() if name not in ("models", "aliases")}
    for entry in user_config.get("models") or ():
        if isinstance(entry, Mapping) and _named(entry) == model:
            own |= {name: value for name, value in entry.items() if name in _LIVE_OF_MODELS}
    return own


def _named(entry: Mapping[str, Any]) -> str:
    return str(entry.get("served_model_name") or entry.get("model"))


def _changed_models(args: AppConfig, changes: Any) -> list[Any]:
    """Return the ``models`` of ``args`` with live changes, each entry with its model's name. Raises BadSettings."""
    entries = [dict(entry) for entry in args.models]
    by_name = dict(zip(args.served(), entries, strict=True))
    for number, change in enumerate(changes if isinstance(changes, list) else [None]):
        named = change if isinstance(change, Mapping) else {}
        entry = by_name.get(_named(named))
        if entry is None:
            sentence = f"must have the served_model_name or model of one of the models: {', '.join(by_name)}"
            raise BadSettings([(("models", number), sentence)])
        for name, value in named.items():
            if name in _LIVE_OF_MODELS:
                before = entry.get(name)
                if isinstance(value, Mapping) and isinstance(before, Mapping):
                    value = {**before, **value}
                entry[name] = value
            elif value != entry.get(name) and name not in ("served_model_name", "model"):
                raise BadSettings([(("models", number, name), "changes with a restart only; put it under args:")])
    return entries


def changed_salts(before: AppConfig, after: AppConfig) -> list[str]:
    """Return the tenants with a changed trust group, which lose their cached KV."""
    groups = {tenant.name: tenant.trust_group for tenant in before.tenants}
    return [t.name for t in after.tenants if groups.get(t.name, t.trust_group) != t.trust_group]
