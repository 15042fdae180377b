"""Load and unload LoRA adapters over HTTP, first on replicas, then on ingresses (vLLM's endpoints)."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainValidator

from serve_app.api.json_body import JsonBody, Must, Text128
from serve_app.api.request import require_none
from serve_app.checkpoints.adapter_registry import AdapterEntry, AdapterRegistry
from serve_app.config.app import AppConfig
from serve_app.engine.lora.peft_files import describe_adapter
from serve_app.engine.protocol import AdapterError
from serve_app.errors import InvalidRequest, NotFound, PermissionDenied
from serve_app.tenants import name_of

MAX_PATH_CHARS = 4096

Tell = Callable[[str, Any], Awaitable[list[Any]]]
"""Calls a method with one argument on every replica of a deployment, and returns the answers."""


def _names(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not value or not all(isinstance(name, str) for name in value):
        raise ValueError
    return tuple(value)


class LoadAdapterBody(JsonBody):
    """The body of ``POST /v1/load_lora_adapter``."""

    nullable: ClassVar[frozenset[str]] = frozenset({"tenants"})

    lora_name: Text128 = None
    lora_path: Annotated[
        str | None,
        Field(min_length=1, max_length=MAX_PATH_CHARS),
        Must(f"a string of 1 to {MAX_PATH_CHARS} characters"),
    ] = Field(None, description="a PEFT adapter's directory on the replicas' machines")
    load_inplace: bool = Field(False, description="replace an adapter of that name")
    tenants: Annotated[
        tuple[str, ...],
        PlainValidator(_names, json_schema_input_type=list[str] | None),
        Must("a list of at least one tenant's name, or null for all"),
    ] = Field((), description="tenants that may use it; null: all; absent: all, or with load_inplace the predecessor's")


class UnloadAdapterBody(JsonBody):
    """The body of ``POST /v1/unload_lora_adapter``."""

    lora_name: Text128 = None


@dataclass(slots=True)
class AdapterAdmin:
    """Changes the adapters of a deployment. ``config``: the settings in force; ``taken``: names of other models'."""

    config: AppConfig
    registry: AdapterRegistry
    tell_replicas: Tell
    tell_ingresses: Tell
    taken: Callable[[str], bool] = lambda _: False
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    def configure(self, config: AppConfig) -> None:
        """Use other settings."""
        self.config = config

    async def load(self, body: bytes) -> str:
        """Load an adapter; return vLLM's message. Raises InvalidRequest, PermissionDenied, and Overloaded.

        If a replica cannot serve it, or another request was faster, no replica keeps it.
        """
        self._require_allowed()
        fields = LoadAdapterBody.parse(body)
        require_none(fields.unknown())  # a misspelt `tenants` would offer it to all
        name, path = fields.lora_name, fields.lora_path
        if name is None or path is None:
            raise InvalidRequest("Both 'lora_name' and 'lora_path' must be provided.")
        named = {name_of(tenant.name): tenant.name for tenant in self.config.tenants}
        if unknown := sorted(set(fields.tenants) - named.keys()):
            raise InvalidRequest(f"There is no tenant {unknown[0][:64]!r}.", param="tenants")
        if name == self.config.model_name:
            raise InvalidRequest(f"{name!r} is the base model's name; choose another.", param="lora_name")
        if name in self.config.aliases or (self.registry.get(name) is None and self.taken(name)):
            raise InvalidRequest(f"{name!r} names another model or adapter; choose another.", param="lora_name")
        where = self._confined(path)
        async with self._one_at_a_time:
            before = self.registry.get(name)
            if before is not None and not fields.load_inplace:
                raise InvalidRequest(
                    f"The lora adapter '{name}' has already been loaded. To replace it, set 'load_inplace' to true.",
                    param="lora_name",
                )
            try:
                spec = await asyncio.to_thread(describe_adapter, name, where, root=self.config.lora_root)
            except AdapterError as error:
                inside = "" if self.config.lora_root is None else ", as lora_path starts in lora_root"
                message = f"The adapter cannot be loaded from {str(where)[:MAX_PATH_CHARS]}{inside}: {error}."
                raise InvalidRequest(message, param="lora_path") from error
            tenants = tuple(named[tenant] for tenant in fields.tenants)
            if before is not None and "tenants" not in fields.model_fields_set:
                tenants = before.tenants
            entry = self.registry.next_entry(name, spec, tenants)
            problems = [problem for problem in await self.tell_replicas("load_adapter", entry) if problem]
            now = self.registry.get(name)
            if problems or now is not before:
                if now is None or now.spec != spec:
                    await self.tell_replicas("drop_adapter", spec.key)
                if problems:
                    raise InvalidRequest(f"The adapter cannot be served: {problems[0]}.", param="lora_path")
                raise InvalidRequest(
                    f"Another request has changed the lora adapter '{name}' meanwhile; see GET /v1/models.",
                    param="lora_name",
                )
            await self._announce(entry, replaced=before)
        return f"Success: LoRA adapter '{name}' added successfully."

    async def unload(self, body: bytes) -> str:
        """Unload ``lora_name``; running requests finish with it. Raises InvalidRequest and NotFound."""
        self._require_allowed()
        fields = UnloadAdapterBody.parse(body)
        require_none(fields.unknown())
        name = fields.lora_name
        if name is None:
            raise InvalidRequest("'lora_name' needs to be provided to unload a LoRA adapter.", param="lora_name")
        async with self._one_at_a_time:
            before = self.registry.get(name)
            if before is None:
                raise NotFound(f"The lora adapter '{name}' cannot be found.", param="lora_name")
            await self._announce(self.registry.next_entry(name, None), replaced=before)
        return f"Success: LoRA adapter '{name}' removed successfully."

    async def _announce(self, entry: AdapterEntry, replaced: AdapterEntry | None) -> None:
        """Publish an entry: here, to every ingress, and to replicas, from which later ingresses learn it."""
        self.registry.merge([entry])
        await self.tell_ingresses("merge_adapters", [entry])
        await self.tell_replicas("merge_adapters", [entry])
        if replaced is not None and replaced.spec is not None and replaced.spec != entry.spec:
            await self.tell_replicas("drop_adapter", replaced.spec.key)

    def _require_allowed(self) -> None:
        if not self.config.allow_runtime_lora:
            raise PermissionDenied("Adapters are fixed in this deployment; set allow_runtime_lora to change them.")
        self.registry.require_current()

    def _confined(self, path: str) -> Path:
        """Resolve a path. Raises PermissionDenied if it lies outside ``lora_root``, with links followed."""
        root = self.config.lora_root
        try:
            if root is None:
                return Path(path).expanduser().resolve()
            root = root.resolve()
            where = (root / path).resolve()
        except (OSError, RuntimeError, ValueError) as error:
            raise InvalidRequest("lora_path is no path.", param="lora_path") from error
        if not where.is_relative_to(root):
            raise PermissionDenied("lora_path lies outside lora_root.", param="lora_path")
        return where
