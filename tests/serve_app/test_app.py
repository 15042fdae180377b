"""The application for Ray's own commands: `serve run serve_app:build_app NAME=VALUE`, `serve build serve_app:app`."""

import subprocess
import sys
from pathlib import Path

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
