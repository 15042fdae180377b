"""`warmpath infer`: OpenAI's batch files, answered in this process."""

import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

from serve_app.batch.batch_file import read_lines
from serve_app.cli.main import app
from tests.serve_app.engine.adapters import save_adapter

SECRET = {"WARMPATH_SECRET": "0123456789abcdef"}
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
SYSTEM = {"role": "system", "content": "You are a helpful Python programming assistant."}


class Runner:
    """Runs files over the tiny model with blocks of 4 tokens, because the prompts are short."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model = model
        self.folder = folder

    def run(self, *lines: str, flags: str = "") -> tuple[Result, dict[str, dict[str, Any]]]:
        """Return the command's result and the responses by custom_id; no responses if there is no file."""
        given, out = self.folder / "in.jsonl", self.folder / "out.jsonl"
        given.write_text("\n".join(lines))
        out.unlink(missing_ok=True)
        files = ["--input-file", str(given), "--output-file", str(out)]
        settings = ["--model", str(self.model), "--set", "block_size=4", "--set", "dtype=float32"]
        result = CliRunner(env=SECRET).invoke(app, ["infer", *files, *settings, *shlex.split(flags)])
        found = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        assert all(line.keys() == {"id", "custom_id", "response", "error"} for line in found)
        return result, {line["custom_id"]: line["response"] for line in found}


@pytest.fixture
def runner(tiny_model_path: Path, tmp_path: Path) -> Runner:
    return Runner(tiny_model_path, tmp_path)


def line(custom_id: str, url: str = CHAT, **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def chat(custom_id: str, question: str, **body: Any) -> str:
    return line(custom_id, messages=[SYSTEM, {"role": "user", "content": question}], **{"max_tokens": 8, **body})


def cached(response: dict[str, Any]) -> int:
    tokens: int = response["body"]["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def text_of(choice: dict[str, Any]) -> str:
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


def said(result: Result) -> str:
    return " ".join(result.output.split())


def test_requests_are_answered_as_the_server_would_and_again_the_same(runner: Runner) -> None:
    """Chats and completions in one file, with a save, a grammar, choices and logprobs; the cache changes no answer."""
    lines = (
        chat("saves", "How do I read a CSV file?", save_system_prompt_kv_cache=True),
        "",
        chat("choices", "How do I write JSON?", n=2, logprobs=True),
        chat("grammar", "Yes or no?", structured_outputs={"choice": ["yes", "no"]}, seed=None),
        line("completion", COMPLETION, prompt=["one two three", [1, 2, 3]], max_tokens=4),
    )
    result, responses = runner.run(*lines)
    assert result.exit_code == 0, result.output
    assert "4 of 4 requests answered" in said(result)
    assert {response["status_code"] for response in responses.values()} == {200}
    first = responses["saves"]["body"]
    assert (first["object"], first["model"]) == ("chat.completion", "tiny-llama")
    assert cached(responses["saves"]) == 0, "a save is pinned once its request has computed it"
    two, three = responses["choices"]["body"]["choices"], responses["completion"]["body"]["choices"]
    assert [choice["index"] for choice in two] == [0, 1]
    assert len({choice["message"]["content"] for choice in two}) == 2
    assert all(choice["logprobs"]["content"] for choice in two)
    assert responses["grammar"]["body"]["choices"][0]["message"]["content"] in ("yes", "no")
    assert [choice["index"] for choice in three] == [0, 1]

    plain, uncached = runner.run(*lines, flags="--set enable_prefix_caching=false")
    assert plain.exit_code == 0
    assert "saves: save_system_prompt_kv_cache: not saved, because prefix caching is switched off" in said(plain)
    assert set(map(cached, uncached.values())) == {0}
    for name, response in responses.items():
        assert list(map(text_of, uncached[name]["body"]["choices"])) == list(map(text_of, response["body"]["choices"]))


def test_messages_are_drawn_again_the_same(runner: Runner) -> None:
    """Their API has no seed, and is told of none."""
    messages = [{"role": "user", "content": "How do I read a CSV file?"}]
    runs = [runner.run(line("m", "/v1/messages", messages=messages, max_tokens=8)) for _ in range(2)]
    assert not any("ignored" in said(result) for result, _ in runs)
    assert len({json.dumps(responses["m"]["body"]["content"]) for _, responses in runs}) == 1


def test_one_that_fails_is_named_and_the_others_are_answered(runner: Runner) -> None:
    """Each request has its status and the API's error; the run exits with 1."""
    image = {"role": "user", "content": [{"type": "image", "image": "cat.png"}]}
    result, responses = runner.run(
        line("image", messages=[image]),
        chat("adapter", "a", lora_name="none"),
        chat("long", "a", max_tokens=10**6),
        line("no prompt", COMPLETION),
        chat("good", "a", verbose=1),
        flags="--set max_num_seqs=1",
    )
    assert result.exit_code == 1
    assert "1 of 5 requests answered" in said(result)
    assert "good: unknown fields ignored: verbose" in said(result)
    assert "failed: no prompt: prompt is missing" in said(result)
    errors = {name: response["body"].get("error", {}).get("param") for name, response in responses.items()}
    params = ["messages[0].content", "lora_name", "max_tokens", "prompt", None]
    assert errors == dict(zip(("image", "adapter", "long", "no prompt", "good"), params, strict=True))
    assert [name for name, response in responses.items() if response["status_code"] == 200] == ["good"]


def test_adapters_are_the_settings_and_share_no_kv(runner: Runner, tmp_path: Path) -> None:
    """The base model's saved prompt is not the adapter's."""
    path = save_adapter(runner.model, tmp_path / "peft", seed=1)
    lines = (
        chat(name, "Hello", temperature=0, save_system_prompt_kv_cache=True, lora_name=lora)
        for name, lora in (("base", None), ("adapter", "french"), ("base again", None), ("adapter again", "french"))
    )
    result, responses = runner.run(*lines, flags=f"--set max_num_seqs=1 --set lora_adapters={{french:\\ {path}}}")
    assert result.exit_code == 0, result.output
    assert cached(responses["base"]) == cached(responses["adapter"]) == 0
    assert cached(responses["base again"]) == cached(responses["adapter again"]) > 0
    assert responses["base"]["body"]["choices"] != responses["adapter"]["body"]["choices"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "It holds no request"),
        (chat("a", "x") + "\n[1]", "line 2: The body must be a JSON object"),
        ("{", "line 1: The body is not valid JSON"),
        ('{"requests": []}', "requests must be a list of at least one request"),
        (line("", CHAT), "line 1: custom_id must be a string that is not empty"),
        (line("a", "/v1/embeddings"), "line 1: url must be one of /v1/chat/completions, /v1/completions"),
        (line("a").replace("POST", "GET"), 'line 1: method must be "POST"'),
        (f"{chat('a', 'x')}\n{chat('b', 'x')}\n{chat('a', 'y')}", "lines 1 and 3 have the same custom_id"),
    ],
)
def test_a_file_that_cannot_be_run_is_refused_whole(runner: Runner, text: str, sentence: str) -> None:
    """Nothing is written, and the status is 2."""
    result, responses = runner.run(text)
    assert result.exit_code == 2
    assert sentence in said(result)
    assert not responses


def test_a_byte_order_mark_is_no_part_of_the_first_request(tmp_path: Path) -> None:
    """Editors on Windows write one."""
    file = tmp_path / "in.jsonl"
    file.write_text(chat("a", "Hi") + "\n" + chat("b", "Ho"), encoding="utf-8-sig")
    assert [request.custom_id for request in read_lines(file.read_bytes())] == ["a", "b"]


def test_prompts_are_scored_as_transformers_does(runner: Runner) -> None:
    """Echo with logprobs, as evaluation programs ask, and vLLM's prompt_logprobs; cached blocks change nothing.

    The number of tokens is the prompt's and max_tokens, also where the answer ends at once: such programs count on it.
    """
    words = [list(range(300, 340)), list(range(300, 320)) + list(range(700, 712))]
    end = json.loads((runner.model / "config.json").read_text())["eos_token_id"]
    scored = {"prompt": words, "echo": True, "logprobs": 2, "temperature": 0}
    lines = (
        line("warms", COMPLETION, prompt=words, max_tokens=2),
        line("nothing", COMPLETION, **scored, max_tokens=0),
        line("one", COMPLETION, **scored, max_tokens=1),
        line("end", COMPLETION, **scored, max_tokens=1, logit_bias={str(end): 100}),
        line("listed", COMPLETION, prompt=words, max_tokens=0, prompt_logprobs=1, logprobs=0),
        line("text", COMPLETION, prompt="one two three", max_tokens=3, echo=True, logprobs=0),
        chat("chat", "one two three", prompt_logprobs=1),
        line("reference", COMPLETION, prompt="a", prompt_ref="a@1", echo=True, logprobs=0),
    )
    result, responses = runner.run(*lines, flags="--set max_num_seqs=1")
    assert responses["reference"]["body"]["error"]["param"] == "echo"
    assert "7 of 8 requests answered" in said(result), result.output
    assert set(map(cached, (responses[name] for name in responses.keys() - {"warms", "reference"}))) == {0}
    model = AutoModelForCausalLM.from_pretrained(runner.model, dtype=torch.float32)
    for at, ids in enumerate(words):
        with torch.inference_mode():
            plain = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1], dim=-1)
        expected = plain[range(len(ids) - 1), ids[1:]].tolist()
        best = plain.max(dim=-1)
        for name, more in (("nothing", 0), ("one", 1), ("end", 1)):
            choice = responses[name]["body"]["choices"][at]
            told = choice["logprobs"]
            lengths = {len(told[field]) for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
            assert lengths == {len(ids) + more}, name
            assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
            assert told["token_logprobs"][1 : len(ids)] == pytest.approx(expected, abs=1e-3)
            tops = [max(top.values()) for top in told["top_logprobs"][1 : len(ids)]]
            assert tops == pytest.approx(best.values.tolist(), abs=1e-3)
            assert choice["text"].startswith("".join(told["tokens"][: len(ids)]))
        listed = responses["listed"]["body"]["choices"][at]
        assert (listed["text"], listed["finish_reason"], listed["logprobs"]["tokens"]) == ("", "length", [])
        first, *rest = listed["prompt_logprobs"]
        assert first is None
        assert [place[str(token)]["logprob"] for place, token in zip(rest, ids[1:], strict=True)] == pytest.approx(
            expected, abs=1e-3
        )
        for place, token, likeliest in zip(rest, ids[1:], best.indices.tolist(), strict=True):
            assert place.keys() == {str(token), str(likeliest)}
            assert place[str(likeliest)]["rank"] == 1
    counts = {name: responses[name]["body"]["usage"]["completion_tokens"] for name in ("nothing", "one", "end")}
    assert counts == {"nothing": 0, "one": 2, "end": 2}
    assert [choice["finish_reason"] for choice in responses["end"]["body"]["choices"]] == ["stop"] * 2
    assert {choice["finish_reason"] for choice in responses["nothing"]["body"]["choices"]} == {"length"}
    text = responses["text"]["body"]["choices"][0]
    starts = [*text["logprobs"]["text_offset"], len(text["text"])]
    assert [text["text"][a:b] for a, b in itertools.pairwise(starts)] == text["logprobs"]["tokens"]
    body = responses["chat"]["body"]
    assert body["prompt_logprobs"][0] is None
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]


class Edge:
    """Runs files of TensorRT Edge-LLM's form, as one command."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def run(self, *files: Any, flags: str = "") -> tuple[str, list[dict[str, Any]], int]:
        """Return what the command says, the responses of all files, and its status."""
        folder, names = self.runner.folder, []
        for number, given in enumerate(files):
            names.append(folder / f"edge{number}.json")
            names[-1].write_text(given if isinstance(given, str) else json.dumps(given), encoding="utf-8-sig")
        where = [] if "--url" in flags else ["--model", str(self.runner.model), "--set", "block_size=4"]
        result = CliRunner(env=SECRET).invoke(app, ["infer", *map(str, names), *where, *shlex.split(flags)])
        outputs = [name.with_name(f"{name.stem}.responses.json") for name in names]
        found = [json.loads(output.read_text()) for output in outputs if output.exists()]
        assert all(output["input_file"] == str(name) for output, name in zip(found, names, strict=False))
        return said(result), [one for output in found for one in output["responses"]], result.exit_code


def asked(question: str, system: str = str(SYSTEM["content"]), **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"messages": messages, **fields}


def test_the_three_examples_of_tensorrt_edge_llm_run_as_printed(runner: Runner) -> None:
    """A save, its reuse without a flag by the next file, and an adapter with an entry of its own. docs: batch"""
    adapter = save_adapter(runner.model, runner.folder / "french", seed=1) / "adapter_model.safetensors"
    profile = runner.folder / "profile.json"
    files = (
        {"requests": [asked("How do I read a CSV file?", save_system_prompt_kv_cache=True)]},
        {"requests": [asked("How do I write JSON?")]},
        {
            "available_lora_weights": {"french": str(adapter)},
            "requests": [asked("Hello", lora_name="french", save_system_prompt_kv_cache=True)],
        },
    )
    told, responses, status = Edge(runner).run(*files, flags=f"--debug --profile {profile} --set default_max_tokens=16")
    assert status == 0, told
    assert "0: miss, 0 prompt tokens reused" in told and "its system prompt was saved; never_seen" in told
    assert ".json 0: hit, " in told, "with the file's name"
    assert "0 (adapter french): miss, 0 prompt tokens reused" in told and "saved; adapter: Each LoRA adapter" in told
    assert [one["request_idx"] for one in responses] == [0, 0, 0]
    assert {one["finish_reason"] for one in responses} <= {"stop", "length"}
    for one, file in zip(responses, files, strict=True):
        assert one["messages"] == file["requests"][0]["messages"]  # type: ignore[index]
        assert str(SYSTEM["content"]) in one["formatted_system_prompt"]
        assert one["formatted_complete_request"].startswith(one["formatted_system_prompt"])
    figures = json.loads(profile.read_text())
    one, two, three = figures["requests"]
    assert (one["reused_tokens"], three["reused_tokens"]) == (0, 0) and two["reused_tokens"] > 0
    assert figures["prefill"]["reused_tokens"] == two["reused_tokens"]
    assert figures["prefill"]["computed_tokens"] == sum(each["computed_tokens"] for each in figures["requests"])
    assert figures["prefill"]["total_runs"] == figures["generation"]["total_runs"] == 3
    assert all(each["prefill_ms"] > 0 and each["generation_ms"] > 0 for each in figures["requests"])
    assert figures["generation"]["generated_tokens"] > 0 and figures["prefill"]["tokens_per_second"] > 0


def test_edge_llms_fields_have_their_effect(runner: Runner) -> None:
    """Sampling, lengths, templates and sizes of the file; what nothing reads is told; what fails is named."""
    file = {
        "batch_size": 2, "temperature": 0.0, "top_k": 1, "top_p": 1.0, "max_generate_length": 3,
        "apply_chat_template": False, "input_dir": "x",
        "requests": [asked("a", stop="zzz"), asked("b", lora_name="", top_logits=1), {"messages": []}, asked("c")],
    }  # fmt: skip
    told, responses, status = Edge(runner).run(file)
    assert status == 1
    assert "unknown fields ignored: input_dir, requests[].top_logits" in told
    assert "failed: 2: messages must be a list of at least one message." in told
    assert [(one["request_idx"], one["batch_idx"]) for one in responses] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert [one["finish_reason"] for one in responses] == ["length", "length", "error", "length"]
    assert responses[0]["formatted_complete_request"] == str(SYSTEM["content"]) + "a"
    again = Edge(runner).run(file)[1]
    assert again == responses
    long = Edge(runner).run({"max_generate_length": 10**6, "requests": [asked("a")]})
    assert "max_generate_length" in long[1][0]["output_text"] and "max_tokens" not in long[0]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"requests": [1]}', "requests[0] must be an object with messages"),
        ('{"requests": [{"messages": []}], "batch_size": 0}', "batch_size must be a whole number from 1"),
        ('{"requests": [{"messages": [], "lora_name": "x"}]}', "lora_name 'x' is not in available_lora_weights"),
        ('{"requests": [{"messages": []}], "available_lora_weights": {"x": "/none"}}', "no adapter_model.safetensors"),
    ],
)
def test_a_file_of_edge_llm_that_cannot_be_run_is_refused_whole(runner: Runner, text: str, sentence: str) -> None:
    told, responses, status = Edge(runner).run(text)
    assert (status, responses) == (2, []) and sentence in told


def test_the_order_is_the_one_that_computes_least_unless_it_is_kept(runner: Runner) -> None:
    """Prompts in turn, in a pool for two of them; the answers are the same."""
    systems = [f"{name} knows {'all about it ' * 90}" for name in ("Ada", "Bob", "Cleo", "Dan")]
    requests = [asked(f"Question {number}?", systems[number % 4]) for number in range(12)]
    file = {"temperature": 0, "max_generate_length": 2, "requests": requests}
    found = {}
    for flags in ("", "--keep-order"):
        told, responses, status = Edge(runner).run(file, flags=f"{flags} --set num_blocks=200 --set dtype=float32")
        assert status == 0, told
        match = re.search(r"(\d+) reused, (\d+) computed", told)
        assert match is not None
        found[flags] = (int(match[2]), [one["output_text"] for one in responses])
    assert found[""][0] * 2 < found["--keep-order"][0]
    assert found[""][1] == found["--keep-order"][1]


def test_each_of_several_models_answers_the_lines_that_name_it(tmp_path: Path) -> None:
    """By its name or an alias; a line without a name is the first model's, or that of ``--model``."""
    models = [{"served_model_name": name, "engine": "simulated"} for name in ("one", "two")]
    settings = {"model": "demo", "replicas": 2, "models": models, "aliases": {"gpt-4o": "two"}}
    (tmp_path / "settings.yaml").write_text(json.dumps(settings))
    named = {"none": {}, "one": {"model": "one"}, "two": {"model": "two"}, "alias": {"model": "gpt-4o"}}
    lines = [chat(name, "Who?", **body) for name, body in named.items()]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines, chat("wrong", "Who?", model="three")]))
    for flags, by_default, count in ((), "one", 3), (("--model", "gpt-4o"), "two", 4):
        arguments = ["infer", str(tmp_path / "in.jsonl"), "--config", str(tmp_path / "settings.yaml"), *flags]
        result = CliRunner(env=SECRET).invoke(app, arguments)
        assert result.exit_code == 1 and "failed: wrong" in said(result)
        found = [json.loads(line) for line in (tmp_path / "in.responses.jsonl").read_text().splitlines()]
        answering = {line["custom_id"]: line["response"]["body"].get("model") for line in found}
        assert answering == {"none": by_default, "one": "one", "two": "two", "alias": "two", "wrong": None}
        assert f"{by_default} answers {count} requests" in said(result)
    refused = CliRunner(env=SECRET).invoke(app, [*arguments[:4], "--model", "three"])
    assert refused.exit_code == 2 and "name one of them: one, two" in said(refused)
