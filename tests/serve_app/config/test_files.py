"""Settings from files and NAME=VALUE; paths in a file start where it lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.config.app import AppConfig
from serve_app.config.files import MODELS, PATHS, load_settings, rooted


def test_later_sources_win(tmp_path: Path) -> None:
    """File, then assignments, then flags."""
    file = tmp_path / "settings.yaml"
    file.write_text("model: small\nreplicas: 3\npolicy: round_robin\n")
    settings = load_settings(file, ["replicas=4", "kv_cache_bytes=2097152"], model=None, replicas=5)
    assert (settings.model, settings.replicas, settings.policy) == ("small", 5, "round_robin")
    assert settings.kv_cache_bytes == 2097152


@pytest.mark.parametrize(
    ("assignment", "word"),
    [
        ("replicas", "NAME=VALUE"),
        ("replicas=0", "replicas"),
        ("repplicas=2", "repplicas"),
        ("policy=best", "policy"),
        ("tenants=[{name: a}]", "key_sha256"),
    ],
)
def test_bad_settings_name_the_setting(assignment: str, word: str) -> None:
    """A typo is an error with the setting's name, never a default."""
    with pytest.raises(ValueError, match=word):
        load_settings(None, [assignment])


def test_every_path_of_the_settings_is_known_as_one() -> None:
    """A new one would else start where the command happens to run."""
    assert {"disk_cache_dir", "lora_root", "prompts_dir", "secret_file", "usage_file"} == PATHS
    assert set(AppConfig.model_fields) > MODELS


def test_paths_start_where_the_file_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the command runs; what is given beside the file starts where that is."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    (home / "prompts").mkdir(parents=True)
    elsewhere.mkdir()
    (home / "checkpoints" / "mine").mkdir(parents=True)
    (home / "prompts" / "clerk.txt").write_text("Be brief.")
    file = home / "settings.yaml"
    file.write_text("""
model: checkpoints/mine
speculative_model: ./draft
lora_adapters: {pirate: adapters/pirate, poet: /adapters/poet}
lora_root: adapters
disk_cache_dir: kv
secret_file: secret
public_prompts: [{name: clerk, version: "3", file: prompts/clerk.txt}]
""")
    monkeypatch.chdir(elsewhere)
    settings = load_settings(Path("../home/settings.yaml"), ["secret_file=mine"])
    absolute = load_settings(file, [])
    for found in (settings, absolute):
        assert Path(found.model).resolve() == home / "checkpoints" / "mine"
        assert Path(found.speculative_model or "").resolve() == home / "draft"
        pirate, poet = found.lora_adapters["pirate"].resolve(), found.lora_adapters["poet"]
        assert (pirate, poet) == (home / "adapters" / "pirate", Path("/adapters/poet"))
        assert found.lora_root is not None and found.lora_root.resolve() == home / "adapters"
        assert found.disk_cache_dir is not None and found.disk_cache_dir.resolve() == home / "kv"
        assert found.public_prompts[0].text == "Be brief."
    assert (settings.secret_file, absolute.secret_file) == (Path("mine"), home / "secret")


@pytest.mark.parametrize("model", ["demo", "smollm2", "org/name"])
def test_a_name_of_a_model_is_no_path(model: str, tmp_path: Path) -> None:
    """Even where a directory beside the file is called as a built-in model is."""
    (tmp_path / "demo").mkdir()
    assert rooted({"model": model}, tmp_path) == {"model": model}


@pytest.mark.parametrize(
    ("assignment", "told"),
    [
        ("polcy=lmetric", "polcy: there is no such setting; did you mean policy?"),
        ("kv-pull=false", "kv-pull: there is no such setting; did you mean kv_pull?"),
        ("policy=lmetrik", "least_loaded; did you mean lmetric?"),
        ("kv_pull=treu", "; did you mean true?"),
        ("pin_budget=64MiB", "pin_budget: must be a number (KV that explicit saves may keep: a part of the pool below"),
        ("kv_cache_bytes=1KiB", "kv_cache_bytes: must be at least 1MiB"),
        ("otlp_endpoint=collector:4318", "otlp_endpoint: must be the URL of an OpenTelemetry collector, such as http:"),
        ("downscale_delay_s=1", "downscale_delay_s: there is no such setting"),
        ("autoscaling={max_replicas: 2, downscale_delay_s: 1}", "autoscaling.downscale_delay_s: must be at least 10s"),
        (
            "autoscaling={max_replica: 2}",
            "autoscaling.max_replica: there is no such setting; did you mean max_",
        ),
        ("tenants=[{name: a, key: wp-1}]", "tenants.0.key: keys are not written here, only their SHA-256"),
        ("tenants=3", "tenants: must be a list"),
        ("lora_adapters=[a]", "lora_adapters: must be pairs of NAME: VALUE"),
        ("replicas=two", "replicas: must be a whole number"),
        ("replicas={", "--set replicas: the value is not YAML"),
    ],
)
def test_mistakes_are_told_in_plain_words(assignment: str, told: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_settings(None, [assignment])
    assert told in str(caught.value)
    assert "wp-1" not in str(caught.value)
