"""Settings that may change without a restart overlay args, and unusable ones are reported with a remedy."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.settings import POLICY_NAMES
from serve_app.config.app import AppConfig
from serve_app.config.live import LIVE, BadSettings, app_config, changed_salts, overlaid

KEY, OTHER = "a" * 64, "b" * 64

values = st.fixed_dictionaries(
    {},
    optional={
        "policy": st.sampled_from(POLICY_NAMES),
        "max_queued_requests": st.integers(1, 99),
        "request_timeout_s": st.floats(1, 99),
        "allowed_hosts": st.none() | st.lists(st.sampled_from(["a", "b"])),
        "tenants": st.just([{"name": "acme", "key_sha256": [KEY], "cache_share": 2.0}]),
        "public_prompts": st.just([{"name": "p", "version": "1", "text": "Be brief."}]),
    },
)


@given(values, values)
def test_a_user_config_overrides_args(args: dict[str, Any], live: dict[str, Any]) -> None:
    """Whole values are replaced; the same user_config gives the same settings."""
    assert set(AppConfig.model_fields) >= LIVE
    base = AppConfig.model_validate(args)
    found = overlaid(base, live)
    expected = AppConfig.model_validate(args | live)
    assert found == expected == overlaid(base, live)
    assert overlaid(base, {}) == overlaid(base, None) == base


@pytest.mark.parametrize(
    ("user_config", "told"),
    [
        ({"model": "small"}, "model: changes with a restart only; put it under args:"),
        ({"polcy": "lmetric"}, "polcy: there is no such setting; did you mean policy?"),
        ({"sparkle": 1}, "sparkle: there is no such setting; leave it out"),
        ({"request_timeout_s": 0}, "request_timeout_s: must be above 0"),
        ({"tenants": [{"name": "a", "key_sha256": ["wp-secret"]}]}, "64 hex digits; make both with `warmpath keys`"),
        ({"operator_key_sha256": ["wp-secret"]}, "64 hex digits; make both with `warmpath keys`"),
        ({"tenants": [{"name": "a", "key_sha256": [KEY]}] * 2}, "two tenants have the same name; give each its own"),
        ({"operator_key_sha256": [KEY, KEY]}, "the same API key is given twice"),
        ({"autoscaling": {"max_replicas": 3}}, "autoscaling: is switched on or off with a restart only"),
        (["policy"], "a user_config is pairs of NAME: VALUE"),
    ],
)
def test_unusable_settings_are_reported_with_a_remedy(user_config: Any, told: str) -> None:
    """The sentence names the setting, and never quotes a value given in place of a digest."""
    with pytest.raises(BadSettings) as caught:
        overlaid(AppConfig(), user_config)
    assert told in str(caught.value)
    assert "wp-secret" not in str(caught.value)
    with pytest.raises(BadSettings) as caught:
        app_config({"polcy": "x", "replicas": 0})
    assert {where for where, _ in caught.value.found} == {("polcy",), ("replicas",)}, "mistakes are reported together"


def test_autoscaling_follows_other_targets_and_stays_on() -> None:
    """Its values may change while it is on; switching it off would need another policy in Serve's controller."""
    base = AppConfig.model_validate({"autoscaling": {"min_replicas": 3, "max_replicas": 4}})
    found = overlaid(base, {"autoscaling": {"max_replicas": 8, "target_ttft_s": 1.0}}).autoscaling
    assert found is not None and (found.min_replicas, found.max_replicas, found.target_ttft_s) == (3, 8, 1.0)
    assert overlaid(base, {"autoscaling": {"target_ttft_s": 1.0}}).autoscaling == found.model_copy(
        update={"max_replicas": 4}
    )
    with pytest.raises(BadSettings, match="restart only"):
        overlaid(base, {"autoscaling": None})


@pytest.mark.parametrize("none", [[], None])
def test_tenants_of_args_cannot_be_taken_away(none: object) -> None:
    """A replica that starts without earlier settings refuses this too, as it would admit everybody. (docs: cluster)"""
    base = AppConfig.model_validate({"tenants": [{"name": "acme", "key_sha256": [KEY]}]})
    with pytest.raises(BadSettings, match="every client has access"):
        overlaid(base, {"tenants": none})
    assert overlaid(AppConfig(), {"tenants": []}) == AppConfig()


def test_tenants_in_another_trust_group_have_another_salt() -> None:
    """Joining, leaving and changing a group are reported; new tenants and other keys are not."""

    def config(**groups: str | None) -> AppConfig:
        keys = (character * 64 for character in "abcdef")
        tenants = [{"name": n, "key_sha256": [next(keys)], "trust_group": group} for n, group in groups.items()]
        return AppConfig.model_validate({"tenants": tenants})

    before = config(joins=None, leaves="g", moves="g", stays="g", goes="g")
    after = config(joins="g", leaves=None, moves="h", stays="g", comes="g")
    assert changed_salts(before, after) == ["joins", "leaves", "moves"]
