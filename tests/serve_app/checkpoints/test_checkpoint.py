"""A checkpoint's facts and its errors, the demo model, the memory that is planned for KV, and reused files."""

import json
import os
import shutil
import subprocess
import sys
from collections import OrderedDict
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from benchmarks.common.trace import DEFAULT_TRACE
from serve_app.checkpoints.checkpoint import CheckpointError, load_checkpoint_info, stored_bytes
from serve_app.checkpoints.kv_planner import kv_room, plan_kv
from serve_app.checkpoints.reuse import TRACE_BLOCK_TOKENS, TraceRequest, read_trace, reuse_curve
from serve_app.checkpoints.sources import model_config
from serve_app.cli.main import app
from serve_app.generation.tool_calls.round_trip import find_parser
from serve_app.tokenization.tokenizer import PromptTokenizer
from tests.serve_app.checkpoints.sources.tiny_gguf import HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, write_tiny_gguf
from tests.serve_app.tool_templates.families import SEARCH


@pytest.fixture
def copy(demo_model_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_model_path, tmp_path / "model"))


def test_the_demo_model_describes_itself(demo_model_path: Path) -> None:
    """Every field comes from the files; both end tokens are eos, the generation config's first."""
    info = load_checkpoint_info(demo_model_path)
    added = json.loads((demo_model_path / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in added}
    assert (info.vocab_size, info.max_model_len) == (4096, 32768)
    assert info.eos_token_ids == (ids["<|im_end|>"], ids["<|endoftext|>"])
    assert len(info.fingerprint) == 32


def test_token_ids_are_the_same_where_only_the_weights_differ(demo_model_path: Path, copy: Path) -> None:
    """Then another model can read a prompt that was made for this one; with one more token, it cannot."""
    original = load_checkpoint_info(demo_model_path)
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"] += np.float32(0.01)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    tuned = load_checkpoint_info(copy)
    assert (tuned.tokenizer, tuned.fingerprint == original.fingerprint) == (original.tokenizer, False)
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "content": "<|new|>", "id": 4095})
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert load_checkpoint_info(copy).tokenizer != original.tokenizer


def test_the_fingerprint_is_of_config_and_weights_wherever_they_lie(demo_model_path: Path, copy: Path) -> None:
    """Replicas on different machines share keys; a fine-tune of equal size, or other rope settings, do not."""
    original = load_checkpoint_info(copy).fingerprint
    assert original == load_checkpoint_info(demo_model_path).fingerprint
    size = (copy / "model.safetensors").stat().st_size
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"] += np.float32(0.01)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert (copy / "model.safetensors").stat().st_size == size
    tuned = load_checkpoint_info(copy).fingerprint
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rope_theta": 1e4}))
    assert len({original, tuned, load_checkpoint_info(copy).fingerprint}) == 3


def test_eos_falls_back_to_the_tokenizer_and_the_config(copy: Path) -> None:
    """Without a generation config the tokenizer's and the config's eos count, once each."""
    (copy / "generation_config.json").unlink()
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"eos_token_id": [7, config["eos_token_id"]]}))
    assert load_checkpoint_info(copy).eos_token_ids == (config["eos_token_id"], 7)


@pytest.mark.parametrize(
    ("name", "becomes", "sentence"),
    [
        ("", None, "no directory"),
        ("config.json", None, "config.json does not exist"),
        ("config.json", "{", "not valid JSON"),
        ("config.json", "{}", "must name architectures"),
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", "[]", "not a tokenizer"),
        ("model.safetensors", None, "convert the checkpoint to safetensors"),
        ("model.safetensors", "short", "not a whole safetensors file"),
        ("model.safetensors", "cut", "cut short"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "model-2.safetensors"}}', "model-2.safetensors"),
    ],
)
def test_a_broken_checkpoint_is_named_with_a_remedy(copy: Path, name: str, becomes: str | None, sentence: str) -> None:
    """Each fault has its own sentence. ``becomes``: the file's new content; None: the file is removed."""
    file, whole = copy / name, (copy / "model.safetensors").read_bytes()
    if becomes is None:
        shutil.rmtree(copy) if not name else file.unlink()
    else:
        file.write_bytes(whole[:-4] if becomes == "cut" else becomes.encode())
    with pytest.raises(CheckpointError, match=sentence):
        load_checkpoint_info(copy)


def test_weights_take_the_bytes_of_their_served_format(tmp_path: Path) -> None:
    """Half of float32's in 16 bits, their own in fewer; not those of the same weights in another form beside them."""
    many, few = np.zeros(1000, np.float32), np.zeros(100, np.int8)
    save_file({"a": many, "b": few}, tmp_path / "model-1.safetensors")
    save_file({"a": many}, tmp_path / "consolidated.safetensors")
    assert (stored_bytes(tmp_path), stored_bytes(tmp_path, 2)) == (4100, 2100)
    save_file({"c": many}, tmp_path / "model-2.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    assert stored_bytes(tmp_path) == 4100


def _digests(directory: Path) -> dict[str, str]:
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


def test_two_builds_in_different_processes_have_equal_bytes(demo_model_path: Path, tmp_path: Path) -> None:
    """Two concurrent builders in one directory both get one whole checkpoint, equal to an earlier build's bytes."""
    script = (
        "import sys; from pathlib import Path; from serve_app.checkpoints.demo_model import ensure_demo_model;"
        "print(ensure_demo_model('demo', Path(sys.argv[1])))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, str(tmp_path)]
    builders = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment | {"PYTHONHASHSEED": seed})
        for seed in "12"
    ]
    (built,) = {Path(builder.communicate()[0].strip()) for builder in builders}
    assert built.name == demo_model_path.name
    assert _digests(built) == _digests(demo_model_path)
    assert list(tmp_path.iterdir()) == [built], "no temporary file remains"


def test_transformers_loads_it_whole_and_greedy_output_varies(demo_model_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path)
    model, report = AutoModelForCausalLM.from_pretrained(demo_model_path, output_loading_info=True)
    assert not any(report.values())
    assert model.config.max_position_embeddings == 32768
    distinct = set()
    for question in ("Hello", "Count: 1 2 3 4 5 6 7", "a" * 200):
        chat = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=40, min_new_tokens=40, do_sample=False)
        answer = tuple(output[0, inputs["input_ids"].shape[1] :].tolist())
        assert len(set(answer)) > 20
        distinct.add(answer)
    assert len(distinct) == 3


def test_the_chat_template_is_chatml_with_tools(demo_model_path: Path) -> None:
    """Turns end with the eos; tools come before everything else, and calls have the format of Hermes models."""
    tokenizer = PromptTokenizer(demo_model_path)
    assert tokenizer.pretrained("<|im_end|>").input_ids == [tokenizer.pretrained.eos_token_id]
    plain = tokenizer.template.render([{"role": "system", "content": "S"}, {"role": "user", "content": "U"}])
    assert plain.text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    assert find_parser(tokenizer) == "hermes"
    call = {"type": "function", "function": {"name": "search", "arguments": {"q": 1}}}
    messages = [{"role": "user", "content": "U"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    rendered = tokenizer.template.render(messages, [SEARCH], add_generation_prompt=False)
    assert rendered.system_text.count('"name": "search"') == 1
    assert rendered.system_text.endswith("<|im_start|>user\n")
    calls = '<tool_call>{"name": "search", "arguments": {"q": 1}}</tool_call><|im_end|>\n'
    assert rendered.text == f"{rendered.system_text}U<|im_end|>\n<|im_start|>assistant\n{calls}"


LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def test_the_worked_example() -> None:
    """10,000 tokens of Llama-3.1-8B in bf16, and the model's 8,030,261,248 parameters. (docs: sizing)"""
    found = plan_kv(kv_room(LLAMA, "bfloat16", 80 * 10**9), prefixes=100, prefix_tokens=10_000)
    assert found.prefix_bytes == 1_310_720_000 and found.weights_bytes == 2 * 8_030_261_248
    assert found.prefixes_per_replica == 48 and found.replicas_needed == 3 and found.hit_rate == 0.48


@given(st.integers(0, 10**12), st.integers(1, 5000), st.integers(1, 50_000), st.integers(1, 16))
def test_planned_prefixes_fit_and_one_more_would_not(memory: int, prefixes: int, tokens: int, replicas: int) -> None:
    """Prefixes of whole blocks fit into the memory that the weights leave."""
    found = plan_kv(kv_room(LLAMA, "bfloat16", memory), prefixes, tokens, replicas)
    whole = -(-tokens // 16) * 16 * found.bytes_per_token
    assert found.prefixes_per_replica * whole <= found.kv_bytes < (found.prefixes_per_replica + 1) * whole
    assert (found.hit_rate == 1.0) == (0 < found.replicas_needed <= replicas)


def test_the_command_needs_a_config_only(tmp_path: Path) -> None:
    """It prints figures for machines, sentences for people, and an error for an invalid size."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    base = ["plan", "--model", str(tmp_path), "--prefixes", "100", "--prefix-tokens", "10000", "--memory"]
    told = CliRunner().invoke(app, [*base, "80GB", "--json"])
    assert json.loads(told.output)["prefix_bytes"] == 1_310_720_000
    assert "need 3 replicas" in CliRunner().invoke(app, [*base, "80GB"]).output
    assert CliRunner().invoke(app, [*base, "much"]).exit_code == 2
    table = json.loads(told.output)["by_memory"]
    assert [row["prefixes"] for row in table] == sorted(row["prefixes"] for row in table)
    assert table[2] == {"memory_bytes": 80 * 10**9, "prefixes": 48, "hit_rate": 0.48}


def test_each_of_several_models_is_planned_with_its_own_settings(tmp_path: Path) -> None:
    """Under its name: as alone with the flags that say the same."""
    for name, layers in (("small", 16), ("large", 32)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": layers}))
    large = {"model": "./large", "replicas": 3, "dtype": "float16", "engine": "vllm", "tensor_parallel_size": 2}
    (tmp_path / "models.yaml").write_text(json.dumps({"models": [{"model": "./small", "replicas": 1}, large]}))
    base = ["plan", "--prefixes", "100", "--prefix-tokens", "10000", "--memory", "80GB"]
    several = CliRunner().invoke(app, [*base, "--config", str(tmp_path / "models.yaml"), "--json"])
    flags = {"small": [], "large": ["--replicas", "3", "--dtype", "float16", "--tensor-parallel-size", "2"]}
    alone = {
        name: json.loads(CliRunner().invoke(app, [*base, "--model", str(tmp_path / name), *more, "--json"]).output)
        for name, more in flags.items()
    }
    assert json.loads(several.output) == alone
    told = CliRunner().invoke(app, [*base, "--config", str(tmp_path / "models.yaml")]).output
    assert [line for line in told.splitlines() if line in flags] == ["small", "large"]
    for wrong in ([], ["--model", "demo", "--config", str(tmp_path / "models.yaml")]):
        assert CliRunner().invoke(app, [*base, *wrong]).exit_code == 2


@pytest.mark.parametrize(("ranks", "part"), [((8, 1), 1.0), ((16, 1), 2.0), ((1, 4), 1.0), ((2, 3), 33 / 32)])
def test_ranks_hold_a_head_and_as_many_layers_as_the_fullest(ranks: tuple[int, int], part: float) -> None:
    """Eight KV heads on sixteen ranks are held twice; of 32 layers one of three stages has eleven."""
    one, several = (kv_room(LLAMA, "bfloat16", 80 * 10**9, each) for each in ((1, 1), ranks))
    assert several.bytes_per_token == one.bytes_per_token * part
    assert several.tokens == pytest.approx(one.tokens / part, abs=16)


def test_a_trace_is_planned_by_memory(tmp_path: Path) -> None:
    """Two prompts alternate and share nothing: a cache for one never hits, a cache for both misses only twice."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    prompts = [list(range(10)), list(range(10, 20))] * 4
    rows = [{"timestamp": at, "input_length": 5120, "hash_ids": ids} for at, ids in enumerate(prompts)]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    one_prompt = 2 * 8_030_261_248 + 5120 * 131_072
    base = ["plan", "--model", str(tmp_path / "config.json"), "--trace", str(tmp_path / "trace.jsonl"), "--json"]
    told = json.loads(CliRunner().invoke(app, [*base, "--memory", str(one_prompt)]).output)
    by_memory = {row["memory_bytes"]: row for row in told["by_memory"]}
    assert told["highest_hit_rate"] == 0.75 and told["good_kv_bytes"] == 19 * 512 * 131_072
    once, twice = by_memory[one_prompt], by_memory[2 * one_prompt]
    assert (once["kv_tokens"], once["hit_rate"], once["evicted_tokens_per_request"]) == (5120, 0.0, 7 * 5120 / 8)
    assert twice["kv_tokens"] > 2 * 5120 and (twice["hit_rate"], twice["evicted_tokens_per_request"]) == (0.75, 0.0)
    both = CliRunner().invoke(app, [*base, "--memory", "80GB", "--prefixes", "1", "--prefix-tokens", "1"])
    assert both.exit_code == 2


def test_a_gguf_file_is_planned_without_a_conversion(tmp_path: Path, demo_model_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", demo_model_path)
    found = model_config(str(tmp_path / "tiny.gguf"))
    assert (found["hidden_size"], found["intermediate_size"], found["num_hidden_layers"]) == (HIDDEN, INNER, LAYERS)
    assert (found["num_attention_heads"], found["num_key_value_heads"]) == (HEADS, KV_HEADS)
    vocabulary = json.loads((demo_model_path / "config.json").read_text())["vocab_size"]
    assert abs(found["vocab_size"] - vocabulary) < 8
    plan_kv(kv_room(found, "bfloat16", 10**9), prefixes=1, prefix_tokens=16)
    assert model_config("demo")["num_hidden_layers"] > 0


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRequest]:
    """Prompts that are paths from the root of a tree, as chains of hashes are."""
    parents = draw(st.lists(st.integers(0, 30), min_size=1, max_size=30))
    paths: list[tuple[int, ...]] = []
    for node, parent in enumerate(parents):
        before = paths[parent % node] if node and parent % 5 else ()
        paths.append((*before, node))
    chosen = draw(st.lists(st.sampled_from(paths), min_size=1, max_size=40))
    return [TraceRequest(0.0, len(ids) * TRACE_BLOCK_TOKENS - draw(st.integers(0, 511)), 1, ids) for ids in chosen]


def simulated(trace: list[TraceRequest], blocks: int) -> tuple[int, int]:
    """Return (tokens hit, blocks evicted) of an LRU cache that frees a prompt's end first."""
    cache: OrderedDict[int, None] = OrderedDict()
    hit_tokens = evicted = 0
    for prompt in trace:
        known = 0
        while known < len(prompt.hash_ids) and prompt.hash_ids[known] in cache:
            known += 1
        hit_tokens += min(prompt.prompt_tokens, known * TRACE_BLOCK_TOKENS)
        for one in reversed(prompt.hash_ids):
            cache[one] = None
            cache.move_to_end(one)
        while len(cache) > blocks:
            cache.popitem(last=False)
            evicted += 1
    return hit_tokens, evicted


@given(traces(), st.integers(0, 40))
def test_a_simulated_cache_hits_and_evicts_the_same(trace: list[TraceRequest], blocks: int) -> None:
    curve = reuse_curve(trace)
    hit_tokens, evicted = simulated(trace, blocks)
    assert curve.hit_rate(blocks) * curve.prompt_tokens == pytest.approx(hit_tokens)
    assert curve.evictions(blocks) == evicted


@given(traces(), st.floats(0, 1))
def test_the_fewest_blocks_for_a_hit_rate_are_the_fewest(trace: list[TraceRequest], part: float) -> None:
    curve = reuse_curve(trace)
    wanted = part * curve.hit_rate()
    blocks = curve.blocks_for(wanted)
    assert curve.hit_rate(blocks) >= wanted - 1e-9
    assert blocks == 0 or curve.hit_rate(blocks - 1) < wanted


def test_the_reuse_of_the_published_trace_is_known() -> None:
    """An unlimited cache hits every block that occurred before."""
    prompts = read_trace(DEFAULT_TRACE)
    curve = reuse_curve(prompts)
    assert curve.hit_rate() * curve.prompt_tokens == pytest.approx(simulated(prompts, curve.distinct_blocks)[0])
    assert 0 < curve.hit_rate(1000) < curve.hit_rate(4000) < curve.hit_rate()


@pytest.mark.parametrize("line", ["no json", '{"timestamp": 0}', '{"timestamp": 0, "input_length": 9, "hash_ids": []}'])
def test_a_malformed_line_is_named(tmp_path: Path, line: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"timestamp": 0, "input_length": 600, "hash_ids": [0, 1]}) + f"\n{line}\n")
    with pytest.raises(ValueError, match="line 2"):
        read_trace(trace)
