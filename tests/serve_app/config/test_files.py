"""Settings from files and NAME=VALUE; paths in a file are relative to its folder."""

from pathlib import Path

import pytest

from serve_app.config.files import PATHS, load_settings, rooted


def test_every_path_of_the_settings_is_known_as_one() -> None:
    """An unknown new path would be relative to the command's working directory."""
    assert {"disk_cache_dir", "lora_root", "prompts_dir", "responses_file", "secret_file", "usage_file"} == PATHS


def test_paths_start_where_the_file_lies_and_later_sources_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File, then assignments, then flags; paths outside the file are relative to the working directory."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for directory in (elsewhere, home / "checkpoints" / "mine", home / "demo"):
        directory.mkdir(parents=True)
    (home / "settings.yaml").write_text("""
model: checkpoints/mine
replicas: 3
max_loras: 3
lora_adapters: {pirate: adapters/pirate, poet: /adapters/poet}
disk_cache_dir: kv
secret_file: secret
chat_template: template.jinja
""")
    (home / "template.jinja").write_text("{{ messages }}")
    monkeypatch.chdir(elsewhere)
    settings = load_settings(
        Path("../home/settings.yaml"), ["secret_file=mine", "replicas=4", "max_loras=5"], max_loras=6, model=None
    )
    assert (settings.replicas, settings.max_loras, settings.secret_file) == (4, 6, Path("mine"))
    assert Path(settings.model).resolve() == home / "checkpoints" / "mine"
    assert settings.chat_template == "{{ messages }}"
    assert settings.lora_adapters["pirate"].resolve() == home / "adapters" / "pirate"
    assert settings.lora_adapters["poet"] == Path("/adapters/poet")
    assert settings.disk_cache_dir is not None and settings.disk_cache_dir.resolve() == home / "kv"
    for name in ("demo", "smollm2", "org/name"):
        assert rooted({"model": name}, home) == {"model": name}, "a model's name is no path"


@pytest.mark.parametrize(
    ("assignment", "told"),
    [
        ("replicas", "NAME=VALUE"),
        ("replicas=0", "replicas: must be at least 1"),
        ("tenants=[{name: a}]", "tenants.0.key_sha256: is missing"),
        ("polcy=lmetric", "polcy: there is no such setting; did you mean policy?"),
        ("tenants=[{name: a, rps: 5}]", "tenants.0.rps: there is no such setting; did you mean requests_per_second?"),
        ("kv-pull=false", "kv-pull: there is no such setting; did you mean kv_pull?"),
        ("policy=lmetrik", "least_loaded; did you mean lmetric?"),
        ("kv_pull=treu", "; did you mean true?"),
        ("pin_budget=64MiB", "pin_budget: must be a number (KV that explicit saves may keep: below 1 a fraction"),
        ("kv_cache_bytes=1KiB", "kv_cache_bytes: must be at least 1MiB"),
        ("otlp_endpoint=collector:4318", "otlp_endpoint: must be the URL of an OpenTelemetry collector, such as http:"),
        ("autoscaling={max_replicas: 2, downscale_delay_s: 1}", "autoscaling.downscale_delay_s: must be at least 10s"),
        ("autoscaling={max_replica: 2}", "autoscaling.max_replica: there is no such setting; did you mean max_"),
        ("tenants=[{name: a, key: wp-1}]", "tenants.0.key: only SHA-256 sums of keys are written here"),
        ("tenants=3", "tenants: must be a list"),
        ("lora_adapters=[a]", "lora_adapters: must be pairs of NAME: VALUE"),
        ("chat_template=nowhere.jinja", "chat_template: must be a Jinja template or a file with one; 'nowhere.jinja'"),
        ("replicas=two", "replicas: must be a whole number"),
        ("speculative_model=small", "speculative_model='small' with engine=torch: only 'ngram' is supported"),
        ("replicas={", "--set replicas: the value is not YAML"),
    ],
)
def test_mistakes_are_told_in_plain_words(assignment: str, told: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_settings(None, [assignment])
    assert told in str(caught.value)
    assert "wp-1" not in str(caught.value)
