"""Plain `vllm serve` in vLLM's environment."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.common.server import server_process
from serve_app.cli.local_ray import held_port

# The command `vllm serve`, which alone knows the Rust front door. As it comes, it asks for the version of the package
# "vllm", and fails in the CPU build, which has another name.
_SERVE = """
import vllm.entrypoints.cli.serve as cli
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    cli_env_setup()
    parser = FlexibleArgumentParser()
    (command,) = cli.cmd_init()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    arguments = parser.parse_args()
    command.validate(arguments)
    command.cmd(arguments)
"""
CPU_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


@contextmanager
def vllm_server(
    model: Path, name: str, flags: Sequence[str], env: Mapping[str, str], python: str, ready_within_s: float = 300.0
) -> Iterator[str]:
    """Run a server of the checkpoint ``model`` in the environment of ``python``; yield its URL.

    Raises BenchmarkError if it does not start. Its KV has the size that ``--kv-cache-memory-bytes`` in ``flags`` says:
    without that flag vLLM wants a part of the machine's memory to be free.
    """
    with held_port() as port:
        command = [python, "-c", _SERVE, "serve", str(model), "--host", "127.0.0.1"]
        command += ["--port", str(port), "--served-model-name", name, "--enable-prompt-tokens-details"]
        command += ["--generation-config", "vllm", "--disable-uvicorn-access-log", *flags]
        url = f"http://127.0.0.1:{port}"
        with server_process(command, f"{url}/health", {**env, "HF_HUB_OFFLINE": "1"}, ready_within_s):
            yield url
