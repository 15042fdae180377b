"""A prompt's log-probabilities are those of a plain forward of transformers, however it is computed."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GraniteConfig, GraniteForCausalLM

from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.protocol import MAX_TOLD_TOKENS, TokenLogprob, prompt_outputs
from serve_app.engine.runner import prompt_logprobs
from serve_app.engine.runner.model_runner import load_runner
from serve_app.engine.settings import EngineSettings
from tests.serve_app.conftest import MakeEngine
from tests.serve_app.engine.tiny import SIZES, Collector, prompt, request, run_all, sample


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
    engine._runner.model.get_input_embeddings().weight.data[poison] = float("nan")  # type: ignore[attr-defined]
    broken, fine = np.append(prompt(29) % poison, [poison, 3]), prompt(30, 1) % poison
    asked = [request("bad", broken, 0, prompt_logprobs=1), request("good", fine, 1, prompt_logprobs=1)]
    got = run_all(engine, asked)
    assert (got.finish, got.errors["bad"]) == (
        {"bad": "error", "good": "length"},
        "the model's logits are not numbers",
    )
    check(got.prompt_logprobs["good"], fine, checkpoints["qwen3"], 1)


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
    model, widths = engine._runner.model, []  # type: ignore[attr-defined]
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
