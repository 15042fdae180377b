"""The application for Ray's own commands, its processes' environment, and Ray's private names as we describe them."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray._common.utils
import ray._private.state
import ray._private.utils
import yaml
from ray._private.node import Node
from ray.experimental import internal_kv
from ray.serve import context
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.handle_options import InitHandleOptions
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentResponse
from ray.serve.request_router import RequestRouter

import serve_app
from serve_app import ray_compat
from serve_app.config.live import BadSettings

ROOT = Path(__file__).parents[2]


def test_values_may_be_text() -> None:
    """`serve run` passes all of them as text; an invalid one is named."""
    given = {"model": "demo", "engine": "simulated", "replicas": "3", "kv_cache_bytes": "64MiB", "strict": "true"}
    app = serve_app.build_app(given)
    replica = app._bound_deployment.init_args[1]._bound_deployment
    assert replica.num_replicas == 3
    assert (replica.init_args[0]["kv_cache_bytes"], replica.init_args[0]["strict"]) == (64 << 20, True)
    with pytest.raises(BadSettings, match="did you mean replicas"):
        serve_app.build_app({"replica": "3"})


def test_ranks_of_a_group_start_and_end_together() -> None:
    app = serve_app.build_app({"model": "demo", "engine": "vllm", "data_parallel_size": 2, "replicas": 2})
    replica = app._bound_deployment.init_args[1]._bound_deployment
    assert (replica.num_replicas, replica._deployment_config.gang_scheduling_config.gang_size) == (4, 2)


def test_serve_build_writes_a_file(tmp_path: Path) -> None:
    command = [Path(sys.executable).parent / "serve", "build", "serve_app:app", "-o", tmp_path / "app.yaml"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [app] = yaml.safe_load((tmp_path / "app.yaml").read_text())["applications"]
    assert app["import_path"] == "serve_app:app"
    assert [deployment["name"] for deployment in app["deployments"]] == ["Replica", "Ingress"]


def test_the_package_has_no_other_names() -> None:
    with pytest.raises(AttributeError):
        serve_app.application  # noqa: B018


def printed_by(script: str, *arguments: str, **options: Any) -> str:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, **options).stdout


@pytest.mark.parametrize(("given", "found"), [(None, serve_app.SPIN_COUNT), ("7", "7")])
def test_openmp_is_told_how_long_to_spin_before_torch_loads_it(given: str | None, found: str) -> None:
    """A worker first imports the replica's module; the operator's own value stays. (docs: decisions)"""
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    if given is not None:
        environment["GOMP_SPINCOUNT"] = given
    script = (
        "import builtins, os, sys\n"
        "load = builtins.__import__\n"
        "def watch(name, *rest, **named):\n"
        "    if name == 'torch': sys.exit(print(os.environ.get('GOMP_SPINCOUNT')))\n"
        "    return load(name, *rest, **named)\n"
        "builtins.__import__ = watch\n"
        "import serve_app.replica.replica, serve_app.replica.pool_size\n"
    )
    assert printed_by(script, env=environment) == f"{found}\n"


def test_a_simulated_replica_loads_neither_torch_nor_transformers(demo_model_path: Path) -> None:
    """Its process answers a request without them, as does a deploy: they cost seconds and hundreds of megabytes."""
    script = (
        "import sys, threading\n"
        "from pathlib import Path\n"
        "import numpy as np\n"
        "import serve_app.app, serve_app.replica.replica\n"
        "from router.protocol.block_hash import PrefixScope\n"
        "from serve_app.checkpoints.sources import load_served_model\n"
        "from serve_app.config.app import AppConfig\n"
        "from serve_app.engine.protocol import EngineRequest, SamplingParams\n"
        "from serve_app.replica.engine_factory import make_engine\n"
        "config = AppConfig(model=sys.argv[1], engine='simulated', host_cache_bytes=1 << 20)\n"
        "engine = make_engine(config, load_served_model(config), lambda events: None)\n"
        "engine.start()\n"
        "scope, ended = PrefixScope('a', '', b''), threading.Event()\n"
        "ids, root = np.arange(64, dtype=np.int32), scope.root(b'k' * 16)\n"
        "ask = EngineRequest('r', token_ids=ids, scope=scope, root=root, sampling=SamplingParams(max_tokens=2))\n"
        "engine.submit(ask, lambda outputs: ended.set() if outputs[-1].finish_reason else None)\n"
        "assert ended.wait(60)\n"
        "engine.stop()\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    assert printed_by(script, str(demo_model_path)) == "[]\n"


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
