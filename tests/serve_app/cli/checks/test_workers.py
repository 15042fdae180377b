"""Settings follow from the servers that already run, each model's from its own; doctor tells what is wrong with one."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from serve_app.cli.checks.finding import Look
from serve_app.cli.checks.workers import settings_by_workers, workers
from serve_app.config.app import AppConfig
from tests.harness.worker_double import doubles


def test_each_of_several_models_follows_from_its_own_workers(tmp_path: Path) -> None:
    file = tmp_path / "workers"
    with doubles(2, block_size=32) as large, doubles(1, model="other") as (small,):
        file.write_text("\n".join(server.entry for server in large))
        settings = AppConfig(
            engine="remote",
            models=[
                {"served_model_name": "large", "workers": [f"file:{file}"]},
                {"model": "other", "workers": [small.entry, large[0].entry]},
                {"model": "demo", "engine": "simulated"},
            ],
        )
        told = settings_by_workers(settings)
        assert [entry.get("replicas") for entry in told["models"]] == [2, 2, None]
        served = AppConfig(engine="remote", **told).served()
        unfit = [finding.sentence for finding in workers(Look("here", settings.served()["other"]))][-1]
        assert unfit == "serves demo, not other: set model, or served_model_name"
    assert {name: (one.model, one.block_size) for name, one in served.items()} == {
        "large": ("demo", 32),
        "other": ("other", 16),
        "demo": ("demo", 16),
    }
    assert served["large"].max_model_len == 4096
    with pytest.raises(ValueError, match=f"no worker can serve: {small.url} does not answer"):
        settings_by_workers(AppConfig(engine="remote", workers=[small.entry]))
    assert settings_by_workers(AppConfig(models=[{"model": "demo"}])) == {}


def test_each_server_that_is_unfit_or_cannot_be_followed_is_told_in_a_sentence_at_the_start(
    demo_model_path: Path, tmp_path: Path
) -> None:
    """The others serve: the settings follow from the first of them."""
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text("ours")
    tokenizer = str(demo_model_path / "tokenizer.json")
    unlike: list[dict[str, Any]] = [
        {"owner": "ollama"},
        {"key": "theirs"},
        {"other_tokenizer": 1},
        {},
        {"block_size": 24},
    ]
    with ExitStack() as stack:
        given = ({"tokenizer": tokenizer, **options} for options in unlike)
        servers = [stack.enter_context(doubles(1, **options))[0] for options in given]
        settings = AppConfig(
            engine="remote", model="demo", workers=[server.entry for server in servers], worker_key_file=key
        )
        settings = settings.model_copy(update=settings_by_workers(settings))
        found = [finding for finding in workers(Look("start", settings)) if finding.state != "ok"]
    assert settings.block_size == 16
    assert [(finding.subject, finding.state, finding.sentence) for finding in found] == [
        (servers[0].url, "problem", "is no vLLM, SGLang or TensorRT-LLM server: its model is owned by 'ollama'"),
        (servers[1].url, "problem", "refuses this API key: set WARMPATH_WORKER_KEY, or worker_key_file"),
        (servers[2].url, "problem", "has another tokenizer than demo"),
        (
            servers[4].url,
            "warning",
            "its blocks have 24 tokens and the routers' 16, so it is routed to by load: set block_size",
        ),
    ]


def test_doctor_tells_a_worker_of_another_model_and_one_whose_events_nobody_sends() -> None:
    with doubles(2) as (first, silent), doubles(1, model="other") as (other,):
        silent.kill()
        silent.start(events=0)
        entries = [first.entry, silent.entry, other.entry]
        found = workers(Look("here", AppConfig(engine="remote", workers=entries)))
        said = [(finding.subject, finding.state, finding.found) for finding in found][1:]
        assert said == [
            (first.url, "ok", "vLLM 0.32.0 serves demo, blocks of 16 tokens"),
            (silent.url, "ok", "vLLM 0.32.0 serves demo, blocks of 16 tokens"),
            (silent.url, "warning", f"nothing listens at tcp://127.0.0.1:{silent.events}, so it is routed to by load"),
            (other.url, "problem", "serves other, not demo: set model, or served_model_name"),
        ]
