"""`warmpath infer`: Edge-LLM's files, as its documentation writes them, answered in this process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from serve_app.batch.input_file import read_batch_file
from serve_app.cli.main import app
from tests.serve_app.engine.adapters import save_adapter

SAVES = """{
    "requests": [
        {
            "messages": [
                {"role": "system", "content": "You are a helpful Python programming assistant."},
                {"role": "user", "content": "How do I read a CSV file?"}
            ],
            "save_system_prompt_kv_cache": true
        }
    ]
}"""
REUSES = """{
    "requests": [
        {
            "messages": [
                {"role": "system", "content": "You are a helpful Python programming assistant."},
                {"role": "user", "content": "How do I write JSON?"}
            ]
        }
    ]
}"""
LORA = """{
    "available_lora_weights": {
        "french": "/path/to/french_adapter.safetensors"
    },
    "requests": [
        {
            "messages": [
                {"role": "system", "content": "Translate the following to French."},
                {"role": "user", "content": "Hello"}
            ],
            "lora_name": "french",
            "save_system_prompt_kv_cache": true
        }
    ]
}"""
"""The three examples of Edge-LLM's page on its system prompt cache."""


class Runner:
    """Runs files over the tiny model, blocks of 4 tokens: the examples' prompts are short."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model = model
        self.folder = folder

    def run(self, text: str, *more: str) -> tuple[Result, list[dict[str, Any]], dict[str, Any]]:
        """Return what the command said, the responses, and the profile; empty where there is none."""
        names = ("in.json", "out.json", "profile.json")
        given, out, profile = (self.folder / name for name in names)
        given.write_text(text)
        for made in (out, profile):
            made.unlink(missing_ok=True)
        files = ["--input-file", str(given), "--output-file", str(out), "--profile-output-file", str(profile)]
        settings = ["--model", str(self.model), "--set", "block_size=4", "--set", "dtype=float32"]
        result = CliRunner().invoke(app, ["infer", *files, *settings, *more])
        if not out.exists():
            return result, [], {}
        answer = json.loads(out.read_text())
        assert answer["input_file"] == str(given)
        return result, answer["responses"], json.loads(profile.read_text())


@pytest.fixture
def runner(tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setenv("WARMPATH_SECRET", "0123456789abcdef")
    return Runner(tiny_model_path, tmp_path)


def joined(*texts: str, **fields: Any) -> str:
    """Return one file with the requests of several."""
    return json.dumps({"requests": [one for text in texts for one in json.loads(text)["requests"]], **fields})


def test_the_documented_defaults_hold(tmp_path: Path) -> None:
    """What a file leaves out is what Edge-LLM takes."""
    path = tmp_path / "in.json"
    path.write_text(SAVES)
    file = read_batch_file(path)
    request = file.request(0, "m")
    assert (file.batch_size, request.temperature, request.top_p, request.top_k) == (1, 1.0, 0.8, 50)
    assert request.apply_chat_template and request.add_generation_prompt and request.save_system_prompt_kv_cache
    assert request.chat_template_kwargs == {"enable_thinking": False} and not request.disable_spec_decode
    path.write_text(joined(SAVES).replace('"save_system', '"stop": "x", "disable_spec_decode": true, "save_system'))
    request = read_batch_file(path).request(0, "m")
    assert request.stop == ("x",) and request.disable_spec_decode


def test_a_saved_prompt_is_reused_and_changes_no_answer(runner: Runner) -> None:
    """By every later request; the answers are those of a run without any cache. (docs/batch.md)"""
    text = joined(SAVES, REUSES, SAVES, max_generate_length=12)
    result, responses, profile = runner.run(text, "--debug")
    assert result.exit_code == 0, result.output
    saved, reused, again = (one["reused_tokens"] for one in profile["requests"])
    assert saved == 0 < reused < again  # the third is the first one whole
    prefill = profile["prefill"]
    assert prefill["total_runs"] == 3 and prefill["reused_tokens"] == saved + reused + again
    assert prefill["computed_tokens"] == sum(one["computed_tokens"] for one in profile["requests"])
    said = " ".join(result.output.split())
    assert "system prompt is saved" in said and "was saved already" in said and f"{reused} of" in said
    first = responses[0]
    assert first["request_idx"] == first["batch_idx"] == 0 and first["finish_reason"] in ("stop", "length")
    assert first["messages"][1] == {"role": "user", "content": [{"type": "text", "text": "How do I read a CSV file?"}]}
    assert first["formatted_complete_request"].startswith(first["formatted_system_prompt"])
    assert "Python programming" in first["formatted_system_prompt"]

    plain, uncached, none = runner.run(text, "--set", "enable_prefix_caching=false")
    assert plain.exit_code == 0 and none["prefill"]["reused_tokens"] == 0
    assert "prefix caching is switched off" in " ".join(plain.output.split())
    assert uncached == responses


def test_one_that_fails_is_named_and_the_others_are_answered(runner: Runner) -> None:
    """Each error names its request and its field; the run leaves with 1. (docs/batch.md)"""
    image = {"role": "user", "content": [{"type": "image", "image": "cat.png"}]}
    bad = [{"messages": [image]}, {"messages": [{"role": "user", "content": "a"}], "lora_name": "none"}, {}, 7]
    good = json.loads(REUSES)["requests"]
    text = json.dumps({"requests": [*bad, *good], "batch_size": 2, "max_generate_length": 4, "verbose": 1})
    result, responses, profile = runner.run(text)
    assert result.exit_code == 1 and "nothing reads verbose" in result.output
    reasons = [one["finish_reason"] for one in responses]
    assert reasons[:4] == ["error"] * 4 and reasons[4] in ("stop", "length")
    assert [one["batch_idx"] for one in responses] == [0, 1, 0, 1, 0]
    wanted = ("requests[0]: messages[0].content", "requests[1]: lora_name", "requests[2]: messages", "requests[3]: ")
    for response, words in zip(responses, wanted, strict=False):
        assert response["output_text"].startswith(words)
    assert [one["request_idx"] for one in profile["requests"]] == [4]


def test_lora_weights_are_a_file_and_share_no_kv(runner: Runner, tmp_path: Path) -> None:
    """The documentation's third example: a safetensors file; the base model's saved prompt is not the adapter's."""
    made = save_adapter(runner.model, tmp_path / "peft", seed=1)
    weights = tmp_path / "adapters" / "french_adapter.safetensors"
    weights.parent.mkdir()
    shutil.copy(made / "adapter_model.safetensors", weights)
    shutil.copy(made / "adapter_config.json", weights.parent)
    base = [{**json.loads(LORA)["requests"][0], "lora_name": None}]
    file = json.loads(LORA)
    file["available_lora_weights"]["french"] = "adapters/french_adapter.safetensors"
    alone = json.dumps({**file, "requests": base + file["requests"], "max_generate_length": 8, "top_k": 1})
    result, responses, profile = runner.run(alone)
    assert result.exit_code == 0, result.output
    first, adapters = profile["requests"]
    assert first["reused_tokens"] == adapters["reused_tokens"] == 0
    assert responses[0]["output_text"] != responses[1]["output_text"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", "must be a JSON object"),
        ("{", "not valid JSON"),
        ("{}", "requests"),
        ('{"requests": [{}], "batch_size": 0}', "batch_size: batch_size must be a whole number"),
        (LORA, "french"),
    ],
)
def test_a_file_that_cannot_be_run_is_refused_whole(runner: Runner, text: str, said: str) -> None:
    """Nothing is written, and the status is 2."""
    result, responses, _ = runner.run(text)
    assert result.exit_code == 2 and said in result.output and not responses
