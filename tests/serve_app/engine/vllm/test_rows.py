"""Rows of a vLLM batch get the tokens that the built-in engine chooses, and its load is told as it is."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from router.protocol.request import Decision
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.engine.protocol import QueueFull, SamplingParams, TokenRules
from serve_app.engine.reports import ROUTERS_REMEMBERED, EngineMeters
from serve_app.engine.vllm.load_mirror import LiveRequest, LoadMirror
from serve_app.engine.vllm.sampling.rows import (
    NOT_NUMBERS,
    SamplingRow,
    TokenChoice,
    choice_of,
    choose_rows,
    vllm_sampling,
)
from serve_app.engine.vllm.settings import VllmSettings
from serve_app.structured.compiler import GrammarCompiler, llguidance_form
from serve_app.structured.grammar import Grammar
from serve_app.structured.matcher import Matchers
from tests.serve_app.conftest import MakeEngine
from tests.serve_app.engine.tiny import VOCAB, prompt, request, run_all

PROMPT = tuple(range(40))


@pytest.fixture
def matchers(demo_model_path: Path) -> Matchers:
    info = load_checkpoint_info(demo_model_path)
    return Matchers(GrammarCompiler(info.path, info.vocab_size, info.eos_token_ids))


def sample(rows: dict[int, SamplingRow], logits: torch.Tensor) -> list[int]:
    return [token for (token,) in choose_rows(rows, logits, [()] * len(logits))]


ASKED = {
    "seeded": SamplingParams(12, seed=7),
    "filtered": SamplingParams(12, temperature=0.7, top_k=20, top_p=0.9, seed=3),
    "min_p": SamplingParams(12, min_p=0.1, seed=2**64 + 5),
    "penalties": SamplingParams(12, seed=1, rules=TokenRules(1.5, 0.5, 1.3)),
    "bans": SamplingParams(
        12, temperature=0.0, rules=TokenRules(logit_bias=((5, 9.0), (6, -50.0)), bad_words=((5, 5),))
    ),
    "at least": SamplingParams(12, seed=4, stop_token_ids=tuple(range(100)), rules=TokenRules(min_tokens=6)),
}


@pytest.mark.parametrize("resumed", [0, 5])
def test_the_same_tokens_as_the_built_in_engine(
    resumed: int, matchers: Matchers, make_engine: MakeEngine, checkpoints: dict[str, Path]
) -> None:
    """All kinds of rules are in one batch, from the start and after tokens of another replica."""
    from transformers import AutoModelForCausalLM

    engine = make_engine()
    wanted = run_all(engine, [structs.replace(request(name, PROMPT), sampling=asked) for name, asked in ASKED.items()])
    model = AutoModelForCausalLM.from_pretrained(checkpoints["qwen3"])
    texts = {name: [*PROMPT, *wanted.tokens[name][:resumed]] for name in ASKED}
    outputs: dict[str, list[int]] = {name: [] for name in ASKED}
    rows: dict[int, SamplingRow] = {}
    for index, (name, asked) in enumerate(ASKED.items()):
        sampling = replace(asked, max_tokens=12 - resumed)
        asking = structs.replace(
            request(name, texts[name]), sampling=sampling, resumed_tokens=len(texts[name]) - len(PROMPT)
        )
        rows[index] = SamplingRow(choice_of(asking, ""), texts[name], outputs[name], matchers)
    for _ in range(12 - resumed):
        with torch.no_grad():
            ids = torch.tensor([[*texts[name], *outputs[name]] for name in ASKED])
            logits = model(ids).logits[:, -1].float()
        for name, token in zip(ASKED, sample(rows, logits), strict=True):
            outputs[name].append(token)
    for name in ASKED:
        whole = [*texts[name], *outputs[name]][len(PROMPT) :]
        assert whole[: len(wanted.tokens[name])] == wanted.tokens[name], name


def test_a_grammar_is_followed(matchers: Matchers, tmp_path: Path, demo_model_path: Path) -> None:
    """Only matching tokens remain, also after another replica's beginning; a mismatch is a failure."""
    info = load_checkpoint_info(demo_model_path)
    text = llguidance_form(Grammar.choice(["yes", "no"], "choice"))
    tokens: list[int] = []
    params = SamplingParams(8, seed=1, stop_token_ids=info.eos_token_ids)

    def next_token(prompt: Sequence[int], resumed: int, output: list[int]) -> int:
        choice = TokenChoice(params, resumed, text, str(tmp_path / "failed"))
        return sample({0: SamplingRow(choice, prompt, output, matchers)}, torch.zeros(1, info.vocab_size))[0]

    while not tokens or tokens[-1] not in info.eos_token_ids:
        tokens.append(next_token(PROMPT, 0, tokens))
    next_token(PROMPT, 0, tokens)
    assert not (tmp_path / "failed").exists(), "vLLM may compute one step more before it knows of the end"
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(demo_model_path).decode(tokens[:-1]) in ("yes", "no")
    again = next_token([*PROMPT, tokens[0]], 1, [])
    mask = matchers.matcher(text).allowed(np.array(tokens[:1], dtype=np.int32))
    assert mask is not None
    assert np.unpackbits(mask, bitorder="little")[again]
    next_token([*PROMPT, *info.eos_token_ids[:1]], 1, [])
    assert "does not match" in (tmp_path / "failed").read_text()


DRAFTED = {
    **ASKED,
    "greedy": SamplingParams(12, temperature=0.0),
    "words": SamplingParams(12, 0.0, rules=TokenRules(logit_bias=((5, 9.0), (6, 8.0)), bad_words=((5, 5), (6, 6)))),
}


@settings(max_examples=150)
@given(st.lists(st.sampled_from(sorted(DRAFTED)), min_size=1, max_size=5), st.integers(0, 99), st.data())
def test_drafts_change_no_token(names: list[str], seed: int, data: st.DataObject) -> None:
    """With right, wrong or padded drafts, an answer equals that of one token per step."""
    matchers: Any = None

    def logits_of(text: Sequence[int]) -> torch.Tensor:
        return torch.randn(150, generator=torch.Generator().manual_seed(seed + sum(text[-2:]))) * 2

    def row(name: str, output: list[int]) -> SamplingRow:
        return SamplingRow(TokenChoice(DRAFTED[name], 0, "", ""), PROMPT, output, matchers)

    wanted: list[list[int]] = [[] for _ in names]
    for name, output in zip(names, wanted, strict=True):
        for _ in range(6):
            output += sample({0: row(name, output)}, logits_of([*PROMPT, *output])[None])
    outputs: list[list[int]] = [[] for _ in names]
    rows = {i: row(name, outputs[i]) for i, name in enumerate(names)}
    while min(map(len, outputs)) < 6:
        drafts = [
            [right if data.draw(st.booleans()) else data.draw(st.integers(-1, 149)) for right in answer[len(output) :]]
            for answer, output in zip(wanted, outputs, strict=True)
        ]
        both = list(zip(outputs, drafts, strict=True))
        texts = [[*PROMPT, *output, *guess[:end]] for output, guess in both for end in range(len(guess) + 1)]
        answers = choose_rows(rows, torch.stack([logits_of(text) for text in texts]), drafts)
        for (output, guess), answer in zip(both, answers, strict=True):
            right = len(answer) - 1
            assert answer[:right] == guess[:right]
            assert right == len(guess) or answer[right] != guess[right]
            output += answer
    assert [output[:6] for output in outputs] == wanted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_numbers_fails_alone(temperature: float, matchers: Matchers, tmp_path: Path) -> None:
    """The file exists with its token; the first reason stays, and other rows get their usual tokens."""
    params = SamplingParams(4, temperature, seed=9, stop_token_ids=(17,))
    rows = {
        index: SamplingRow(TokenChoice(params, 0, "", str(tmp_path / name)), PROMPT, [], matchers)
        for index, name in enumerate(("broken", "fine"))
    }
    logits = torch.zeros(3, VOCAB)
    _, alone, _ = sample(rows, logits.clone())
    assert not list(tmp_path.iterdir())
    logits[0, 3] = float("nan")
    logits[2, 5] = 1.0
    assert sample(rows, logits) == [17, alone, 5]
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("broken", NOT_NUMBERS)]
    assert logits[2].tolist() == [0.0] * 5 + [1.0] + [0.0] * (VOCAB - 6)
    (tmp_path / "broken").write_text("the first reason")
    sample(rows, torch.full((3, VOCAB), float("nan")))
    assert (tmp_path / "broken").read_text() == "the first reason"


@pytest.mark.parametrize("sampling", [*ASKED.values(), SamplingParams(0, stop_token_ids=(7,), logprobs=3, seed=-5)])
def test_everything_crosses_to_the_worker(sampling: SamplingParams) -> None:
    """The processor reads from the message exactly the request, except for irrelevant bits of the seed."""
    choice = choice_of(structs.replace(request("r", prompt(5)), sampling=sampling, resumed_tokens=2), "/file")
    fields = vllm_sampling(sampling, choice, {"other": 1})
    assert (fields["temperature"], fields["max_tokens"]) == (0.0, max(1, sampling.max_tokens))
    assert (fields["stop_token_ids"], fields["logprobs"]) == (list(sampling.stop_token_ids), sampling.logprobs)
    arrived = TokenChoice.from_extra_args(msgspec.msgpack.decode(msgspec.msgpack.encode(fields["extra_args"])))
    assert arrived == TokenChoice(replace(sampling, seed=sampling.seed % 2**64), 2, "", "/file")


def test_the_worker_compiles_a_grammar_for_its_tenant(matchers: Matchers) -> None:
    """The tenant crosses to the worker, whose rows share no compiled grammar between tenants."""
    text = llguidance_form(Grammar.choice(["yes", "no"], "choice"))
    for tenant in ("a", "b", "a"):
        asked = structs.replace(request("r", prompt(5)), matcher=matchers.matcher(text, tenant))
        choice = TokenChoice.from_extra_args(choice_of(asked, "/file").to_extra_args())
        assert choice is not None
        assert choice.tenant == tenant
        SamplingRow(choice, PROMPT, [], matchers)
    assert matchers._compiled.cache_info().currsize == 2


def test_a_request_from_elsewhere_has_no_choice() -> None:
    """vLLM's own warm-up passes nothing to the processor."""
    assert TokenChoice.from_extra_args(None) is TokenChoice.from_extra_args({"other": 1}) is None


def test_a_matcher_that_is_no_grammar_is_refused() -> None:
    """It lives in this process, but tokens are chosen in another."""
    with pytest.raises(ValueError, match="no other matcher"):
        choice_of(structs.replace(request("r", prompt(5)), matcher=object()), "/file")  # type: ignore[arg-type]


PROMPTS = st.lists(st.integers(1, 500), max_size=12)


class Load(LoadMirror):
    """``max_num_seqs`` 4 and a queue of 8, for two tenants unless others are given."""

    def __init__(self, *tenants: str) -> None:
        self.meters = EngineMeters()
        shares = dict.fromkeys(tenants or ("flood", "calm"), 1.0)
        settings = VllmSettings("m", max_num_seqs=4, max_waiting_requests=8, tenant_shares=shares)
        super().__init__(settings, self.meters)

    def arrives(
        self, name: str, tokens: int, router: str = "", reservation: int = 0, tenant: str = "default", order: int = 0
    ) -> None:
        asked = structs.replace(
            request(name, [1] * tokens, tenant=tenant), decision=Decision("", router, reservation, 0, 0, "cold")
        )
        asked = structs.replace(asked, order=order)
        self.arrived(LiveRequest(asked, print, choice_of(asked, ""), 0.0, tokens))


@pytest.mark.parametrize(("tenants", "committed"), [(["calm"], (100, 1)), (["flood", "calm"], (100, 0))])
def test_requests_of_a_late_order_are_ahead_of_no_newcomer(tenants: list[str], committed: tuple[int, int]) -> None:
    """Only their tokens in progress are ahead."""
    load = Load(*tenants)
    load.arrives("usual", 100, tenant="calm")
    load.arrives("flex", 1000, tenant="calm", order=2**32)
    report = load.report(0.0)
    assert (report.committed_prefill_tokens, report.committed_sequences) == committed
    assert report.queued_prefill_tokens == 1100
    load.stepped(2, 0.1, 140, 0.1)
    assert load.report(0.0).committed_prefill_tokens == (960 if len(tenants) == 1 else 128)


@given(prompts=PROMPTS, budget=st.integers(1, 300), arrivals=st.lists(st.booleans(), max_size=60))
def test_queued_tokens_are_those_that_a_first_come_scheduler_has_left(
    prompts: list[int], budget: int, arrivals: list[bool]
) -> None:
    """The mirror equals the tokens left in a naive scheduler of ``budget`` tokens per step, oldest first."""
    load, coming, left = Load("default"), deque(enumerate(prompts)), {}
    for arrives in arrivals:
        if arrives and coming:
            number, tokens = coming.popleft()
            left[number] = tokens
            load.arrives(str(number), tokens, f"router {number % 2}", number + 1)
        else:
            room = budget
            for number in list(left):
                part = min(room, left[number])
                left[number] -= part
                room -= part
            load.stepped(len(left), 0.5, budget - room, 0.01)
        report = load.report(0.0)
        assert report.queued_prefill_tokens == report.committed_prefill_tokens == sum(left.values())


def test_tokens_that_nobody_waits_for_are_recomputed_ones() -> None:
    """After a preemption vLLM recomputes prompt tokens of requests that already have their first token."""
    load = Load()
    load.arrives("a", 500, "router", 3)
    load.stepped(1, 0.1, 100, 0.1)
    load.begun(load.live["a"], 400)
    load.stepped(1, 0.1, 40, 0.1)
    assert (load.meters.computed_prompt_tokens, load.meters.recomputed_tokens) == (100, 40)
    report = load.report(1.0)
    assert (report.queued_prefill_tokens, report.admitted) == (0, {"router": 3})


def test_an_overtaking_requests_tokens_count_for_its_own_prompt() -> None:
    """Another tenant's turn comes before the end of an older prompt; a newcomer waits for a turn at most."""
    load = Load()
    load.arrives("old", 1000, tenant="flood")
    load.arrives("short", 100, tenant="calm")
    assert load.report(0.0).committed_prefill_tokens == 100
    load.stepped(2, 0.1, 300, 0.1)
    load.begun(load.live["short"], 0)
    assert [load.queued_tokens, load.live["old"].uncached_tokens] == [800, 800]
    assert (load.report(1.0).queued_prefill_tokens, load.report(1.0).committed_prefill_tokens) == (800, 128)


def test_what_was_computed_of_a_prompt_is_known_also_when_it_was_left_in_a_step() -> None:
    """The step in progress still counts for it, in the order of arrival; one that waited has nothing computed."""
    load = Load()
    for name, tokens in (("first", 1000), ("waiting", 500), ("answered", 300)):
        load.arrives(name, tokens)
    first, waiting, answered = (load.live[name] for name in ("first", "waiting", "answered"))
    load.stepped(1, 0.1, 400, 0.1)
    load.ended(first, left=True)
    load.ended(waiting, left=True)
    assert (load.left, load.queued_tokens) == ([first, waiting], 300)
    load.stepped(1, 0.1, 400, 0.1)
    assert [live.prefilled for live in (first, waiting)] == [(800, 0), (0, 0)]
    load.left = []
    load.stepped(1, 0.1, 44, 0.1)
    load.begun(answered, 256)
    assert answered.prefilled == (300, 256)
    load.ended(answered, left=True)
    assert load.left == [], "it had its first token"


def test_running_and_waiting_requests() -> None:
    """A request waits until a step's figures count it as running; an ended one counts for neither at once."""
    load = Load()
    for name in "abc":
        load.arrives(name, 10)
    assert (load.running, load.waiting) == (0, 3)
    load.stepped(2, 0.5, 20, 0.01)
    load.begun(load.live["a"], 0)
    assert (load.running, load.waiting, load.queued_tokens) == (2, 1, 10)
    samples = {dict(labels).get("state"): value for _, labels, value in load.gauges(10, 4, 2, ())}
    assert [samples[state] for state in ("used", "cached", "free")] == [3, 4, 3]
    for name in "abc":
        load.ended(load.live[name])
    assert (load.running, load.waiting, load.line.used) == (0, 0, 0)


def test_the_queue_is_bounded_and_its_end_is_for_others() -> None:
    """Among several tenants one alone fills seven eighths of the queue; a request with a token waits no more."""
    load = Load()
    for number in range(7):
        load.arrives(str(number), 10, tenant="flood")
    with pytest.raises(QueueFull):
        load.check("flood")
    load.check("calm")
    load.begun(load.live["0"], 0)
    load.begun(load.live["0"], 0)
    load.check("flood")
    load.arrives("more", 10, tenant="flood")
    with pytest.raises(QueueFull):
        load.check("flood")
    load.ended(load.live["1"])
    load.check("flood")


def test_only_so_many_routers_are_remembered() -> None:
    """Routers come and go for as long as a replica lives."""
    load = Load()
    for number in range(ROUTERS_REMEMBERED + 10):
        load.arrives(str(number), 0, f"router {number}", 1)
        load.ended(load.live[str(number)])
    admitted = load.report(0.0).admitted
    assert (len(admitted), next(iter(admitted))) == (ROUTERS_REMEMBERED, "router 10")


def test_copies_are_no_prompt_and_say_nothing_of_the_rate() -> None:
    """Their tokens belong to no prompt; tokens that a copy failed to bring are queued again."""
    load = Load()
    load.arrives("waits", 10)
    load.copies()
    load.stepped(1, 0.1, 1, 0.5)
    meters = load.meters
    assert (meters.computed_prompt_tokens, meters.recomputed_tokens, meters.prefill_tokens_per_s) == (0, 0, 0.0)
    load.live["waits"].uncached_tokens = 300
    assert load.queued_tokens == 300
    load.copies()
    load.stepped(1, 0.1, 201, 0.1)
    assert (meters.computed_prompt_tokens, load.queued_tokens, meters.prefill_tokens_per_s) == (200, 100, 2000)
