"""Ray's private names match their description in ``serve_app/ray_compat.py``, and no other file uses any.

A new version of Ray breaks these tests first.
"""

import inspect
import re
from pathlib import Path

import pytest
import ray._common.utils
import ray._private.state
import ray._private.utils
from ray._private.node import Node
from ray.experimental import internal_kv
from ray.serve import context
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.handle_options import InitHandleOptions
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentResponse
from ray.serve.request_router import RequestRouter

from serve_app import ray_compat

ROOT = Path(__file__).parents[2]
PRIVATE = re.compile(
    r"ray(\.\w+)*\._\w|from ray[\w.]* import (\w+, )*_\w|internal_kv|_deployment_config\b|_replica_result_future\b"
    r"|handle\._\w"
)


def test_no_other_file_has_private_names_of_ray() -> None:
    files = [file for room in ("router", "serve_app", "cluster") for file in (ROOT / room).rglob("*.py")]
    private = {
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file in files
        if file.name != "ray_compat.py"
        for line in file.read_text().splitlines()
        if PRIVATE.search(line)
    }
    assert files
    assert private == set()
    assert PRIVATE.search((ROOT / "serve_app/ray_compat.py").read_text())


def test_headers_are_names_and_outside_of_a_request_there_is_no_id() -> None:
    assert ray_compat.serve_request_id() == ""
    orders, prefix, request_id = ray_compat.header_names()
    assert len(orders) == 4 and request_id == "x-request-id"
    assert all(re.fullmatch(r"[\w-]+", name) for name in (*orders, prefix))
    token = context._serve_request_context.set(context._RequestContext(request_id="r1"))
    try:
        assert ray_compat.serve_request_id() == "r1"
    finally:
        context._serve_request_context.reset(token)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (DeploymentResponse, "_replica_result_future"),
        (InitHandleOptions, "_run_router_in_separate_loop"),
        (context.ReplicaContext, "_deployment_config"),
        (context._get_global_client, "ServeControllerClient"),
        (DeploymentConfig, "user_config"),
        (Node, ray_compat.NODE_TOO_SLOW),
        (ray._private.state.actors, "actor_state_name"),
        (ray._private.utils.write_ray_address, "def write_ray_address"),
        (ray._common.utils.reset_ray_address, "def reset_ray_address"),
        (RequestRouterConfig, "request_router_kwargs"),
        (internal_kv._internal_kv_put, "overwrite"),
        *((getattr(internal_kv, f"_internal_kv_{name}"), "namespace") for name in ("put", "get", "del", "list")),
    ],
)
def test_ray_still_has_the_used_names(place: object, words: str) -> None:
    sources = [place] if not inspect.isclass(place) else [part for part in place.__mro__ if part is not object]
    assert any(words in inspect.getsource(part) for part in sources if part.__module__.startswith("ray"))  # type: ignore


def test_serves_router_and_rays_store_still_have_the_members_ours_use_and_replace() -> None:
    source = "".join(inspect.getsource(part) for part in RequestRouter.__mro__ if part.__module__.startswith("ray"))
    for name in ("_deployment_id", "_replicas", "_replica_queue_len_cache"):
        assert re.search(rf"self\.{name}\b.* = ", source), name
    for name in ("_event_loop", "_replicas_updated_event"):
        assert isinstance(getattr(RequestRouter, name), property), name
    for name in ("_choose_replica_for_request", "_backoff", "update_replicas", "on_replica_actor_died"):
        assert callable(getattr(RequestRouter, name)), name
