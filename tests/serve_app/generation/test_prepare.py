"""From requests to keys: saved prefixes, blocks that tenants share, and the placement of cold prompts."""

import asyncio
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from router.protocol.block_hash import extend_chain, split_chain, system_prompt_key
from serve_app.api.request import ChatRequest, CompletionRequest, ToolUse
from serve_app.checkpoints.adapter_registry import AdapterRegistry
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.config.prompts import PublicPromptConfig
from serve_app.engine.protocol import EngineRequest, TokenRules
from serve_app.errors import ContextLengthExceeded, InvalidRequest
from serve_app.generation.prepare import Limits, Preparer
from serve_app.prompts.registry import PromptNotFound, Prompts
from serve_app.structured.grammar import Grammar
from serve_app.tenants import Tenant, Tenants
from serve_app.tokenization.tokenizer import PromptTokenizer
from tests.harness.eventually import let_others_run

SECRET = b"s" * 32
RULES = "You are a careful clerk. Name the clause, the date and the amount before any advice. " * 3


def preparer_of(tokenizer: PromptTokenizer, prompts: Prompts | None = None, **more: Any) -> Preparer:
    info, limits = load_checkpoint_info(Path(tokenizer.pretrained.name_or_path)), Limits(4096, 8, 300.0)
    used = Prompts() if prompts is None else prompts
    return Preparer(info, tokenizer, Tenants([], SECRET), SECRET, AdapterRegistry("demo"), limits, used, **more)


@pytest.fixture(scope="module")
def preparer(tokenizer: PromptTokenizer) -> Preparer:
    return preparer_of(tokenizer)


def ask(preparer: Preparer, tenant: Tenant, *messages: tuple[str, str], **more: Any) -> EngineRequest:
    chat = ChatRequest(
        model="demo", messages=tuple({"role": role, "content": content} for role, content in messages), **more
    )
    return asyncio.run(preparer.prepare(chat, tenant, "id"))[0]


def prepare(preparer: Preparer, *messages: tuple[str, str], **more: Any) -> EngineRequest:
    return ask(preparer, Tenant("default"), *messages, **{"save_system_prompt_kv_cache": True, **more})


def test_the_formatted_system_prompt_is_saved(preparer: Preparer, tokenizer: PromptTokenizer) -> None:
    """Its tokens under the chat template are a prefix of the request's; the key is of its text, in the scope."""
    generation = prepare(preparer, ("system", RULES), ("user", "Hi"))
    text = tokenizer.template.render([{"role": "system", "content": RULES}], add_generation_prompt=False).text
    (save,) = generation.saves
    assert save.tokens == len(tokenizer.encode(text, generation.root).token_ids) > 16
    assert save.key == system_prompt_key(generation.root, text)
    assert save.ttl_s == 300.0


def test_a_conversation_keeps_its_place_and_the_chain_of_its_history(preparer: Preparer) -> None:
    """Each turn extends the chain, so it finds all earlier blocks; equal system prompts are one save per salt."""
    talk = [("system", RULES), ("user", "First?")]
    before = prepare(preparer, *talk)
    for turn in range(4):
        talk += [("assistant", f"Answer {turn}. " * 4), ("user", f"Question {turn}? " * 5)]
        now = prepare(preparer, *talk)
        assert (now.placement_key, now.saves) == (before.placement_key, before.saves)
        assert shared_blocks(before, now) >= len(before.block_hashes) // 16 - 1
        before = now
    salted = prepare(preparer, *talk, cache_salt="x")
    assert salted.saves[0].key != before.saves[0].key


def test_nothing_is_saved_without_the_flag_or_a_system_prompt(preparer: Preparer) -> None:
    """Both are no-ops, not errors."""
    assert prepare(preparer, ("user", "Hi")).saves == ()
    assert prepare(preparer, ("user", "Hi"), apply_chat_template=False).saves == ()
    assert prepare(preparer, ("system", ""), ("user", "Hi"), apply_chat_template=False).saves == ()
    assert prepare(preparer, ("system", RULES), ("user", "Hi"), save_system_prompt_kv_cache=False).saves == ()


def test_whether_kv_is_stored_is_the_tenants_default_and_the_requests_to_refuse(preparer: Preparer) -> None:
    """A request may store less than its tenant's setting, never more, and cannot save a prompt it does not store."""
    passing = Tenant("passing", store_kv=False)
    for tenant, wanted, stores in ((Tenant("t"), None, True), (Tenant("t"), True, True), (Tenant("t"), False, False),
                                   (passing, None, False), (passing, False, False)):  # fmt: skip
        generation = ask(preparer, tenant, ("user", "hi"), store_kv=wanted)
        assert (generation.store_kv, generation.store_kv) == (stores, stores)
    with pytest.raises(InvalidRequest, match="store_kv cannot be true"):
        ask(preparer, passing, ("user", "hi"), store_kv=True)
    for tenant, wanted in ((Tenant("t"), False), (passing, None)):
        with pytest.raises(InvalidRequest, match="save_system_prompt_kv_cache cannot be true"):
            ask(preparer, tenant, ("user", "hi"), store_kv=wanted, save_system_prompt_kv_cache=True)


def test_a_system_prompts_merging_last_token_is_not_saved(preparer: Preparer, tokenizer: PromptTokenizer) -> None:
    """Raw text ends inside a word, where the request's ids differ; only the common ids are saved."""
    root = bytes(16)
    in_whole = tokenizer.encode(RULES, root).token_ids.tolist()
    cut = next(
        end
        for end in range(len(RULES) - 1, 40, -1)
        if (ids := tokenizer.encode(RULES[:end], root).token_ids.tolist()) != in_whole[: len(ids)]
    )
    whole = prepare(preparer, ("system", RULES[:cut]), ("user", "\n"), apply_chat_template=False)
    generation = prepare(preparer, ("system", RULES[:cut]), ("user", RULES[cut:]), apply_chat_template=False)
    alone = tokenizer.encode(RULES[:cut], generation.root, add_special_tokens=True).token_ids
    (save,) = generation.saves
    assert 0 < save.tokens < len(alone) == whole.saves[0].tokens, "counted again for each prompt"
    assert np.array_equal(alone[: save.tokens], generation.token_ids[: save.tokens])
    assert alone[save.tokens] != generation.token_ids[save.tokens]


@pytest.fixture(scope="module")
def shop(demo_model_path: Path) -> Preparer:
    """Return a preparer with one public prompt, in two versions."""
    versions = (("1", RULES), ("2", RULES + "Be brief."))
    prompts = Prompts(PublicPromptConfig(name="clerk", version=version, text=text) for version, text in versions)
    return preparer_of(PromptTokenizer(demo_model_path), prompts)


def shared_blocks(one: EngineRequest, other: EngineRequest) -> int:
    """Return the number of equal leading hashes, after which none may be equal."""
    chains = [list(split_chain(generation.block_hashes)) for generation in (one, other)]
    shared = next((i for i, pair in enumerate(zip(*chains, strict=False)) if pair[0] != pair[1]), len(chains[0]))
    assert not set(chains[0][shared:]) & set(chains[1][shared:])
    return shared


ACME, ZETA = Tenant("acme"), Tenant("zeta")
LONG = "Which clause is it, and since when? " * 8


def test_tenants_share_the_blocks_inside_a_public_prompt(shop: Preparer) -> None:
    """This needs no flag, stops with another system prompt, and covers nothing of the question."""
    one, other = (ask(shop, tenant, ("system", RULES), ("user", LONG)) for tenant in (ACME, ZETA))
    assert np.array_equal(one.token_ids, other.token_ids)
    public = one.scope.public_blocks
    assert shared_blocks(one, other) == public == other.scope.public_blocks >= 2
    assert len(one.block_hashes) // 16 > public + 2
    assert one.block_hashes == extend_chain(one.root, public, one.token_ids, 16)
    assert one.placement_key == other.placement_key, "an uncached public prompt is computed once"
    longer = [ask(shop, tenant, ("system", RULES + "Our secret is 42. " * 9)) for tenant in (ACME, ZETA)]
    assert shared_blocks(*longer) == longer[0].scope.public_blocks >= 2, "the blocks wholly inside"
    assert longer[0].placement_key != longer[1].placement_key
    foreign = [ask(shop, tenant, ("system", "My own. " + RULES), ("user", LONG)) for tenant in (ACME, ZETA)]
    assert [generation.scope.public_blocks for generation in foreign] == [0, 0]
    assert shared_blocks(*foreign) == 0
    assert foreign[0].placement_key != foreign[1].placement_key


def test_trust_groups_share_everything_and_salts_divide_them(shop: Preparer) -> None:
    """Members of one group with the same cache_salt still share: a salt divides scopes, but names no tenant."""
    members = [Tenant(name, "friends") for name in ("acme", "zeta")]
    one, other = (ask(shop, tenant, ("system", "Ours alone. " * 9), ("user", LONG)) for tenant in members)
    assert one.block_hashes == other.block_hashes
    assert (one.tenant, other.tenant) == ("acme", "zeta"), "each on its own account"
    salted = [ask(shop, member, ("user", LONG), cache_salt=salt) for member, salt in zip(members, "xy", strict=True)]
    assert shared_blocks(*salted) == 0
    same = [ask(shop, member, ("user", LONG), cache_salt="x") for member in members]
    assert same[0].block_hashes == same[1].block_hashes == salted[0].block_hashes
    assert shared_blocks(ask(shop, ACME, ("user", LONG)), ask(shop, members[0], ("user", LONG))) == 0
    assert shared_blocks(ask(shop, Tenant("friends"), ("user", LONG)), ask(shop, members[0], ("user", LONG))) == 0


def test_a_reference_puts_the_prompt_first(shop: Preparer) -> None:
    """The result is as if the client had sent it: a chat's system message, the beginning of a completion's text."""
    named = ask(shop, ACME, ("user", LONG), prompt_ref="clerk@1")
    written = ask(shop, ACME, ("system", RULES), ("user", LONG))
    assert np.array_equal(named.token_ids, written.token_ids)
    assert named.block_hashes == written.block_hashes
    assert named.placement_key == written.placement_key
    assert not np.array_equal(ask(shop, ACME, ("user", LONG), prompt_ref="clerk@2").token_ids, named.token_ids)

    def complete(*prompts: str | tuple[int, ...], **more: Any) -> list[EngineRequest]:
        request = CompletionRequest(model="demo", prompts=prompts, **more)
        return asyncio.run(shop.prepare(request, ACME, "id"))

    texts, whole = complete("One.", "Two.", prompt_ref="clerk@1"), complete(RULES + "One.", RULES + "Two.")
    assert [t.block_hashes for t in texts] == [w.block_hashes for w in whole]
    assert all(generation.scope.public_blocks for generation in texts)
    ids = tuple(whole[0].token_ids.tolist())
    assert complete(ids)[0].block_hashes == whole[0].block_hashes, "ids are recognised like text"
    with pytest.raises(InvalidRequest, match="text, not token ids"):
        complete(ids, prompt_ref="clerk@1")
    with pytest.raises(PromptNotFound, match=r"clerk@1, clerk@2"):
        ask(shop, ACME, ("user", "Hi"), prompt_ref="clerk@9")


def test_a_prompt_cache_key_changes_only_the_placement(shop: Preparer) -> None:
    """Equal keys of two tenants share nothing, two keys with one prompt have one chain; placement follows the key.

    docs: caching
    """
    keyed = [ask(shop, tenant, ("user", LONG), prompt_cache_key="k") for tenant in (ACME, ZETA)]
    assert shared_blocks(*keyed) == 0
    assert keyed[0].placement_key != keyed[1].placement_key
    other = ask(shop, ACME, ("user", LONG), prompt_cache_key="another")
    assert other.block_hashes == keyed[0].block_hashes == ask(shop, ACME, ("user", LONG)).block_hashes
    assert other.placement_key != keyed[0].placement_key
    assert ask(shop, ACME, ("user", "Else."), prompt_cache_key="k").placement_key == keyed[0].placement_key


def test_a_child_is_placed_where_its_parent_is(shop: Preparer) -> None:
    """Its own key would take it elsewhere while the parent's prefix is being computed. Hints are names by tenant."""
    parent = ask(shop, ACME, ("user", LONG), prompt_cache_key="k", session="k")
    fork = {"session": "child", "parent": "k", "final": True, "expected_tokens": 5}
    child = ask(shop, ACME, ("user", LONG + " More."), prompt_cache_key="child", **fork)
    assert child.placement_key == parent.placement_key
    assert (child.parent, child.final, child.expected_tokens) == (parent.session, True, 5)
    strange = ask(shop, ZETA, ("user", LONG), prompt_cache_key="child", **fork)
    assert strange.placement_key != parent.placement_key and strange.parent != parent.session
    liar = ask(shop, ACME, ("user", LONG), session="x", parent="x", expected_tokens=2**40, max_tokens=7)
    assert (liar.parent, liar.expected_tokens) == ("", 7)


@pytest.mark.parametrize("kind", ["messages", "text", "prompt", "ids", "reference", "tools"])
def test_a_prompt_that_cannot_fit_is_refused_before_it_is_read(
    kind: str, tokenizer: PromptTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text longer than all of a model's tokens together is not rendered, tokenized or hashed.

    Template output of anything but contents is measured after rendering.
    """
    prompts = Prompts([PublicPromptConfig(name="big", version="1", text="word " * 200_000)])
    preparer = preparer_of(tokenizer, prompts)
    asyncio.run(prompts.keep_current(tokenizer))
    for name in ("render_async", "_look_up", "encode_ids")[kind == "tools" :]:
        monkeypatch.setattr(tokenizer, name, lambda *_, **__: pytest.fail("it was read"))
    text = "x" * 1_000_000
    request: dict[str, ChatRequest | CompletionRequest] = {
        "messages": ChatRequest(model="demo", messages=({"role": "user", "content": ""},) * 4096),
        "text": ChatRequest(model="demo", messages=({"role": "user", "content": text},)),
        "prompt": CompletionRequest(model="demo", prompts=(text,)),
        "ids": CompletionRequest(model="demo", prompts=((1,) * 4096,)),
        "reference": CompletionRequest(model="demo", prompts=("a",) * 128, prompt_ref="big@1"),
        "tools": ChatRequest(
            model="demo",
            messages=({"role": "user", "content": "Hi"},),
            tool_use=ToolUse(tools=({"type": "function", "function": {"name": "look", "description": text}},)),
        ),
    }
    with pytest.raises(ContextLengthExceeded, match="at least"):
        asyncio.run(preparer.prepare(request[kind], Tenant("default"), "id"))


def test_the_first_prompt_that_is_too_long_is_the_last_that_is_read(
    preparer: Preparer, tokenizer: PromptTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred long prompts cost only as much as the first, which is found too long."""
    looked_up: list[str] = []
    look_up = tokenizer._look_up
    monkeypatch.setattr(tokenizer, "_look_up", lambda text, *more: looked_up.append(text) or look_up(text, *more))
    request = CompletionRequest(model="demo", prompts=("a b c d e f " * 2000,) * 100)
    with pytest.raises(ContextLengthExceeded, match="The prompt is too long"):
        asyncio.run(preparer.prepare(request, Tenant("default"), "id"))
    assert len(looked_up) == 1


def test_claude_code_finds_the_numbers_in_a_length_error(preparer: Preparer) -> None:
    """Its own patterns match: it retries with fewer tokens, or shortens its conversation. (docs: agents)"""
    tokens = len(prepare(preparer, ("user", "Hi")).token_ids)
    with pytest.raises(ContextLengthExceeded) as refused:
        prepare(preparer, ("user", "Hi"), max_tokens=32_000)
    assert f"input length and `max_tokens` exceed context limit: {tokens} + 32000 > 4096" in refused.value.message
    for words, most in (("a b c d e f " * 2000, 4095), ("x" * 10**6, 4095)):
        with pytest.raises(ContextLengthExceeded) as refused:
            prepare(preparer, ("user", words))
        found = re.search(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", refused.value.message, re.IGNORECASE)
        assert found is not None
        assert (int(found[1]) > most, int(found[2])) == (True, most)


def test_rules_go_with_the_request(preparer: Preparer, tokenizer: PromptTokenizer) -> None:
    """They are token ids; a grammar is in llguidance's form, and the model's end tokens always end it."""
    plain = prepare(preparer, ("user", "Hi"))
    assert (plain.sampling.rules, plain.sampling.logprobs, plain.grammar) == (None, None, "")
    found = prepare(
        preparer, ("user", "Hi"), bad_words=("the",), presence_penalty=0.5, logit_bias=((5, 1.0),), min_tokens=2,
        stop_token_ids=(7,), include_stop_str_in_output=True, logprobs=3, min_p=0.1, ignore_eos=True,
        grammar=Grammar.json_object("response_format"),
    )  # fmt: skip
    root = b"r" * 16
    words = tuple(tuple(tokenizer.encode(text, root).token_ids.tolist()) for text in ("the", " the"))
    assert found.sampling.rules == TokenRules(0.5, 0.0, 1.0, ((5, 1.0),), 2, words)
    assert (found.sampling.stop_token_ids, found.sampling.shown_stop_token_ids) == ((2, 0, 7), (7,))
    assert (found.sampling.logprobs, found.sampling.min_p) == (3, 0.1)
    assert "object" in found.grammar
    assert prepare(preparer, ("user", "Hi"), ignore_eos=True).sampling.stop_token_ids == ()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": ((4096, 1.0),)}, "logit_bias"),
        ({"stop_token_ids": (4096,)}, "stop_token_ids"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"grammar": Grammar.regex("(", "structured_outputs.regex")}, "structured_outputs.regex"),
    ],
)
def test_rules_that_this_model_cannot_follow_are_a_400(preparer: Preparer, fields: dict[str, Any], param: str) -> None:
    for _ in range(2):  # a mistake is not remembered as valid
        with pytest.raises(InvalidRequest) as caught:
            prepare(preparer, ("user", "Hi"), **fields)
        assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 1.0}, {"frequency_penalty": 1.0}, {"repetition_penalty": 1.1}, {"logit_bias": ((1, 1.0),)},
        {"min_p": 0.1}, {"bad_words": ("a",)}, {"logprobs": 0}, {"prompt_logprobs": 0},
        {"grammar": Grammar.json_object("response_format")},
    ],
    ids=str,
)  # fmt: skip
def test_a_simulated_engine_refuses_options_over_logits(tokenizer: PromptTokenizer, fields: dict[str, Any]) -> None:
    """The error names the field and the engine; other options work there."""
    simulated = preparer_of(tokenizer, simulated=True)
    with pytest.raises(InvalidRequest, match="engine is simulated") as caught:
        prepare(simulated, ("user", "Hi"), **fields)
    assert caught.value.param == ("response_format" if "grammar" in fields else next(iter(fields)))
    assert prepare(simulated, ("user", "Hi"), min_tokens=2, stop_token_ids=(5,)).sampling.rules is not None


def test_an_echo_is_the_prompt_as_text_and_the_last_message_can_be_continued(
    preparer: Preparer, tokenizer: PromptTokenizer
) -> None:
    """No template text follows that message."""
    ids = tuple(tokenizer.encode("Beta", b"r" * 16).token_ids.tolist())
    wanted = CompletionRequest(model="demo", prompts=("Alpha", ids), n=2, max_tokens=4, echo=True)
    found = asyncio.run(preparer.prepare(wanted, Tenant("default"), "id"))
    assert [one.echo for one in found] == ["Alpha", "Alpha", "Beta", "Beta"]
    went_on = prepare(
        preparer, ("user", "Hi"), ("assistant", "The answer"), add_generation_prompt=False, continue_final_message=True
    )
    text = tokenizer.text_of(went_on.token_ids.tolist())
    assert text.endswith("\nThe answer")


def test_log_probabilities_of_prompts_are_computed_where_they_are_shown(preparer: Preparer) -> None:
    """In each choice of a completion and once in a chat, without cached blocks; an echo counts the end token too."""
    scored = CompletionRequest(model="demo", prompts=("Alpha", "Beta"), n=2, max_tokens=1, echo=True, logprobs=3)
    found = asyncio.run(preparer.prepare(scored, Tenant("default"), "id"))
    assert [one.sampling.prompt_logprobs for one in found] == [3] * 4
    assert not any(one.reads_kv or one.reads_kv for one in found)
    ends = found[0].sampling.stop_token_ids
    assert ends
    assert found[0].sampling.shown_stop_token_ids == ends, "the answer has the token that a program expects"
    quiet = asyncio.run(preparer.prepare(replace(scored, echo=False), Tenant("default"), "id"))[0]
    assert (quiet.sampling.shown_stop_token_ids, quiet.reads_kv, quiet.reads_kv) == ((), True, True)
    asked = ChatRequest(model="demo", messages=({"role": "user", "content": "Hi"},), n=3, prompt_logprobs=2)
    found = asyncio.run(preparer.prepare(asked, Tenant("default"), "id"))
    assert [one.sampling.prompt_logprobs for one in found] == [2, None, None]


def test_log_probabilities_of_prompts_in_one_answer_are_bounded(
    preparer: Preparer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are 1 + N for each token of each choice."""
    asked = CompletionRequest(model="demo", prompts=((5,) * 40, (6,) * 10), n=2, max_tokens=0, prompt_logprobs=4)
    monkeypatch.setattr("serve_app.generation.rules.MAX_TOLD", 500)
    assert len(asyncio.run(preparer.prepare(asked, Tenant("default"), "id"))) == 4
    monkeypatch.setattr("serve_app.generation.rules.MAX_TOLD", 499)
    for wanted in (asked, replace(asked, prompt_logprobs=None, echo=True, logprobs=4)):
        with pytest.raises(InvalidRequest, match="at most 499") as caught:
            asyncio.run(preparer.prepare(wanted, Tenant("default"), "id"))
        assert caught.value.param == ("logprobs" if wanted.echo else "prompt_logprobs")


def test_choices_have_seeds_of_their_own(preparer: Preparer) -> None:
    """Otherwise all would be one answer. A seed gives the same choices each time, no seed gives new ones."""

    def seeds(seed: int | None) -> list[int]:
        asked = ChatRequest(model="demo", messages=({"role": "user", "content": "Hi"},), n=3, seed=seed)
        generations = asyncio.run(preparer.prepare(asked, Tenant("default"), "id"))
        return [generation.sampling.seed for generation in generations]

    assert len(set(seeds(7))) == 3
    assert seeds(7) == seeds(7)
    assert seeds(7) != seeds(8)
    assert len({*seeds(None), *seeds(None)}) == 6


def test_prompts_that_become_public_are_shared_from_then_on(demo_model_path: Path) -> None:
    """A tenant with earlier requests shares them too: the cached data of its scope is dropped."""
    tokenizer, prompts = PromptTokenizer(demo_model_path), Prompts()
    preparer = preparer_of(tokenizer, prompts)
    before = [ask(preparer, tenant, ("system", RULES), ("user", LONG)) for tenant in (ACME, ZETA)]
    assert shared_blocks(*before) == 0
    asyncio.run(prompts.replace(tokenizer, configs=[PublicPromptConfig(name="clerk", version="1", text=RULES)]))
    preparer.prompts_changed()
    after = [ask(preparer, tenant, ("system", RULES), ("user", LONG)) for tenant in (ACME, ZETA)]
    assert shared_blocks(*after) == after[0].scope.public_blocks >= 2


def test_a_round_of_the_loop_prepares_few_prompts_and_each_tenant_has_turns(
    preparer: Preparer, tokenizer: PromptTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four requests with 64 prompts each, at most two begin in a round; another tenant's prompts come in between."""
    now, rounds = 0, list[int]()
    encode = type(tokenizer).encode_async

    async def counted(*arguments: Any, **named: Any) -> Any:
        rounds.append(now)
        return await encode(*arguments, **named)

    async def run() -> int:
        nonlocal now
        many = CompletionRequest(model="demo", prompts=tuple(f"{number} is due" for number in range(64)))
        flood = [asyncio.create_task(preparer.prepare(many, Tenant("flood"), f"{at}")) for at in range(4)]
        while len(rounds) < 40:
            await let_others_run()
            now += 1
        one = CompletionRequest(model="demo", prompts=("What is due?", "And when?", "Who pays?"))
        other, began = asyncio.create_task(preparer.prepare(one, Tenant("other"), "one")), now
        while not other.done():
            await let_others_run()
            now += 1
        took = now - began
        while not all(task.done() for task in flood):
            await let_others_run()
            now += 1
        return took

    with monkeypatch.context() as patch:
        patch.setattr(type(tokenizer), "encode_async", counted)
        assert asyncio.run(run()) <= 12
    assert len(rounds) == 4 * 64 + 3
    assert max(Counter(rounds[4:]).values()) <= 2
