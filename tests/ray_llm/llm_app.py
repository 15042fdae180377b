"""`python -m tests.ray_llm.llm_app FILE PORT`: deploys a file's applications on Ray of its own until stdin ends."""

import sys
from pathlib import Path

import ray
import yaml
from ray._common.utils import import_attr


def main() -> None:
    ray.init(address="local", _node_ip_address="127.0.0.1", num_cpus=32, include_dashboard=False)
    from ray import serve

    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[2])})
    for application in yaml.safe_load(Path(sys.argv[1]).read_text())["applications"]:
        build = import_attr(application["import_path"])
        serve.run(build(application["args"]), name=application["name"], route_prefix=application["route_prefix"])
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
