"""`warmpath check` finds mistakes with their lines, and accepts every file that we ship."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from serve_app.cli.checks.file import mistakes_in
from serve_app.cli.main import app
from serve_app.config import engine
from serve_app.config.files import load_settings

ROOT = Path(__file__).parents[4]
SHIPPED = sorted(path for path in (ROOT / "cluster").glob("*.yaml"))

CONFIG = """\
applications:
  - name: warmpath
    import_path: serve_app:build_app
    args:
      model: demo
      replicas: 2
    deployments:
      - name: Ingress
        user_config: &live
          policy: lmetric
          tenants:
            - name: acme
              key_sha256: [{digest}]
      - name: Replica
        user_config: *live
""".replace("{digest}", "a" * 64)


LIVE = "applications.0.deployments.0.user_config"


@pytest.mark.parametrize("text", [*(path.read_text() for path in SHIPPED), CONFIG, "model: demo\nreplicas: 3\n"])
def test_a_good_file_has_no_mistakes(text: str) -> None:
    """The shipped files are ready to be deployed, except for the keys that each user makes."""
    assert SHIPPED
    assert mistakes_in(text) == []


@pytest.mark.parametrize(
    ("old", "new", "line", "place", "words"),
    [
        ("replicas: 2", "replcas: 2", 6, "applications.0.args.replcas", "did you mean replicas?"),
        ("replicas: 2", "replicas: 0", 6, "applications.0.args.replicas", "must be at least 1"),
        ("policy: lmetric", "polcy: lmetric", 10, f"{LIVE}.polcy", "mean policy?"),
        ("policy: lmetric", "model: x", 10, f"{LIVE}.model", "put it under args:"),
        ("a" * 64, "wp-key", 13, f"{LIVE}.tenants.0.key_sha256.0.sha256", "64 hex digits"),
        ("name: Replica", "name: Replicas", 14, "applications.0.deployments.1.name", "there are Ingress and Replica"),
        ("*live", "{}", 15, "applications.0.deployments.1.user_config", "need the same user_config"),
        ("build_app", "make_app", 1, "applications", "no application has the import_path"),
        ("name: warmpath", "name: warmpath\n    route_prefix: two", 3, "applications.0.route_prefix", "such as /two"),
        ("name: warmpath", "name: warmpath\n    route_prefix: /two/", 3, "applications.0.route_prefix", "such as /two"),
        ("lmetric", "lmetric\n          prices: {gpt: {input: 1, output: 2}}", 11, f"{LIVE}.prices.gpt", "it is demo"),
        ("    import_path", "    import_paht", 2, "applications.0.import_path", "Field required"),
    ],
)
def test_a_mistake_has_its_line_place_and_remedy(old: str, new: str, line: int, place: str, words: str) -> None:
    assert old in CONFIG
    mistakes = mistakes_in(CONFIG.replace(old, new))
    assert [
        mistake for mistake in mistakes if (mistake.line, mistake.subject) == (line, place) and words in mistake.found
    ]
    assert not any("wp-key" in mistake.found for mistake in mistakes)


PLANTED: dict[str, tuple[str, str]] = {
    "replcas": ("2", "did you mean replicas?"),
    "port": ("8000", "--port"),
    "max_num_seqs": ("0", "at least 1"),
    "policy": ("lmetic", "must be one of"),
    "prices": ("{gpt: {input: 1, output: 2}}", "never counts"),
    "aliases": ("{x: nobody}", "must be the name of a model"),
    "usage_file": ("/nowhere/at/all", "may write"),
    "tool_parser": ("nonsense", "must be one of"),
    "tenants": ("[{name: acme, key_sha256: [x]}]", "64 hex digits"),
    "lora_adapters": ("3", "must be pairs"),
    "otlp_endpoint": ("nowhere", "must be the URL"),
}
"""A setting, a wrong value, and what is said of it, whatever the others are."""


@given(st.permutations(sorted(PLANTED)), st.integers(1, len(PLANTED)), st.booleans())
@settings(max_examples=25)
def test_all_mistakes_are_told_in_one_round(names: list[str], count: int, in_a_deployment: bool) -> None:
    """As many as one by one, each at its own line, of a settings file or of the args of an application."""
    written = [f"{name}: {PLANTED[name][0]}" for name in names[:count]]
    if in_a_deployment:
        indented = "".join(f"      {line}\n" for line in written)
        text = CONFIG.replace("      replicas: 2\n", indented).replace("policy: lmetric", "polcy: lmetric")
        told = ["polcy", *(line.partition(":")[0] for line in written)]
    else:
        text, told = "model: demo\n" + "\n".join(written), [line.partition(":")[0] for line in written]
    lines = text.splitlines()
    found = mistakes_in(text, ROOT, place_of_run="here")
    assert sorted(lines[one.line - 1].strip().partition(":")[0] for one in found) == sorted(told)
    for one in found:
        name = lines[one.line - 1].strip().partition(":")[0]
        assert (PLANTED[name][1] if name in PLANTED else "did you mean policy?") in one.sentence


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("engine: vlm\nengine_args: {enforce_eager: true}\n", "engine"),
        ("enigne: vllm\nengine_args: {enforce_eager: true}\n", "enigne"),
        ("autoscaling: {min_replicas: x}\nreplicas: 2\n", "autoscaling.min_replicas"),
        ("models: [{model: demo, served_model_name: [x]}]\naliases: {a: b}\n", "models.0.served_model_name"),
    ],
)
def test_what_follows_from_a_mistake_is_none(text: str, first: str) -> None:
    """Without vLLM its arguments would be wrong, but who wrote `vlm` means it."""
    assert first in {one.subject for one in mistakes_in(text)}
    assert not [one for one in mistakes_in(text) if one.subject in ("engine_args", "replicas")]


def test_an_application_with_a_mistake_of_serves_does_not_hide_those_of_the_settings() -> None:
    text = CONFIG.replace("    import_path", "    import_paht").replace("replicas: 2", "replcas: 2")
    assert {2, 6} <= {one.line for one in mistakes_in(text)}


NAMES = st.sampled_from(["args", "name", "user_config", "deployments", "policy", "tenants", "public_prompts", "x", 7])
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text("ab", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


@given(
    st.sampled_from(["whole", "applications", "application", "args", "deployments", "user_config", "text"]), anything
)
def test_any_file_is_answered(where: str, value: object) -> None:
    """The answer is a list of mistakes, each with a line of the file, and never a fault of the checker's own."""
    config = yaml.safe_load(CONFIG)
    app = config["applications"][0]
    if where == "application":
        config["applications"] = [value]
    elif where == "applications":
        config["applications"] = value
    elif where == "user_config":
        app["deployments"] = [{"name": name, "user_config": value} for name in ("Ingress", "Replica")]
    else:
        app[where] = value
    whole = value if where == "whole" else config
    service = {"kind": "RayService", "spec": {"serveConfigV2": value if where == "text" else yaml.safe_dump(whole)}}
    for document, style in ((whole, None), (service, None), (service, "|")):
        text = yaml.safe_dump(document, default_style=style)
        mistakes = mistakes_in(text)
        assert [mistake.line for mistake in mistakes] == sorted(mistake.line for mistake in mistakes)
        for mistake in mistakes:
            assert 1 <= mistake.line <= len(text.splitlines()) + 1
            assert mistake.found


@pytest.mark.parametrize(
    ("text", "line", "sentence"),
    [
        ("model: demo\n\treplicas: 2\n", 2, "this is not YAML: a tab; indent with spaces"),
        ("model: [a,\nreplicas: {2\n", 3, "this is not YAML: "),
        ("kind: RayService\nspec:\n  serveConfigV2: |\n    a: {\n    b: ]\n", 5, "this is not YAML: "),
        ("kind: RayService\nspec:\n  serveConfigV2: 'a: ['\n", 3, "this is not YAML: "),
        ("a: \x00", 1, "this is not YAML: "),
    ],
)
def test_what_is_not_yaml_is_told_with_its_line(text: str, line: int, sentence: str, tmp_path: Path) -> None:
    (mistake,) = mistakes_in(text)
    assert (mistake.line, mistake.state) == (line, "problem")
    assert mistake.found.startswith(sentence)
    if "RayService" not in text:
        (file := tmp_path / "settings.yaml").write_text(text)
        with pytest.raises(ValueError, match=f"settings.yaml:{line}: this is not YAML"):
            load_settings(file, [])


def test_lines_of_a_ray_service_are_those_of_the_file() -> None:
    """The Serve config is a text in the RayService."""
    inner = "".join(f"    {line}\n" for line in CONFIG.replace("policy:", "polcy:").splitlines())
    text = f"kind: RayService\nspec:\n  serveConfigV2: |\n{inner}  rayClusterConfig: {{}}\n"
    lines = {text.splitlines()[mistake.line - 1].strip() for mistake in mistakes_in(text)}
    assert lines == {"polcy: lmetric"}
    assert mistakes_in("kind: RayService\nspec:\n  serveConfigV2: ''\n")[0].line == 3
    [missing] = mistakes_in("kind: RayService\nspec:\n  rayClusterConfig: {}\n")
    assert (missing.line, missing.subject) == (2, "spec.serveConfigV2")


def run(file: Path, text: str, *flags: str) -> tuple[int, str]:
    file.write_text(text)
    result = CliRunner().invoke(app, ["check", str(file), *flags])
    return result.exit_code, result.output


def test_the_command_says_where_and_leaves_with_a_status(tmp_path: Path) -> None:
    """0: good; 1: mistakes, a line each; 2: nothing to read."""
    file = tmp_path / "config.yaml"
    assert run(file, CONFIG) == (0, f"{file}: nothing is wrong\n")
    status, output = run(file, CONFIG.replace("replicas: 2", "replcas: 2"))
    assert status == 1
    assert f"{file}:6: applications.0.args.replcas: there is no such setting; did you mean replicas?" in output
    assert run(file, "a: [")[0] == 1
    assert CliRunner().invoke(app, ["check", str(tmp_path / "nothing.yaml")]).exit_code == 2


def test_paths_of_a_settings_file_start_where_it_lies(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    assert "prompts_dir: there is no directory" in run(file, "prompts_dir: prompts\n")[1]
    (tmp_path / "prompts").mkdir()
    assert run(file, "prompts_dir: prompts\n")[0] == 0
    assert "secret_file: there is no secret file" in run(file, "secret_file: secret\n")[1]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("model: /no/such/model", "1: model: there is no model '/no/such/model'"),
        ("lora_adapters: {style: /no/adapter}", "1: lora_adapters: the adapter 'style' of the settings, /no/adapter: "),
        ("secret_file: /no/secret", "1: secret_file: there is no secret file /no/secret"),
        ("secret_file: short", "1: secret_file: the secret in"),
        ("replicas: 4\nengine: vllm", "2: engine: engine=vllm needs vLLM"),
        ("autoscaling: {max_replicas: 3}\nreplicas: 4", "2: replicas: replicas has no effect beside autoscaling"),
    ],
)
def test_missing_files_are_reported(lines: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They count here, but not if only other machines have them; other mistakes count in both cases."""
    monkeypatch.setattr(engine, "vllm_missing", lambda: True)
    (tmp_path / "short").write_text("x")
    (tmp_path / "short").chmod(0o600)
    status, output = run(tmp_path / "settings.yaml", lines)
    assert status == 1
    assert words in output
    seen = "autoscaling" in lines or "short" in lines
    assert run(tmp_path / "settings.yaml", lines, "--elsewhere")[0] == seen


def test_a_machines_own_file_is_checked_with_the_places_that_it_writes(tmp_path: Path) -> None:
    """Elsewhere they cannot be looked at, and a built-in model's name may be another machine's directory."""
    text = f"model: smollm3\nusage_file: {tmp_path}/none/u.sqlite\nresponses_file: {tmp_path}/none/r.sqlite\n"
    found = [(mistake.line, mistake.sentence) for mistake in mistakes_in(text, tmp_path, place_of_run="here")]
    assert [line for line, _ in found] == [1, 2, 3]
    assert "did you mean smollm2?" in found[0][1]
    assert all("is no file that this user may write" in sentence for _, sentence in found[1:])
    assert mistakes_in(text, tmp_path) == []


def test_a_budget_that_is_a_number_is_told_what_a_budget_is() -> None:
    text = f'model: demo\ntenants:\n  - name: a\n    budget: 100\n    key_sha256: ["{"a" * 64}"]\n'
    [mistake] = mistakes_in(text)
    assert mistake.line == 4
    assert "{tokens: 5000000, period: day}" in mistake.sentence and "tokens_per_minute" in mistake.sentence


@pytest.mark.parametrize(
    ("lines", "line", "words"),
    [
        (
            "prices: {gpt-4.1: {input: 1, output: 2}}",
            4,
            "the price of gpt-4.1 never counts: no model or adapter has this name; it is demo or sim",
        ),
        ("prices: {gpt-4o: {input: 1, output: 2}}", 4, "is an alias; give the price of demo"),
        (
            f"tenants: [{{name: a, key_sha256: ['{'a' * 64}'], models: [gpt-4o, gpt-5]}}]",
            4,
            "tenants.0.models: the tenant a is given gpt-5: no",
        ),
    ],
)
def test_a_name_that_nothing_served_has_is_told(lines: str, line: int, words: str, tmp_path: Path) -> None:
    """A wrong name makes tokens free, or refuses a tenant its model. With runtime adapters it may be one of theirs."""
    models = (
        "models: [{model: demo, allow_runtime_lora: false}, {model: demo, served_model_name: sim, engine: simulated}]"
    )
    text = f"{models}\nreplicas: 1\naliases: {{gpt-4o: demo}}\n{lines}\n"
    status, output = run(tmp_path / "settings.yaml", text)
    assert status == 1 and f"settings.yaml:{line}: " in output and words in output
    later = text.replace("allow_runtime_lora: false", "allow_runtime_lora: true")
    assert ("alias;" in run(tmp_path / "settings.yaml", later)[1]) == ("alias;" in words)
