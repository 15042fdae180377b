"""Every private name of Ray that warmpath needs, and nothing else; Ray 2.60.

Ray is imported where it is needed: Serve reads its switches then, after the command line has set them.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle, DeploymentResponse

NODE_TOO_SLOW = "node timed out during startup"
"""Of Ray's message where its raylet takes longer than 30 s, which cannot be set (ray/_private/node.py)."""

_NAMESPACE = b"warmpath"


def serve_request_id() -> str:
    """Return the id that Serve answers with for the request under way; "" outside of one."""
    from ray.serve.context import _get_serve_request_context

    return str(_get_serve_request_context().request_id)


def header_names() -> tuple[list[str], str, str]:
    """Return the headers by which clients could give Serve orders, the prefix of more such, and the request id's."""
    from ray.serve._private import constants

    orders = [
        constants.SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER,
        constants.SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER,
        constants.SERVE_MULTIPLEXED_MODEL_ID,
        constants.SERVE_SESSION_ID,
    ]
    return orders, constants.SERVE_INGRESS_ROUTER_HEADER_PREFIX, constants.SERVE_HTTP_REQUEST_ID_HEADER


def session_header() -> str:
    """Return the one header that direct streaming passes on to a router, in lower case."""
    from ray.serve._private.constants import SERVE_SESSION_ID

    return str(SERVE_SESSION_ID).lower()


def vllm_engine_class() -> Any:
    """Return the class of Ray Serve LLM's vLLM engine; imports vLLM."""
    from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine

    return VLLMEngine


def on_head_node() -> bool:
    """Return whether this process runs on the head of its Ray cluster; blocks."""
    import ray
    from ray._common.constants import HEAD_NODE_RESOURCE_NAME

    own_id = ray.get_runtime_context().get_node_id()
    return any(node["NodeID"] == own_id and HEAD_NODE_RESOURCE_NAME in node["Resources"] for node in ray.nodes())


def find_serve_actor(name: str) -> Any:
    """Return the handle of a Serve actor. Raises ValueError where there is none of that name."""
    import ray
    from ray.serve._private.constants import SERVE_NAMESPACE

    return ray.get_actor(name, namespace=SERVE_NAMESPACE)


def own_deployment() -> Any:
    """Return the config of the deployment that this process is a replica of, ``user_config`` among it."""
    from ray import serve

    return serve.get_replica_context()._deployment_config


def cancel_call(response: DeploymentResponse[bytes]) -> None:
    """Cancel a call to a replica, whatever became of it.

    Where the router runs in the caller's loop, Ray's own ``cancel`` does nothing between the end of the assignment and
    the moment when the consumer hears of it: too late to cancel the assignment, and the call itself is not known yet.
    Where it runs in another loop, ``cancel`` raises once more what the assignment raised.
    """
    with suppress(Exception):
        response.cancel()
    assigned = response._replica_result_future
    if assigned.done() and not assigned.cancelled() and assigned.exception() is None:
        assigned.result().cancel()


def use_outside_of_replicas(handle: DeploymentHandle) -> None:
    """Let a handle be used in a process that is no replica, which Serve's throughput mode does not expect."""
    handle._init(_run_router_in_separate_loop=True)


def kv_put(key: bytes, value: bytes) -> None:
    """Write a value of warmpath's into Ray's GCS; blocks."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_put(key, value, overwrite=True, namespace=_NAMESPACE)


def kv_delete(key: bytes) -> None:
    """Remove it, if it is there; blocks."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_del(key, namespace=_NAMESPACE)


def kv_items(prefix: bytes) -> list[tuple[bytes, bytes]]:
    """Return the keys that begin so, with their values; blocks."""
    from ray.experimental import internal_kv

    keys = internal_kv._internal_kv_list(prefix, namespace=_NAMESPACE)
    values = ((key, internal_kv._internal_kv_get(key, namespace=_NAMESPACE)) for key in keys)
    return [(key, value) for key, value in values if value is not None]  # None: removed in the meantime


def keep_cluster_unlisted() -> None:
    """Keep Ray's note of "the latest cluster" of this machine as it is; for clusters that this process starts."""
    import ray._common.utils
    import ray._private.utils

    ray._private.utils.write_ray_address = lambda *_: None
    ray._common.utils.reset_ray_address = lambda *_: None


def deploy_config(config: dict[str, Any]) -> None:
    """Do what ``serve deploy`` does with a config file; returns before it has started. Raises what Serve raises."""
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config))


def live_actors() -> list[dict[str, Any]]:
    """Return what Ray knows of each actor that lives: ``ActorClassName``, ``Name``, ``Pid``, ``Address``."""
    import ray._private.state

    return list(ray._private.state.actors(actor_state_name="ALIVE").values())
