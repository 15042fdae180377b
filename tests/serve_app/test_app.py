"""The application for Ray's own commands, and the environment of its processes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import serve_app
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
        "from serve_app.checkpoints.sources.resolve import load_served_model\n"
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
