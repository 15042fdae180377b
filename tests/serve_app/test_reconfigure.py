"""A replica accepts other settings while it runs: a bad user_config changes nothing, raises nothing, and is noted."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.experimental import internal_kv

from serve_app import reconfigure
from serve_app.config.app import AppConfig
from serve_app.config.live import BadSettings
from serve_app.notices import KEPT, clear, post, read, read_shown, remove
from serve_app.reconfigure import KIND, LiveSettings

ACME = {"name": "acme", "key_sha256": ["a" * 64]}


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dictionary in place of Ray's GCS, with its calls."""
    values: dict[bytes, bytes] = {}

    def put(key: bytes, value: bytes, overwrite: bool, namespace: bytes) -> None:
        assert overwrite and namespace
        values[key] = value

    monkeypatch.setattr(internal_kv, "_internal_kv_put", put)
    monkeypatch.setattr(internal_kv, "_internal_kv_get", lambda key, namespace: values.get(key))
    monkeypatch.setattr(internal_kv, "_internal_kv_del", lambda key, namespace: values.pop(key, None))
    monkeypatch.setattr(
        internal_kv, "_internal_kv_list", lambda start, namespace: [key for key in values if key.startswith(start)]
    )


def board() -> dict[str, dict[str, Any]]:
    """Return the notices of replicas about their settings."""
    return {notice["name"]: notice for notice in read("app", KIND)}


def take_store_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: Any, **__: Any) -> None:
        raise ConnectionError

    for name in ("put", "list"):
        monkeypatch.setattr(internal_kv, f"_internal_kv_{name}", away)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the settings of a replica that Serve starts with a user_config."""

    def started(user_config: Any = None, deployment: str = "Ingress", **args: Any) -> LiveSettings:
        context = SimpleNamespace(
            app_name="app",
            deployment=deployment,
            replica_id=SimpleNamespace(unique_id="r1"),
            _deployment_config=SimpleNamespace(user_config=user_config),
        )
        monkeypatch.setattr(reconfigure.serve, "get_replica_context", lambda: context)
        return asyncio.run(LiveSettings.start(args))

    return started


class Applied(list[AppConfig]):
    """Remembers the applied settings."""

    async def __call__(self, config: AppConfig) -> None:
        self.append(config)


def test_a_replica_starts_with_the_user_config_or_not_at_all(start: Any) -> None:
    """Requests never see values of args that the user_config replaces; a bad one ends the start."""
    assert start({"policy": "lmetric"}, policy="sglang").config.policy == "lmetric"
    with pytest.raises(BadSettings, match="did you mean policy"):
        start({"polcy": "lmetric"})


def test_a_replica_of_one_of_several_models_takes_its_part_and_has_a_board_of_its_own(start: Any) -> None:
    """All deployments get the same user_config; what is wrong for one model is no other's notice."""
    changes = {"aliases": {"x": "two"}, "models": [{"served_model_name": "two", "policy": "sglang"}], "strict": True}
    one, two = (
        start(changes, f"Replica-{name}", model="demo", served_model_name=name, policy="lmetric")
        for name in ("one", "two")
    )
    assert [(each.config.policy, each.config.strict) for each in (one, two)] == [("lmetric", True), ("sglang", True)]
    assert not asyncio.run(two.reconfigure({"polcy": "sglang"}, Applied()))
    assert [notice["name"] for notice in read_shown("app#Replica-two")["configuration"]] == ["Replica-two r1"]
    assert read_shown("app#Replica-one")["configuration"] == [] and not board()
    asyncio.run(start({}).reconfigure({"polcy": "sglang"}, Applied()))
    assert [notice["name"] for notice in read_shown("app#Replica-one")["configuration"]] == ["Ingress r1"]


@pytest.mark.parametrize(
    ("engine", "tenants", "accepted", "words"),
    [
        ("vllm", [{**ACME, "cache_share": 2}], True, ""),
        ("torch", [{**ACME, "cache_share": 2}], True, ""),
        ("torch", [], False, "every client has access"),
        ("torch", [{**ACME, "trust_group": "g"}], True, "acme"),
    ],
    ids=["share", "share of the other engine", "none", "salt"],
)
def test_tenants_change_as_far_as_that_is_safe(
    start: Any, engine: str, tenants: list[Any], accepted: bool, words: str
) -> None:
    """An instance open to everybody is refused; another salt is noted.

    docs: cluster
    """
    settings, applied = start({"tenants": [ACME]}, engine=engine), Applied()
    assert asyncio.run(settings.reconfigure({"tenants": tenants}, applied)) is accepted
    assert len(applied) == accepted and settings.config.tenants
    notice = board().get("Ingress r1")
    assert (notice is None) == (words == "")
    assert notice is None or (notice["accepted"] is accepted and words in notice["why"])


def test_a_starting_replica_removes_outdated_notices(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that one replica accepts are valid for all; a dead replica cannot remove its own notice."""
    post("app", KIND, "Ingress gone", {"name": "Ingress gone"})
    with pytest.raises(BadSettings):
        start({"polcy": "lmetric"})
    assert board()
    start()
    assert not board()
    take_store_away(monkeypatch)
    assert start().config == AppConfig()


def test_a_good_one_is_applied_once_and_a_bad_one_never(start: Any) -> None:
    """After a bad one the old settings apply and the notice has the reason, until a good one arrives.

    docs: cluster
    """
    live, applied = start(), Applied()

    async def run() -> None:
        assert await live.reconfigure({}, applied)
        assert await live.reconfigure({"policy": "lmetric"}, applied)
        assert await live.reconfigure({"policy": "lmetric"}, applied)
        assert [config.policy for config in applied] == ["lmetric"]
        for bad in ({"policy": "best"}, {"model": "small"}, ["x"], {"tenants": 3}):
            assert not await live.reconfigure(bad, applied)
        assert live.config.policy == "lmetric" and len(applied) == 1 and live.refused == 4
        notice = board()["Ingress r1"]
        assert notice["accepted"] is False and "tenants" in notice["why"] == live.why
        assert await live.reconfigure({"policy": "lmetric"}, applied)
        assert board() == {} and len(applied) == 1 and live.why == ""
        assert await live.reconfigure({}, applied)
        assert live.config.policy == AppConfig().policy and len(applied) == 2

    asyncio.run(run())


def test_no_failure_raises(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a fault in applying the settings nor a missing notice board ends a replica."""
    live = start()

    async def fail(config: AppConfig) -> None:
        raise RuntimeError("secret details")

    async def run() -> None:
        assert not await live.reconfigure({"policy": "lmetric"}, fail)
        assert "secret" not in board()["Ingress r1"]["why"]
        take_store_away(monkeypatch)
        assert not await live.reconfigure({"policy": "best"}, fail)
        assert live.config == AppConfig()

    asyncio.run(run())


def test_the_newest_comes_first_and_a_name_has_one() -> None:
    for name, figure in (("a", 1), ("b", 2), ("a", 3)):
        post("app", "handover", name, {"figure": figure})
    assert [notice["figure"] for notice in read("app", "handover")] == [3, 2]


def test_the_oldest_go() -> None:
    for number in range(KEPT + 5):
        post("app", "handover", str(number), {"number": number})
    assert [notice["number"] for notice in read("app", "handover")] == list(range(KEPT + 4, 4, -1))


def test_applications_and_kinds_do_not_see_each_other() -> None:
    post("app", "handover", "x", {})
    assert read("app2", "handover") == read("app", "prewarm") == read("ap", "handover") == []


def test_a_notice_is_taken_down_alone_or_with_its_kind() -> None:
    for name in "abc":
        post("app", "configuration", name, {"name": name})
    post("app", "handover", "a", {})
    remove("app", "configuration", "b")
    remove("app", "configuration", "unknown")
    assert {notice["name"] for notice in read("app", "configuration")} == {"a", "c"}
    clear("app", "configuration")
    assert read("app", "configuration") == [] and len(read("app", "handover")) == 1
