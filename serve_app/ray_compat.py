"""All uses of Ray's private names, for Ray 2.60.

Ray is imported late, because Serve reads its environment variables at import, after the command line has set them.
"""

from __future__ import annotations

import hashlib
import json
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from router import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ray.serve import Application
    from ray.serve.handle import DeploymentHandle, DeploymentResponse

NODE_TOO_SLOW = "node timed out during startup"
"""Part of Ray's message if its raylet needs over 30 s, which is a fixed limit (ray/_private/node.py)."""

_NAMESPACE = b"warmpath"


def serve_request_id() -> str:
    """Return the id that Serve returns for the current request, "" outside a request."""
    from ray.serve.context import _get_serve_request_context

    return str(_get_serve_request_context().request_id)


def header_names() -> tuple[list[str], str, str]:
    """Return the headers that clients could control Serve with, the prefix of others, and the request id's header."""
    from ray.serve._private import constants

    orders = [
        constants.SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER,
        constants.SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER,
        constants.SERVE_MULTIPLEXED_MODEL_ID,
        constants.SERVE_SESSION_ID,
    ]
    return orders, constants.SERVE_INGRESS_ROUTER_HEADER_PREFIX, constants.SERVE_HTTP_REQUEST_ID_HEADER


def session_header() -> str:
    """Return the only header that direct streaming passes to a router, in lower case."""
    from ray.serve._private.constants import SERVE_SESSION_ID

    return str(SERVE_SESSION_ID).lower()


def check_llm_headers(check: Callable[[Iterable[tuple[str, str]]], object]) -> None:
    """Call ``check`` with all headers of each later request to Ray's LLM ingress in this process, if there is one.

    It passes on only the first of equal headers. An error with a ``status_code`` is the answer.
    """
    module = sys.modules.get("ray.llm._internal.serve.core.protocol")
    if module is None:
        return
    make = module.RawRequestInfo.from_starlette_request

    def checked(request: Any) -> Any:
        check(request.headers.items())
        return make(request)

    module.RawRequestInfo.from_starlette_request = staticmethod(checked)


def vllm_engine_class() -> Any:
    """Return the class of Ray Serve LLM's vLLM engine; imports vLLM."""
    from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine

    return VLLMEngine


def on_head_node() -> bool:
    """Return whether this process runs on its Ray cluster's head node; blocks."""
    import ray
    from ray._common.constants import HEAD_NODE_RESOURCE_NAME

    own_id = ray.get_runtime_context().get_node_id()
    return any(node["NodeID"] == own_id and HEAD_NODE_RESOURCE_NAME in node["Resources"] for node in ray.nodes())


def keep_replicas(application: Application, settings: str) -> None:
    """Let a deploy of a config file restart an application's replicas only if its ``settings`` or Ray's env changed.

    Serve would restart those of every deployment if any of the file's ``args`` changed.
    """
    import ray

    env = dict(ray.get_runtime_context().runtime_env) if ray.is_initialized() else {}
    known = json.dumps([settings, env, __version__], sort_keys=True, default=str)
    version = hashlib.sha256(known.encode()).hexdigest()
    deployment = application._bound_deployment
    own = type(deployment._deployment_config)

    class _SameVersion(own):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, version if name == "version" else value)

    deployment._deployment_config = _SameVersion.model_construct(**dict(deployment._deployment_config))


def find_serve_actor(name: str) -> Any:
    """Return the handle of a Serve actor. Raises ValueError if there is none of that name."""
    import ray
    from ray.serve._private.constants import SERVE_NAMESPACE

    return ray.get_actor(name, namespace=SERVE_NAMESPACE)


def own_deployment() -> Any:
    """Return the config of this replica's deployment, including ``user_config``."""
    from ray import serve

    return serve.get_replica_context()._deployment_config


def cancel_call(response: DeploymentResponse[bytes]) -> None:
    """Cancel a call to a replica in any state.

    If the router runs in the caller's loop, Ray's own ``cancel`` has a gap between the end of the assignment and the
    consumer's notice of it: there it does nothing, because the assignment is over and the call is not known yet.
    If the router runs in another loop, ``cancel`` raises the assignment's error again.
    """
    with suppress(Exception):
        response.cancel()
    assigned = response._replica_result_future
    if assigned.done() and not assigned.cancelled() and assigned.exception() is None:
        assigned.result().cancel()


def limit_broadcasts(handle: DeploymentHandle, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Let a handle's broadcasts reach only replicas whose metadata are ``wanted``. Serve keeps handles: once is enough.

    A request router class of our own for the deployment would do the same, but Serve's proxies would have to import it.
    """
    if handle.is_initialized:
        return
    handle._init()
    sender = handle._router._asyncio_router
    serve_class = type(sender)

    class _Limited(serve_class):  # type: ignore[misc, valid-type]
        @property
        def _active_request_router(self) -> _SomeReplicas:
            return _SomeReplicas(super()._active_request_router, wanted)

    sender.__class__ = _Limited


class _SomeReplicas:
    """Serve's request router with some of its replicas: those whose metadata are ``wanted``."""

    def __init__(self, whole: Any, wanted: Callable[[dict[str, Any]], bool]) -> None:
        self._whole, self._wanted = whole, wanted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    @property
    def curr_replicas(self) -> dict[Any, Any]:
        known = self._whole.curr_replicas
        return {key: replica for key, replica in known.items() if self._wanted(replica.replica_metadata)}


def advertisements(handle: DeploymentHandle) -> dict[str, dict[str, Any]]:
    """Return the metadata of each replica that a handle knows, by its name; of all, whatever its broadcasts reach."""
    active = handle._router._asyncio_router.request_router if handle.is_initialized else None
    known = active.curr_replicas if active is not None else {}
    return {replica_id.unique_id: replica.replica_metadata for replica_id, replica in known.items()}


def use_outside_of_replicas(handle: DeploymentHandle) -> None:
    """Make a handle usable in a process that is no replica, which Serve's throughput mode does not expect."""
    handle._init(_run_router_in_separate_loop=True)


def kv_put(key: bytes, value: bytes, *, overwrite: bool = True) -> bool:
    """Write a value to Ray's GCS, in warmpath's namespace; return whether the key is new; blocks."""
    from ray.experimental import internal_kv

    return not internal_kv._internal_kv_put(key, value, overwrite=overwrite, namespace=_NAMESPACE)


def kv_get(key: bytes) -> bytes | None:
    """Return a value in Ray's GCS, None if there is none; blocks."""
    from ray.experimental import internal_kv

    value: bytes | None = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
    return value


def kv_delete(key: bytes) -> None:
    """Remove a key, if it exists; blocks."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_del(key, namespace=_NAMESPACE)


def kv_items(prefix: bytes) -> list[tuple[bytes, bytes]]:
    """Return the keys with a prefix, and their values; blocks."""
    from ray.experimental import internal_kv

    keys = internal_kv._internal_kv_list(prefix, namespace=_NAMESPACE)
    values = ((key, internal_kv._internal_kv_get(key, namespace=_NAMESPACE)) for key in keys)
    return [(key, value) for key, value in values if value is not None]  # None: removed in the meantime


def keep_cluster_unlisted() -> None:
    """Stop Ray from recording this process's clusters as the machine's "latest cluster"."""
    import ray._common.utils
    import ray._private.utils

    ray._private.utils.write_ray_address = lambda *_: None
    ray._common.utils.reset_ray_address = lambda *_: None


def deploy_config(config: dict[str, Any]) -> None:
    """Deploy a config file's content like ``serve deploy``; return before its start. Raises Serve's errors."""
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config))


def live_actors() -> list[dict[str, Any]]:
    """Return Ray's records of all living actors: ``ActorClassName``, ``Name``, ``Pid``, ``Address``."""
    import ray._private.state

    return list(ray._private.state.actors(actor_state_name="ALIVE").values())
