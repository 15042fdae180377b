"""Adapters at a worker: it names them, or loads them at their first request. One that is slow holds no other up."""

import asyncio
import logging
from collections.abc import Callable

import aiohttp
import msgspec

from serve_app.engine.protocol import AdapterSpec
from serve_app.engine.remote.answers import WorkerGone
from serve_app.engine.remote.reading import ERROR_BYTES, LIES, PROBE_TIMEOUT, WorkerHttp, printable

logger = logging.getLogger(__name__)

LOAD_TIMEOUT = aiohttp.ClientTimeout(total=600.0)
"""Most time that a server may take to load an adapter; requests for it wait no longer than their own limits."""


class Names:
    """Adapters by name: the server has their weights, or loads them at their first request."""

    def __init__(self) -> None:
        self._keys: dict[str, None] = {}

    @property
    def loaded(self) -> tuple[str, ...]:
        """Keys of the adapters that requests may name."""
        return tuple(self._keys)

    def load(self, spec: AdapterSpec) -> None:
        """Let requests name an adapter."""
        self._keys[spec.key] = None

    def unload(self, key: str) -> bool:
        """Let requests name an adapter no longer; return False if none did."""
        return key in self._keys and self._keys.pop(key) is None


class AdapterLoads:
    """The adapters that one worker is loading, by name, each in a task of its own. Used from one loop.

    ``loaded``: keys of the adapters that the worker has under their names, as far as is known here.
    """

    def __init__(self, loaded: dict[str, str]) -> None:
        self._loaded = loaded
        self._loads: dict[str, tuple[str, asyncio.Task[None]]] = {}

    @property
    def loading(self) -> tuple[str, ...]:
        """Names of the adapters that the worker is loading."""
        return tuple(self._loads)

    @property
    def loaded(self) -> tuple[str, ...]:
        """Names of the adapters that the worker has, as far as is known here."""
        return tuple(self._loaded)

    async def ensure(
        self,
        http: WorkerHttp,
        path: str,
        spec: AdapterSpec,
        names: Callable[[], frozenset[str]],
        loaded: Callable[[str], None],
    ) -> None:
        """Wait until the server has an adapter that it does not name, or has in an earlier version.

        ``path``: the URL under which it loads them; ``names``: those that it has now; ``loaded``: called with one that
        it got. All requests for an adapter wait for one load, which none of them ends by leaving. Raises ValueError if
        the server refuses, and WorkerGone.
        """
        while True:
            named = spec.name in names()
            if named and self._loaded.setdefault(spec.name, spec.key) == spec.key:
                return
            key, load = self._loads.get(spec.name, ("", None))
            if load is None:
                load = asyncio.get_running_loop().create_task(self._load(http, path, spec, named, loaded))
                self._loads[spec.name] = spec.key, load
                load.add_done_callback(lambda ended: self._ended(spec.name, ended))
                key = spec.key
            await asyncio.wait({load})
            if load.cancelled():
                raise WorkerGone(f"{path} went away while it loaded the adapter {spec.name}")
            if key == spec.key:
                load.result()
                return

    def forget(self) -> None:
        """Give up all loads: the worker is no longer this replica's."""
        for _, load in self._loads.values():
            load.cancel()
        self._loads.clear()

    def _ended(self, name: str, load: asyncio.Task[None]) -> None:
        if self._loads.get(name, ("", None))[1] is load:
            del self._loads[name]
        if not load.cancelled():
            load.exception()  # marks it as retrieved, though all that waited may have left

    async def _load(
        self, http: WorkerHttp, path: str, spec: AdapterSpec, named: bool, loaded: Callable[[str], None]
    ) -> None:
        body = msgspec.json.encode({"lora_name": spec.name, "lora_path": spec.path})
        try:
            if named:
                self._loaded[spec.name] = ""  # of no version, until one is loaded
                await http.whole(f"{path}/unload_lora_adapter", body, most=ERROR_BYTES, within=PROBE_TIMEOUT)
            status, answer = await http.whole(f"{path}/load_lora_adapter", body, most=ERROR_BYTES, within=LOAD_TIMEOUT)
        except TimeoutError:
            raise WorkerGone(f"{path} does not load the adapter {spec.name} in time") from None
        except (*LIES, aiohttp.ClientError, OSError) as error:
            raise WorkerGone(f"{path} does not load the adapter {spec.name} ({type(error).__name__})") from None
        if status != 200 and (named or b"already" not in answer):
            said = printable(answer.decode(errors="replace"))
            logger.warning(
                "%s does not load the adapter %s (%d): load it there. It says: %s", path, spec.name, status, said
            )
            if status >= 500:
                raise WorkerGone(f"{path} does not load the adapter {spec.name} ({status})")
            raise ValueError(f"The model's server does not load the adapter {spec.name} ({status}).")
        self._loaded[spec.name] = spec.key
        loaded(spec.name)
