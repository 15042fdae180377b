"""Settings: files, NAME=VALUE, quantities, what may change live, each engine's own, and the page of reference."""

import math
import re
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from typer.testing import CliRunner

from router.protocol.block_hash import PrefixScope
from router.settings import DEFAULTS, POLICY_NAMES
from serve_app.cache.prefix.hot_prefixes import HashedTokens
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.cli import main
from serve_app.config import engine
from serve_app.config.app import AppConfig
from serve_app.config.files import PATHS, load_settings, rooted
from serve_app.config.live import LIVE, BadSettings, app_config, changed_salts, overlaid
from serve_app.config.quantities import Bytes, Seconds, duration_text, size_text
from serve_app.config.reference import (
    ENTRIES,
    EXAMPLES,
    LEFT_OUT,
    SECTIONS,
    settings_page,
    settings_text,
    settings_yaml,
)
from serve_app.engine.protocol import AdapterError, AdapterSpec, Engine, EngineMaker
from serve_app.replica.engine_factory import make_engine, maker_of, refused_settings


def test_every_path_of_the_settings_is_known_as_one() -> None:
    """An unknown new path would be relative to the command's working directory."""
    files = {"responses_file", "secret_file", "usage_file", "worker_key_file"}
    assert {"disk_cache_dir", "lora_root", "prompts_dir", *files} == PATHS


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
        ("policy=lmetrik", f"{POLICY_NAMES[-1]}; did you mean lmetric?"),
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


def test_blocks_are_those_that_vllm_has_on_a_cpu() -> None:
    """The routers' blocks are the same, and a replica reads the settings as they were sent."""
    config = AppConfig(engine="vllm")
    assert config.block_size == 32
    assert AppConfig.model_validate(config.to_json()) == config
    assert AppConfig(engine="vllm", replica_num_gpus=1).block_size == DEFAULTS.block_size
    assert AppConfig(engine="vllm", block_size=64).block_size == 64
    assert AppConfig().block_size == DEFAULTS.block_size


def test_where_vllm_is_not_installed_serve_gives_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve reports it before it starts Ray, and names both remedies."""
    monkeypatch.setattr(engine, "vllm_missing", lambda: True)
    told = CliRunner().invoke(main.app, ["serve", "--engine", "vllm"])
    assert told.exit_code == 2
    assert "pip install '.[vllm]'" in told.output
    assert "make venv-vllm" in " ".join(told.output.split())


def test_an_engine_is_named_in_its_table_alone() -> None:
    """A new engine needs a row there, and a folder; nothing else depends on the engine. (CONTRIBUTING.md)"""
    assert tuple(engine.ENGINES) == get_args(engine.EngineName)
    for name in engine.ENGINES:
        assert isinstance(maker_of(AppConfig.model_validate({"model": "demo", "engine": name})), EngineMaker)
    root = Path(__file__).parents[3]
    compared = re.compile(
        r"""engine(\.kind)?"?\]? *(==|!=|in|not in) *[("'\[{]|["'](torch|vllm|simulated)["'] *(==|!=)"""
    )
    files = [file for room in ("router", "serve_app", "cluster", "benchmarks") for file in (root / room).rglob("*.py")]
    assert files
    found = {
        f"{file.relative_to(root)}: {line.strip()}"
        for file in files
        for line in file.read_text().splitlines()
        if compared.search(line)
    }
    assert found == set()


LACKING = {"prefixes": {"enable_prefix_caching": True}, "copies": {"prewarm": True}, "saves": {"save_ttl_s": 60}}


@pytest.mark.parametrize("capability", engine.CAPABILITIES)
def test_settings_of_a_capability_that_an_engine_lacks_are_off_and_refused(
    capability: engine.Capability, monkeypatch: pytest.MonkeyPatch, demo_model_path: Path
) -> None:
    """By `warmpath check`, and by each replica."""
    traits = engine.ENGINES["simulated"]
    can = traits.can - {capability}
    monkeypatch.setitem(engine.ENGINES, "simulated", engine.EngineTraits(traits.maker, can, simulated=True))
    given = {"model": str(demo_model_path), "engine": "simulated", "num_blocks": 32}
    config = AppConfig.model_validate(given)
    assert config.lacking() == AppConfig.model_validate(config.to_json()).lacking() == []
    needing = engine.CAPABILITIES[capability]
    assert {name: getattr(config, name) for name in needing.off} == needing.off
    for name, value in LACKING.get(capability, {}).items():
        wanted = AppConfig.model_validate({**given, name: value})
        assert wanted.lacking() == refused_settings(wanted, on_cpu=True) != []
        assert wanted.lacking()[0].startswith(f"{name}: engine=simulated has no {needing.what}")
        with pytest.raises(ValueError, match=f"{name}: engine=simulated has no"):
            make_engine(wanted, load_checkpoint_info(demo_model_path), lambda _: None)


def test_a_required_capability_is_one_that_the_engine_has() -> None:
    """An unknown name is refused with the known ones."""
    with pytest.raises(ValueError, match="required_capabilities"):
        AppConfig.model_validate({"required_capabilities": ["turn"]})
    config = AppConfig.model_validate({"engine": "torch", "required_capabilities": ["turns", "ranks"]})
    assert config.lacking() == ["required_capabilities: engine=torch has no ranks; leave it out"]


def test_what_an_engine_does_not_override_refuses() -> None:
    plain = Engine.__dict__
    transfer, adapters = plain["transfer"].fget(None), plain["adapters"].fget(None)
    scope = PrefixScope("m")
    prefix = HashedTokens(scope, np.zeros(4, np.int32), b"")
    assert transfer.export_prefix(prefix) is None
    assert transfer.cache_room().blocks_for(math.inf) == 0
    assert (transfer.hot_prefixes().runs, adapters.loaded, adapters.unload("a@1")) == ((), (), False)
    with pytest.raises(AdapterError):
        adapters.load(AdapterSpec("a", "1", "/a"))


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
        ({"port": 8000}, "port: there is no such setting; it is an option of `warmpath serve`, --port; a Serve config"),
        ({"verbose": True}, "verbose: there is no such setting; it is an option of `warmpath serve`, --verbose"),
        (
            {"tenants": [{"name": "a", "key_sha256": [KEY], "budget": {"eur": 5}}]},
            "tenants.0.budget.eur: there is no such setting; there are tokens, money, period, hard",
        ),
        ({"prices": {"demo": {"input": "1 EUR", "output": 2}}}, "prices.demo.input: must be a number"),
        ({"request_timeout_s": 0}, "request_timeout_s: must be above 0"),
        ({"tenants": [{"name": "a", "key_sha256": ["wp-secret"]}]}, "64 hex digits; make both with `warmpath keys`"),
        ({"operator_key_sha256": ["wp-secret"]}, "64 hex digits; make both with `warmpath keys`"),
        (
            {"tenants": [{"name": "a", "key_sha256": [KEY]}] * 2},
            "tenants.1.name: tenants.0 has this name, too; give each tenant its own",
        ),
        (
            {"tenants": [{"name": name, "key_sha256": ["b" * 64, KEY]} for name in "ac"]},
            "tenants.1.key_sha256: a key is given twice, first in tenants.0; tenants and operators need keys",
        ),
        (
            {"tenants": [{"name": "a", "key_sha256": [KEY]}], "operator_key_sha256": ["b" * 64, KEY]},
            "operator_key_sha256: a key is given twice, first in tenants.0",
        ),
        ({"operator_key_sha256": [KEY, KEY]}, "operator_key_sha256: a key is given twice"),
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


UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "G": 10**9, "KiB": 2**10, "Mi": 2**20, "GiB": 2**30, "TiB": 2**40}
SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


class Both(BaseModel):
    size_bytes: Bytes = 0
    time_s: Seconds = 0.0


@given(st.decimals(0, 10**6, places=2), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]))
def test_a_size_is_its_number_times_its_unit(number: Decimal, unit: str, between: str) -> None:
    """It is in whole bytes; MB is a million, MiB 1024 * 1024, in upper or lower case."""
    number = number if unit else Decimal(int(number))
    for text in (f"{number}{between}{unit}", f"{number}{between}{unit}".lower()):
        assert Both(size_bytes=text).size_bytes == int(number * UNITS[unit])  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(0, 999), st.sampled_from(sorted(SECONDS))), min_size=1, max_size=4))
def test_a_duration_is_the_sum_of_its_parts(parts: list[tuple[int, str]]) -> None:
    expected = sum(number * SECONDS[unit] for number, unit in parts)
    for between in ("", " "):
        text = between.join(f"{number}{unit}" for number, unit in parts)
        assert Both(time_s=text).time_s == pytest.approx(expected)  # type: ignore[arg-type]


@given(st.integers(0, 2**50), st.integers(0, 10**6))
def test_displayed_quantities_can_be_parsed(size: int, seconds: int) -> None:
    assert Both(size_bytes=size_text(size)).size_bytes == size  # type: ignore[arg-type]
    assert Both(time_s=duration_text(seconds)).time_s == seconds  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "said", "texts"),
    [
        ("kv_cache_bytes", "size such as 64MiB", ["", "MiB", "1XB", "-1MiB", "1..5MiB", "1 2MiB", "9" * 40 + "MiBMiB"]),
        ("save_ttl_s", "duration such as 500ms", ["", "m", "5 parsecs", "-5m", "1h30", "5mm"]),
    ],
)
def test_other_text_is_refused(name: str, said: str, texts: list[str]) -> None:
    for text in texts:
        with pytest.raises(BadSettings, match=f"{name}: must be a number of .*, or a {said}"):
            app_config({name: text})


@pytest.mark.parametrize("model", [AppConfig, *ENTRIES.values()])
def test_every_setting_in_bytes_or_seconds_takes_a_unit(model: type[BaseModel]) -> None:
    """The name's suffix gives the unit, so no new setting with a unit is forgotten."""

    def told(name: str) -> str:
        with pytest.raises(ValueError) as caught:
            model.model_validate({name: "x"})
        return str(caught.value)

    durations = {name for name in model.model_fields if name.endswith("_s") and not name.endswith("_per_s")}
    sizes = {name for name in model.model_fields if name.endswith("_bytes")}
    assert {name for name in durations if "a duration such as" not in told(name)} == set()
    assert {name for name in sizes if "a size such as" not in told(name)} == set()


FILE = Path(__file__).parents[3] / "docs" / "reference" / "settings.yaml"
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "settings.md"


def test_page_and_settings_file_are_current() -> None:
    """To write them again, see ``serve_app/config/reference.py``. A row of each kind is checked."""
    page = settings_page()
    assert PAGE.read_text() == page
    assert FILE.read_text() == settings_yaml()
    for row in (
        "| `block_size` | integer, 1 to 1024 | 16 | tokens in a KV block; vLLM on a CPU: 32 |",
        "| `max_body_bytes` | bytes, at least 1KiB | 8MiB | larger bodies",
        "| `save_ttl_s` | seconds, above 0 | none | ",
        "| `enable_prefix_caching` | boolean | true | ",
        "| `engine` | `torch` or `vllm` or `simulated` or `remote` | `torch` | ",
        "## An entry of `tenants`",
    ):
        assert row in page


def test_the_settings_file_holds_every_setting_with_its_default() -> None:
    """An unchanged copy changes no setting; the model is only a comment, because it would have to exist."""
    assert set(yaml.safe_load(FILE.read_text())) == set(AppConfig.model_fields) - LEFT_OUT
    assert load_settings(FILE, []) == AppConfig()
    assert f"# model: {AppConfig().model}\n" in FILE.read_text()


def test_the_examples_in_the_settings_file_can_be_used() -> None:
    """Each differs from the default, and all of them work together."""
    text = FILE.read_text()
    examples = "\n".join(f"{name}: {example}" for name, example in EXAMPLES.items())
    assert all(f"#   {line}".rstrip() in text for line in examples.splitlines())
    found = AppConfig.model_validate(yaml.safe_load(examples)).to_json()
    assert {name for name in EXAMPLES if found[name] == AppConfig().to_json()[name]} == set()


def test_the_list_for_a_terminal_is_searched_by_words() -> None:
    assert "  max_pulls: integer, 1 to 64; default 4\n      prefixes" in settings_text(["PULL", "once"])
    assert settings_text().count("\n  ") // 2 >= len(AppConfig.model_fields)
    assert "pin_budget" in settings_text(["pin"]) and "graceful_shutdown_timeout_s" not in settings_text(["pin"])
    assert settings_text(["no-such-word"]).startswith("no setting has")


def test_no_setting_is_in_two_sections() -> None:
    """Otherwise the order of base classes would choose one of the two definitions."""
    names = [name for section in SECTIONS.values() for name in section.model_fields]
    assert len(names) == len(set(names))
    assert not set(names) & set(AppConfig.__annotations__)


def test_importing_the_settings_loads_no_model_library_and_no_other_package() -> None:
    """A mistyped command line gets its error at once, and every package may import the settings."""
    script = "import sys, serve_app; old = {*sys.modules}; import serve_app.config.app; print(*{*sys.modules} - old)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"torch", "transformers", "ray", "numpy"}
    ours = {name for name in loaded if name.partition(".")[0] in ("router", "serve_app")}
    assert {name for name in ours if not name.startswith("serve_app.config")} <= {"router", "router.settings"}
