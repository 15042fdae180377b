"""A replica's LoRA adapters: loaded ahead if configured, and on demand, since requests carry their paths."""

import asyncio
import time
from collections.abc import Callable

from router.protocol.samples import Mean
from serve_app.checkpoints.adapter_registry import AdapterRegistry, configured_adapters
from serve_app.config.app import AppConfig
from serve_app.engine.protocol import (
    AdapterError,
    AdapterSpec,
    Engine,
    EngineError,
    EngineRequest,
    OutputSink,
    UnknownAdapter,
)

_TRIES = 3
"""An adapter can be evicted right after its load, before its request enters; more often than that is no accident."""

_WEIGHT = 0.3


class ReplicaAdapters:
    """Adapters of one engine. Used from one event loop."""

    def __init__(self, config: AppConfig, engine: Engine, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._engine = engine
        self._clock = clock
        self._load_s = Mean(_WEIGHT)
        self.registry = AdapterRegistry(config.model_name)
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._paths: dict[str, str] = {}

    @property
    def load_s(self) -> float:
        """The mean duration of recent loads in seconds; 0.0 before the first one."""
        return self._load_s.value

    async def preload(self) -> None:
        """Load the configured adapters, as many as memory can hold. Raises AdapterError for an unfit one."""
        config = self._config
        entries = await asyncio.to_thread(configured_adapters, config.lora_adapters, config.max_lora_rank)
        self.registry.merge(entries)
        for entry in entries[: config.max_cpu_loras]:
            if entry.spec is not None:
                try:
                    await self._load_once(entry.spec)
                except AdapterError as error:
                    raise AdapterError(f"the adapter {entry.name!r}: {error}") from error

    def loaded(self) -> tuple[AdapterSpec, ...]:
        """Return the adapters in memory, the last used first."""
        keys = reversed(self._engine.adapters.loaded)
        return tuple(AdapterSpec.of_key(key, self._paths[key]) for key in keys if key in self._paths)

    async def load(self, spec: AdapterSpec) -> str:
        """Load an adapter before any request for it; return why it cannot be served, or ""."""
        try:
            await self._load_once(spec)
        except (AdapterError, EngineError) as error:
            return str(error)
        return ""

    async def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        """Submit a request, first loading a missing adapter. Raises the errors of ``submit`` and of the load."""
        for attempt in range(_TRIES):
            try:
                self._engine.submit(request, sink)
                return
            except UnknownAdapter:
                if not request.lora_path or attempt == _TRIES - 1:
                    raise
            await self._load_once(AdapterSpec.of_key(request.scope.lora, request.lora_path))

    async def _load_once(self, spec: AdapterSpec) -> None:
        task = self._loading.get(spec.key)
        if task is None:
            task = asyncio.create_task(self._timed_load(spec))
            self._loading[spec.key] = task
            task.add_done_callback(lambda _: self._loading.pop(spec.key, None))
        # A cancelled request must not end the load for other waiting requests.
        await asyncio.shield(task)

    async def _timed_load(self, spec: AdapterSpec) -> None:
        here = spec.key in self._engine.adapters.loaded
        started_s = self._clock()
        await asyncio.to_thread(self._engine.adapters.load, spec)
        self._paths[spec.key] = spec.path
        self._paths = {key: self._paths[key] for key in self._engine.adapters.loaded if key in self._paths}
        if not here:
            self._load_s.observe(self._clock() - started_s)
