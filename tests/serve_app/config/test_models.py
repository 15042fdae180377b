"""Settings of several models: what an entry has from outside, names that clash, and live changes of one."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve._private.build_app import build_app as built
from ray.serve._private.config import DeploymentConfig

from serve_app.app import build_app
from serve_app.checkpoints.checkpoint import CheckpointError
from serve_app.checkpoints.demo_model import ensure_demo_model
from serve_app.checkpoints.sources import with_local_model, with_local_models
from serve_app.config.app import AppConfig, slug
from serve_app.config.live import BadSettings, app_config, of_model, overlaid

TWO: dict[str, Any] = {
    "model": "demo",
    "engine": "simulated",
    "replicas": 3,
    "models": [
        {"served_model_name": "one"},
        {"served_model_name": "two", "engine": "torch", "autoscaling": {"max_replicas": 4}},
    ],
}
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "engine": st.sampled_from(["torch", "simulated", "vllm"]),
    "block_size": st.sampled_from([16, 32]),
    "max_num_seqs": st.integers(1, 64),
    "policy": st.sampled_from(["round_robin", "lmetric"]),
    "pin_budget": st.sampled_from([0.0, 0.5]),
}


@given(st.fixed_dictionaries({}, optional=VALUES), st.fixed_dictionaries({}, optional=VALUES))
def test_an_entry_is_as_if_it_stood_alone_with_what_is_outside(outside: dict[str, Any], entry: dict[str, Any]) -> None:
    """Defaults are those of the entry's engine, not of the outer one; and so after the way to another process."""
    joined = {"model": "demo", **outside, **entry}
    try:
        alone, whole = app_config(joined), app_config({"model": "demo", **outside, "models": [entry]})
    except BadSettings:
        return
    assert whole.served() == {"demo": alone}
    assert app_config(whole.to_json()).served() == {"demo": alone}


def test_an_entry_says_all_about_its_number_of_replicas_and_its_weights() -> None:
    served = app_config(TWO).served()
    assert [(one.replicas, one.first_replicas, one.most_replicas) for one in served.values()] == [(3, 3, 3), (2, 1, 4)]
    fixed = app_config({**TWO, "replicas": 2, "autoscaling": {"max_replicas": 9}, "models": [{"replicas": 1}]})
    assert fixed.served()["demo"].most_replicas == 1
    hub = {"model": "a/b", "revision": "main", "models": [{}, {"model": "c/d"}]}
    assert [one.revision for one in app_config(hub).served().values()] == ["main", None]


def test_models_that_share_a_disk_have_directories_of_their_own() -> None:
    disk = {"disk_cache_bytes": 1 << 20, "disk_cache_dir": "/cache"}
    own = {"served_model_name": "a/b", "disk_cache_dir": "/mine"}
    same = [{"served_model_name": name, "disk_cache_dir": "/same"} for name in ("..", "x")]
    served = app_config({**TWO, **disk, "models": [*TWO["models"], own, *same]}).served()
    folders = ["/cache/one", "/cache/two", "/mine", f"/same/{slug('..')}", "/same/x"]
    assert [str(one.disk_cache_dir) for one in served.values()] == folders


@given(st.lists(st.text(max_size=4), min_size=2, max_size=2, unique=True))
def test_names_of_models_share_no_deployment_or_the_settings_are_refused(names: list[str]) -> None:
    """No name leads out of the directory of another one."""
    one, two = map(slug, names)
    assert one not in (".", "..") and "/" not in one
    alike = {name.replace("/", "-").replace(" ", "-") for name in names}
    assert one != two or len(alike) == 1


@pytest.mark.parametrize(
    ("changed", "place", "words"),
    [
        ({"models": [{"tenants": []}]}, "models.0.tenants", "put it outside of models"),
        ({"models": [{"engin": "torch"}]}, "models.0.engin", "did you mean engine?"),
        ({"models": [{}, {"max_num_seqs": 0}]}, "models.1.max_num_seqs", "must be at least 1"),
        ({"models": [{}, {}]}, "models.1.model", "given twice"),
        ({"models": [{"lora_adapters": {"a": "/a"}}, {"served_model_name": "a"}]}, "models.1.model", "given twice"),
        ({"models": [{"model": "a/b"}, {"model": "a-b"}]}, "models.1.model", "'a-b' and 'a/b' would both be deployed"),
        ({"models": [{"fallback": "demo"}]}, "models.0.fallback", "another of the models"),
        ({"prompts_dir": "/p"}, "prompts_dir", "give each entry"),
        ({"fallback": "one"}, "fallback", "belongs into an entry"),
        ({"served_model_name": "x"}, "served_model_name", "belongs into an entry"),
        ({"aliases": {"one": "two"}}, "aliases.one", "own name"),
        ({"aliases": {"x": "three"}}, "aliases.x", "must be the name of a model or adapter: one, two"),
        ({"aliases": {"x": "y", "y": "one"}}, "aliases.x", "must be the name"),
        ({"models": [3]}, "models.0", "pairs of NAME: VALUE"),
    ],
)
def test_a_mistake_has_its_place(changed: dict[str, Any], place: str, words: str) -> None:
    with pytest.raises(BadSettings) as error:
        app_config({**TWO, **changed})
    assert (place, True) in [(".".join(map(str, where)), words in why) for where, why in error.value.found]


def test_live_changes_of_an_entry_are_its_own_and_others_are_refused() -> None:
    args = app_config(TWO)
    changes = {
        "policy": "lmetric",
        "aliases": {"x": "one"},
        "models": [{"served_model_name": "two", "policy": "round_robin", "autoscaling": {"max_replicas": 8}}],
    }
    live = overlaid(args, changes)
    served = live.served()
    assert live.aliases == {"x": "one"}
    assert [one.policy for one in served.values()] == ["lmetric", "round_robin"]
    assert served["two"].most_replicas == 8
    for name, one in args.served().items():  # a replica has its part of the same user_config
        alone = overlaid(one.model_copy(update={"aliases": {}}), of_model(changes, name))
        assert (alone.policy, alone.autoscaling) == (served[name].policy, served[name].autoscaling)
    for wrong, words in (
        ([{"served_model_name": "three"}], "one of the models: one, two"),
        ([{"served_model_name": "two", "max_num_seqs": 1}], "with a restart only"),
        ("two", "one of the models"),
    ):
        with pytest.raises(BadSettings, match=words):
            overlaid(args, {"models": wrong})


def deployments(args: dict[str, Any]) -> dict[str, DeploymentConfig]:
    """Return the deployments as Serve's controller gets them, once it has set its version for all."""
    found = {}
    for one in built(build_app(args), name="app", default_runtime_env={}).deployments:
        one._deployment_config.version = str(args)
        found[one.name] = DeploymentConfig.from_proto_bytes(one._deployment_config.to_proto_bytes())
    return found


def test_a_deploy_restarts_the_replicas_of_changed_models_alone() -> None:
    """Those of a model have a version of their own; the ingress, and an application of one model, have Serve's."""
    more = {**TWO, "aliases": {"x": "one"}, "models": [{**TWO["models"][0], "max_num_seqs": 8}, *TWO["models"][1:], {}]}
    before, after = deployments(TWO), deployments(more)
    assert before.keys() == {"Replica-one", "Replica-two", "Ingress"}
    assert after.keys() - before.keys() == {"Replica-demo"}
    same = {name for name in before if before[name].version == after[name].version}
    assert same == {"Replica-two"}
    assert after["Replica-one"].max_ongoing_requests < before["Replica-one"].max_ongoing_requests
    alone = {name: value for name, value in TWO.items() if name != "models"}
    assert deployments(alone)["Replica"].version == str(alone)


def test_what_takes_one_model_refuses_several_and_each_of_several_becomes_a_local_path(tmp_path: Path) -> None:
    settings = app_config({**TWO, "models": [{}, {"served_model_name": "two", "fallback": "demo"}]})
    with pytest.raises(CheckpointError, match="leave them out"):
        with_local_model(settings, pytest.fail)
    (tmp_path / "mine").symlink_to(ensure_demo_model("demo"))
    mine = app_config({**TWO, "models": [{"model": str(tmp_path / "mine"), "max_num_seqs": 8}, {}]})
    local = with_local_models(mine, pytest.fail)
    assert Path(local.models[0].pop("model")).samefile(tmp_path / "mine")
    assert local.models == [{"max_num_seqs": 8, "served_model_name": "mine", "revision": None}, {"model": "demo"}]


def test_one_model_is_as_before() -> None:
    config = AppConfig(model="demo", replicas=1)
    assert config.served() == {"demo": config}
    assert config.to_json() == config.model_dump(mode="json")
