"""Model runners, real and simulated: sizes, memory, copies of blocks, prompts' logprobs, and failures."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GraniteConfig, GraniteForCausalLM, LlamaConfig, Qwen3Config
from transformers.utils.logging import enable_progress_bar

from benchmarks.common.virtual_clock import VirtualClock
from serve_app.config.app import AppConfig
from serve_app.config.cache import CPU_POOL_BYTES
from serve_app.engine.attention.supported import UnsupportedModel
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.protocol import MAX_TOLD_TOKENS, SamplingParams, TokenLogprob, prompt_outputs
from serve_app.engine.runner import prompt_logprobs
from serve_app.engine.runner.kv_size import blocks_in_budget, kv_bytes_per_block
from serve_app.engine.runner.memory_budget import Work, kv_budget_bytes, step_bytes, weight_bytes
from serve_app.engine.runner.model_runner import (
    ModelRunner,
    copy_in,
    copy_out,
    gather_blocks,
    load_runner,
    scatter_blocks,
)
from serve_app.engine.runner.simulated_runner import CostModel, SimulatedRunner
from serve_app.engine.settings import EngineSettings
from serve_app.engine.step import Segment
from serve_app.replica.pool_size import pool_bytes
from tests.serve_app.conftest import MakeEngine, Reference
from tests.serve_app.engine.tiny import SIZES, Collector, prompt, request, run_all, sample

_GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_head": 4, "n_embd": 64}


def test_kv_bytes_are_the_pools(checkpoints: dict[str, Path]) -> None:
    """The formula gives exactly the tensor's bytes, and 1.22 GiB for 10,000 tokens of an 8B Llama in bfloat16."""
    runner = ModelRunner(checkpoints["qwen3"], EngineSettings(num_blocks=7, dtype="float32"))
    assert runner.block_bytes * 7 == runner.pool.tensor.numel() * runner.pool.tensor.element_size()
    llama = LlamaConfig(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)
    per_block = kv_bytes_per_block(llama, "bfloat16", 16)
    assert per_block * 625 == 1_310_720_000
    assert blocks_in_budget(per_block, 10 * per_block + 1) == 10
    with pytest.raises(ValueError, match="cannot hold one"):
        blocks_in_budget(per_block, per_block - 1)
    assert kv_bytes_per_block(Qwen3Config(head_dim=128, hidden_size=64), "float32", 16) % 128 == 0
    kinds = ["linear_attention", "conv", "full_attention", "sliding_attention"]
    some = SimpleNamespace(**llama.to_dict(), layer_types=kinds)
    assert kv_bytes_per_block(some, "bfloat16", 16) * llama.num_hidden_layers == 2 * per_block
    for kinds, layers in (
        (["sliding_attention"] * 5 + ["full_attention"], 1),  # Gemma 3
        (["sliding_attention", "full_attention"] * 3, 3),  # gpt-oss
        (["sliding_attention"] * 4 + ["full_attention"] * 3, 4),
        (["sliding_attention"] * 6, 6),
        (["conv", "full_attention", "conv"], 1),
    ):
        some = SimpleNamespace(**llama.to_dict(), layer_types=kinds)
        found = kv_bytes_per_block(some, "bfloat16", 16, grouped=True)
        assert found * llama.num_hidden_layers == layers * per_block


def test_weights_of_another_model_than_the_configs_are_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Otherwise missing weights would be drawn at random, and the answers nonsense."""
    shutil.copytree(checkpoints["qwen3"], tmp_path, dirs_exist_ok=True)
    fields = json.loads((tmp_path / "config.json").read_text())
    for changed in ({"num_hidden_layers": fields["num_hidden_layers"] + 1, "layer_types": None}, _GPT2):
        (tmp_path / "config.json").write_text(json.dumps(fields | changed))
        with pytest.raises(UnsupportedModel, match=r"the weights lack \d+ of its tensors"):
            ModelRunner(tmp_path, EngineSettings(num_blocks=4))


def test_logits_that_are_no_numbers_fail_their_sequence_alone(make_engine: MakeEngine, reference: Reference) -> None:
    """A token with a broken embedding ruins only its own request, not its neighbours or the next user of its blocks."""
    engine = make_engine(num_blocks=12, max_num_seqs=3)
    poison = 200
    engine.runner.model.get_input_embeddings().weight.data[poison] = float("nan")  # type: ignore[attr-defined]
    clean = {f"r{i}": prompt(30, i) % poison for i in range(3)}
    broken = np.append(prompt(29) % poison, poison)
    got = run_all(engine, [request("bad", broken, 5), *[request(name, ids, 20) for name, ids in clean.items()]])
    assert got.finish["bad"] == "error"
    assert "not numbers" in got.errors["bad"]
    for name, ids in clean.items():
        expected = reference("qwen3", ids, 20)
        if poison in expected:  # from there on the broken embedding is its own
            expected = expected[: expected.index(poison) + 1]
        assert got.tokens[name][: len(expected)] == expected, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gathered_copy_is_the_copy_block_by_block(device: torch.device, dtype: torch.dtype) -> None:
    here = torch.randn(3, 2, 9, 4, 2, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    there = here.clone().to(device)
    blocks = [7, 0, 4]
    rows = [np.empty(here[:, :, 0].nbytes, dtype=np.uint8) for _ in blocks]
    copy_out(here, blocks, rows)
    assert np.array_equal(gather_blocks(there, blocks), np.stack(rows))
    copy_in(here, [1, 2, 8], rows)
    scatter_blocks(there, [1, 2, 8], rows)
    assert torch.equal(there.cpu(), here)


GIB = 1024**3
WORK = Work(batched_tokens=2048, sequences=64, lora_ranks=0)
LLAMA_8B = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8,
)  # fmt: skip


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_counted_weights_are_the_models(checkpoints: dict[str, Path], kind: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoints[kind], dtype=torch.float32)
    config = AutoConfig.from_pretrained(checkpoints[kind])
    assert weight_bytes(config, torch.float32) == sum(weight.nbytes for weight in model.parameters())
    more = weight_bytes(config, torch.bfloat16, lora_ranks=8) - weight_bytes(config, torch.bfloat16)
    linear = [layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear) and "model." in name]
    assert more == 2 * 8 * sum(sum(layer.weight.shape) for layer in linear)


def test_an_8b_model_leaves_most_of_a_large_gpu_to_kv() -> None:
    """8.03 billion weights in bfloat16 are 15 GiB; one step's work is a few GiB; the rest of the part is KV."""
    assert weight_bytes(LLAMA_8B, torch.bfloat16) == 2 * 8_030_261_248
    step = step_bytes(LLAMA_8B, torch.bfloat16, WORK)
    assert GIB < step < 5 * GIB
    left = kv_budget_bytes((79 * GIB, 80 * GIB), 0.9, LLAMA_8B, torch.bfloat16, WORK)
    assert left == 72 * GIB - 2 * 8_030_261_248 - step
    busy = kv_budget_bytes((40 * GIB, 80 * GIB), 0.9, LLAMA_8B, torch.bfloat16, WORK)
    assert busy == left - 32 * GIB


def test_a_gpu_that_is_too_small_is_an_error_with_advice() -> None:
    with pytest.raises(
        ValueError, match=r"allows 14.4 GiB of 16.0 GiB .* weights take 15.0 GiB .* or set kv_cache_bytes"
    ):
        kv_budget_bytes((16 * GIB, 16 * GIB), 0.9, LLAMA_8B, torch.bfloat16, WORK)


def test_the_pool_is_as_set_else_a_default_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pool_bytes(AppConfig(device="cpu"), LLAMA_8B) == CPU_POOL_BYTES
    assert pool_bytes(AppConfig(device="cpu", kv_cache_bytes=2 * GIB), LLAMA_8B) == 2 * GIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (79 * GIB, 80 * GIB))
    config = AppConfig(device="cuda", replica_num_gpus=1, dtype="bfloat16", enforce_eager=True)
    expected = kv_budget_bytes((79 * GIB, 80 * GIB), 0.9, LLAMA_8B, torch.bfloat16, WORK)
    assert pool_bytes(config, LLAMA_8B) == expected


def test_a_gpu_has_to_be_reserved_to_be_seen() -> None:
    with pytest.raises(ValueError, match="replica_num_gpus"):
        AppConfig(device="cuda")


def test_a_request_takes_the_modelled_time() -> None:
    """On a virtual clock: 1,000 tokens at 5,000 a second, then three decode steps of 10 ms + 1 ms."""
    clock = VirtualClock()
    cost = CostModel(prefill_tokens_per_s=5000.0, decode_base_s=0.010, decode_per_sequence_s=0.001)
    settings = EngineSettings(num_blocks=128)
    runner = SimulatedRunner(cost, settings, sleep=clock.sleep)
    engine = TorchEngine(runner, settings, lambda _: None, clock=clock)
    collector = Collector()
    engine.submit(request("r", prompt(1000), 4), collector)
    engine.start()
    collector.wait(["r"])
    assert clock() == pytest.approx(0.2 + 3 * 0.011)
    assert engine.load().prefill_tokens_per_s == pytest.approx(5000.0)
    engine.stop()
    samples = engine.stats().samples
    assert {name: value for name, _, value in samples}["warmpath_decode_step_seconds"] == pytest.approx(0.011)
    assert all(dict(labels)["engine"] == "simulated" for _, labels, _ in samples)


def test_tokens_are_deterministic_and_avoid_stop_tokens() -> None:
    cost = CostModel(vocab_size=4)
    runner = SimulatedRunner(cost, EngineSettings(), sleep=lambda _: None)

    def tokens(stop: tuple[int, ...]) -> list[int | None]:
        params = SamplingParams(9, seed=3, stop_token_ids=stop)
        ids = np.array([1], dtype=np.int32)
        segments = [Segment(ids, p, [0], [(0, 1)], params) for p in range(40)]
        for segment in segments:
            runner.execute([segment])
        return [segment.token for segment in segments]

    assert tokens(()) == tokens(())
    assert set(tokens(())) == {0, 1, 2, 3}
    assert set(tokens((0, 2))) == {1, 3}


def plain(path: Path, ids: np.ndarray) -> torch.Tensor:
    """Log-probabilities [tokens - 1, vocab] of what follows each token."""
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor(ids, dtype=torch.long)[None]).logits[0, :-1], dim=-1)


def check(told: list[TokenLogprob], ids: np.ndarray, path: Path, top: int) -> None:
    expected = plain(path, ids)
    assert len(told) == len(ids) - 1
    for place, token, one in zip(expected, ids[1:].tolist(), told, strict=True):
        assert one.logprob == pytest.approx(float(place[token]), abs=1e-3)
        assert len(one.top) == top
        for other, value in one.top:
            assert value == pytest.approx(float(place[other]), abs=1e-3)
        best = torch.topk(place, max(top, 1)).values[:top].tolist()
        assert [value for _, value in one.top] == pytest.approx(best, abs=1e-3)
        least, most = (int((place >= place[token] + slack).sum()) for slack in (2e-3, -2e-3))
        assert max(1, least) <= one.rank <= most


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_prompts_logprobs_are_those_of_transformers(
    make_engine: MakeEngine, checkpoints: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short, of one token, longer than a step; together, cold and then with all of their blocks cached."""
    monkeypatch.setattr(prompt_logprobs, "LEAST_ROWS", 7)
    engine = make_engine(kind, max_num_batched_tokens=64, max_num_seqs=6)
    prompts = {"one": prompt(1), "two": prompt(2, 1), "short": prompt(9, 2), "step": prompt(64, 3), "long": prompt(333)}
    for round_ in ("cold", "warm"):
        beside = [request("plain", prompt(50, 9), 4)]
        asked = [request(name, ids, 3, prompt_logprobs=i) for i, (name, ids) in enumerate(prompts.items())]
        got = run_all(engine, [*asked, *beside])
        assert set(got.finish.values()) == {"length"}
        for i, (name, ids) in enumerate(prompts.items()):
            check(got.prompt_logprobs[name], ids, checkpoints[kind], i)
            assert got.cached[name] == 0, (round_, name)
            assert len(got.tokens[name]) == 3
        assert got.prompt_logprobs["plain"] == []
    assert run_all(engine, [request("then", prompts["long"], 1)]).cached == {"then": 320}, "its blocks serve others"


def test_no_answer_is_needed_for_a_prompts_logprobs(make_engine: MakeEngine, checkpoints: dict[str, Path]) -> None:
    ids = prompt(100, 4)
    got = run_all(make_engine(max_num_batched_tokens=32), [request("r", ids, 0, prompt_logprobs=2)])
    check(got.prompt_logprobs["r"], ids, checkpoints["qwen3"], 2)
    assert (got.tokens["r"], got.finish["r"], got.cached["r"]) == ([], "length", 0)


def test_an_answer_is_the_same_with_the_prompts_logprobs(make_engine: MakeEngine) -> None:
    """Same tokens and the same logprobs of the answer, beside the prompt's."""
    engine, ids = make_engine(), prompt(40, 5)
    one = run_all(engine, [request("one", ids, 12, logprobs=2)])
    two = run_all(engine, [request("two", ids, 12, logprobs=2, prompt_logprobs=0)])
    assert one.tokens["one"] == two.tokens["two"]
    for before, after in zip(one.logprobs["one"], two.logprobs["two"], strict=True):
        assert before.logprob == pytest.approx(after.logprob, abs=1e-4)


def test_a_preempted_prompt_is_told_once(make_engine: MakeEngine, checkpoints: dict[str, Path]) -> None:
    """Preemption in the answer or in the prefill neither repeats nor skips a token's log-probability."""
    engine = make_engine(num_blocks=26, max_num_seqs=4, max_num_batched_tokens=16)
    prompts = {f"r{i}": prompt(60 + i, i) for i in range(4)}
    got = run_all(engine, [request(name, ids, 120, prompt_logprobs=1) for name, ids in prompts.items()])
    assert sample(engine, "warmpath_num_preemptions_total") > 0
    for name, ids in prompts.items():
        check(got.prompt_logprobs[name], ids, checkpoints["qwen3"], 1)
        assert len(got.tokens[name]) == 120


def test_it_waits_for_no_other_prompt(make_engine: MakeEngine, checkpoints: dict[str, Path]) -> None:
    """Equal cold prompts share one prefill; one whose logprobs are asked for is computed beside it."""
    engine, ids = make_engine(start=False), prompt(200, 6)
    collector = Collector()
    for name, asked in (("first", None), ("second", None), ("told", 1), ("told too", 1)):
        engine.submit(request(name, ids, 2, prompt_logprobs=asked), collector)
    assert engine.load().queued_prefill_tokens == 4 * len(ids)
    engine.start()
    collector.wait(["first", "second", "told", "told too"])
    assert (collector.cached["told"], collector.cached["told too"]) == (0, 0)
    assert max(collector.cached["first"], collector.cached["second"]) == 192
    for name in ("told", "told too"):
        check(collector.prompt_logprobs[name], ids, checkpoints["qwen3"], 1)


def test_a_prompt_that_makes_no_numbers_fails_alone(make_engine: MakeEngine, checkpoints: dict[str, Path]) -> None:
    engine, poison = make_engine(), 200
    engine.runner.model.get_input_embeddings().weight.data[poison] = float("nan")  # type: ignore[attr-defined]
    broken, fine = np.append(prompt(29) % poison, [poison, 3]), prompt(30, 1) % poison
    asked = [request("bad", broken, 0, prompt_logprobs=1), request("good", fine, 1, prompt_logprobs=1)]
    got = run_all(engine, asked)
    assert (got.finish, got.errors["bad"]) == (
        {"bad": "error", "good": "length"},
        "the model's logits are not numbers",
    )
    check(got.prompt_logprobs["good"], fine, checkpoints["qwen3"], 1)


def test_a_model_is_loaded_in_silence(checkpoints: dict[str, Path], capfd: pytest.CaptureFixture[str]) -> None:
    """Bars of transformers would write over what `warmpath infer` shows."""
    enable_progress_bar()
    load_runner(checkpoints["qwen3"], EngineSettings(num_blocks=8, dtype="float32"))
    assert "%|" not in capfd.readouterr().err


def test_what_a_model_does_after_its_output_layer_counts(tmp_path: Path, engines: list[TorchEngine]) -> None:
    """Granite divides its logits: a product with the output layer alone would be wrong."""
    torch.manual_seed(3)
    GraniteForCausalLM(GraniteConfig(logits_scaling=5.0, **SIZES)).save_pretrained(tmp_path)
    settings = EngineSettings(num_blocks=32, dtype="float32", max_num_seqs=4, max_num_batched_tokens=64)
    engine = TorchEngine(load_runner(tmp_path, settings), settings, lambda _: None)
    engines.append(engine)
    engine.start()
    ids = prompt(90, 8)
    check(run_all(engine, [request("r", ids, 1, prompt_logprobs=2)]).prompt_logprobs["r"], ids, tmp_path, 2)


def test_few_rows_of_logits_exist_at_once(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a thousand tokens times the vocabulary would not fit beside a pool that fills the memory."""
    engine = make_engine(num_blocks=128, max_num_batched_tokens=1024, max_num_seqs=4)
    model, widths = engine.runner.model, []  # type: ignore[attr-defined]
    hook = model.get_output_embeddings().register_forward_hook(lambda _, __, output: widths.append(output.shape[1]))
    run_all(engine, [request("r", prompt(1000), 1, prompt_logprobs=1)])
    hook.remove()
    assert max(widths) <= prompt_logprobs.LEAST_ROWS
    assert sum(widths) == 1000, "each row once: 999 targets, and the sampled token's"


def test_an_output_tells_of_a_bounded_number_of_tokens() -> None:
    told = [TokenLogprob(float(-i)) for i in range(2 * MAX_TOLD_TOKENS + 1)]
    parts = prompt_outputs("r", told)
    assert [len(part.prompt_logprobs) for part in parts] == [MAX_TOLD_TOKENS, MAX_TOLD_TOKENS, 1]
    assert [one for part in parts for one in part.prompt_logprobs] == told
    assert not prompt_outputs("r", [])


def test_a_negative_number_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ValueError, match="prompt_logprobs"):
        make_engine(start=False).submit(request("r", prompt(3), 1, prompt_logprobs=-1), Collector())
