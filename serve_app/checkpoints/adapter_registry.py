"""The LoRA adapters of a deployment and their tenants. Copies agree by merging: for each name the latest stamp wins."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from serve_app.engine.lora.peft_files import describe_adapter
from serve_app.engine.protocol import AdapterError, AdapterSpec
from serve_app.errors import InvalidRequest, ModelNotFound, Overloaded

SHOWN_NAMES = 20


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """One adapter's state. ``tenants``: its users, empty for all tenants; ``spec`` None: it was unloaded.

    ``stamp``: nanoseconds since 1970, 0 for an entry of the settings.
    """

    name: str
    spec: AdapterSpec | None
    tenants: tuple[str, ...] = ()
    stamp: int = 0


class AdapterRegistry:
    """The adapters by name, visible only to their tenants.

    ``current``: the registry has merged the other copies. Before that it chooses no adapter, because one that was
    unloaded or restricted after the settings were written would be available to all again.
    """

    def __init__(self, model_name: str, *, now_ns: Callable[[], int] = time.time_ns, current: bool = True) -> None:
        self.current = current
        self._model_name = model_name
        self._now_ns = now_ns
        self._entries: dict[str, AdapterEntry] = {}

    def entries(self) -> tuple[AdapterEntry, ...]:
        """Return all entries, including unloaded ones, for another copy to merge."""
        return tuple(self._entries.values())

    def merge(self, entries: Iterable[AdapterEntry]) -> None:
        """Merge another copy's entries. All copies keep the same, latest entry of a name."""
        for entry in entries:
            current = self._entries.get(entry.name)
            if current is None or _order(entry) > _order(current):
                self._entries[entry.name] = entry

    def next_entry(self, name: str, spec: AdapterSpec | None, tenants: tuple[str, ...] = ()) -> AdapterEntry:
        """Return a new entry that supersedes the known one, without merging it."""
        current = self._entries.get(name)
        return AdapterEntry(name, spec, tenants, max(self._now_ns(), current.stamp + 1 if current is not None else 1))

    def require_current(self) -> None:
        """Raise Overloaded while this copy has not merged others."""
        if not self.current:
            raise Overloaded(
                "This ingress has just started and does not know the adapters yet; send the request again.",
                retry_after_s=1.0,
            )

    def get(self, name: str) -> AdapterEntry | None:
        """Return a name's entry if it is loaded."""
        entry = self._entries.get(name)
        return entry if entry is not None and entry.spec is not None else None

    def visible(self, tenant: str | None, models: Collection[str] | None = None) -> tuple[AdapterSpec, ...]:
        """Return a tenant's adapters, or all for an operator (None). ``models``: the allowed names; None: all."""
        return tuple(
            entry.spec
            for entry in self._entries.values()
            if entry.spec is not None and (tenant is None or _is_for(entry, tenant, models))
        )

    def base_visible(self, models: Collection[str] | None) -> bool:
        """Return whether the base model itself is among ``models``."""
        return models is None or self._model_name in models

    def serves(self, name: str, tenant: str, models: Collection[str] | None = None) -> bool:
        """Return whether a tenant may use the model or adapter of this name here."""
        if name == self._model_name:
            return self.base_visible(models)
        return self._of(name, tenant, models) is not None

    def choose(
        self, model: str, lora_name: str | None, tenant: str, models: Collection[str] | None = None
    ) -> AdapterSpec | None:
        """Return a request's adapter, or None for the base model.

        Raises ModelNotFound for an unknown ``model``, InvalidRequest for a ``lora_name`` that is unknown or contradicts
        ``model``, and Overloaded for all except the base model while this copy is not ``current``.
        """
        base = self.base_visible(models)
        is_base = base and model == self._model_name
        if not is_base or lora_name is not None:
            self.require_current()
        chosen = self._of(model, tenant, models)
        if chosen is None and not is_base:
            names = [*([self._model_name] if base else []), *(spec.name for spec in self.visible(tenant, models))]
            raise no_such_model(model, names)
        if lora_name is None:
            return chosen
        named = self._of(lora_name, tenant, models)
        if named is None:
            mine = [spec.name for spec in self.visible(tenant, models)]
            others = f"use {_listed(mine)}" if mine else "none is loaded"
            raise InvalidRequest(f"There is no LoRA adapter {lora_name[:200]!r}; {others}.", param="lora_name")
        if chosen is not None and chosen != named:
            raise InvalidRequest(
                f"model names the adapter {model!r} and lora_name {lora_name!r}; name one.", param="lora_name"
            )
        return named

    def _of(self, name: str, tenant: str, models: Collection[str] | None) -> AdapterSpec | None:
        entry = self._entries.get(name)
        return entry.spec if entry is not None and _is_for(entry, tenant, models) else None


def _is_for(entry: AdapterEntry, tenant: str, models: Collection[str] | None) -> bool:
    return (not entry.tenants or tenant in entry.tenants) and (models is None or entry.name in models)


def _order(entry: AdapterEntry) -> tuple[int, bool, str, str, tuple[str, ...]]:
    """Return the sort key of one name's entries, equal in all copies, also for entries of the same nanosecond.

    Entries of the settings are equal, so that after an update of the settings each copy keeps its own.
    """
    if not entry.stamp:
        return 0, False, "", "", ()
    spec = entry.spec
    return entry.stamp, spec is None, spec.digest if spec else "", spec.path if spec else "", entry.tenants


def configured_adapters(paths: Mapping[str, Path], max_rank: int | None = None) -> list[AdapterEntry]:
    """Return the entries of the settings' adapters. Raises AdapterError, also for one above ``max_rank``."""
    entries = []
    for name, path in paths.items():
        try:
            entries.append(AdapterEntry(name, describe_adapter(name, path, max_rank=max_rank)))
        except AdapterError as error:
            raise AdapterError(f"the adapter {name!r} of the settings, {path}: {error}") from error
    return entries


def no_such_model(name: str, names: Sequence[str]) -> ModelNotFound:
    """Return the error for a name that is none of the caller's models."""
    use = f"use {_listed(names)} (GET /v1/models lists all)" if names else "this key has no models"
    return ModelNotFound(f"The model {name[:200]!r} is not served here; {use}.", param="model")


def _listed(names: Iterable[str]) -> str:
    quoted = [repr(name) for name in names]
    more = f" or {len(quoted) - SHOWN_NAMES} more" if len(quoted) > SHOWN_NAMES else ""
    return ", ".join(quoted[:SHOWN_NAMES]) + more
