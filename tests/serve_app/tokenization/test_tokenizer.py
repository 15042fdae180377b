"""The cached tokenizer equals tokenizing and hashing from scratch, for any tokenizer and text; repaired files."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers, processors
from typer.testing import CliRunner

from router.protocol.block_hash import common_blocks, extend_chain, split_chain
from serve_app.cli.main import app
from serve_app.errors import InvalidRequest
from serve_app.tokenization.chat_template import ChatTemplate
from serve_app.tokenization.repairs import REPAIRS, Chat, Repairs, left_out
from serve_app.tokenization.segments import PublicTokens
from serve_app.tokenization.tokenizer import PromptTokenizer
from tests.harness.programs import programs_here
from tests.serve_app.tokenization.variants import sentencepiece_like, variant_of

ROOT, OTHER_ROOT = b"r" * 16, b"o" * 16
PIECES = ["<|im_start|>", "<|im_end|>", "<|im_", "|>", "<|", "\n", "  ", " a", "system", "é", "e\u0301"]
TEXTS = st.lists(
    st.one_of(
        st.sampled_from([*PIECES, "word " * 250]), st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    ),
    max_size=14,
).map("".join)


def bos_around(tokenizer: Tokenizer) -> None:
    """NFC before everything, a bos before and an eos after a bare text."""
    tokenizer.normalizer = normalizers.NFC()
    ids = tokenizer.get_vocab()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        special_tokens=[(token, ids[token]) for token in ("<|im_start|>", "<|im_end|>")],
    )


def _space_first(tokenizer: Tokenizer) -> None:
    """Only the first part of a text gets a space, so no cut is exact."""
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _greedy_end(tokenizer: Tokenizer) -> None:
    """An added token that swallows the spaces after it."""
    tokenizer.add_special_tokens([AddedToken("<|greedy|>", special=True, normalized=False, rstrip=True)])


VARIANTS = {"plain": None, "bos": bos_around, "first": _space_first, "greedy": _greedy_end}
SMALL: dict[str, Any] = {"cache_bytes": 60_000, "block_size": 4}


@pytest.fixture(scope="module")
def variants(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, PromptTokenizer]:
    parent = tmp_path_factory.mktemp("tokenizers")
    made = {
        name: PromptTokenizer(variant_of(demo_model_path, parent / name, change), **SMALL)
        for name, change in VARIANTS.items()
    }
    made["ahead"] = PromptTokenizer(demo_model_path, lookahead=3, **SMALL)
    return {**made, "sentencepiece": sentencepiece_like(parent / "sentencepiece", demo_model_path, **SMALL)}


@pytest.mark.parametrize("name", [*VARIANTS, "ahead", "sentencepiece"])
@settings(max_examples=80)
@given(
    public=st.lists(TEXTS, max_size=3), texts=st.lists(TEXTS, min_size=1, max_size=4), special=st.booleans(),
)  # fmt: skip
def test_encoding_equals_tokenizing_and_hashing_from_nothing(
    variants: dict[str, PromptTokenizer], name: str, public: list[str], texts: list[str], special: bool
) -> None:
    """It holds for any text after any others, with changing public prompts, while parts are evicted.

    A chain changes its root at the end of the public part, which a drafter's lookahead shortens.
    """
    cached = variants[name]
    prompts = [cached.encode(text, OTHER_ROOT, add_special_tokens=special).token_ids for text in public]
    for known in (prompts, prompts[:1]):
        cached.set_public(known)
        history = "".join(public[:1])
        for text in texts:
            history += text
            for whole, public_root in ((history, b""), (history, OTHER_ROOT), (text, OTHER_ROOT)):
                encoded = cached.encode(whole, ROOT, public_root=public_root, add_special_tokens=special)
                ids = np.array(cached.pretrained(whole, add_special_tokens=special)["input_ids"], dtype=np.int32)
                assert encoded.token_ids.dtype == np.int32
                assert encoded.token_ids.tolist() == ids.tolist()
                blocks = max(0, PublicTokens(known).count(ids) - cached._lookahead) // 4 if public_root else 0
                assert encoded.public_blocks == blocks
                assert encoded.block_hashes == extend_chain(public_root + ROOT if blocks else ROOT, blocks, ids, 4)
                assert cached.encode_ids(ids.tolist(), ROOT, public_root).block_hashes == encoded.block_hashes


@given(ids=st.lists(st.integers(0, 4095), min_size=1, max_size=40), at=st.integers(0, 39), public=st.booleans())
def test_equal_ids_with_another_identity_share_no_hash_from_the_difference_on(
    variants: dict[str, PromptTokenizer], ids: list[int], at: int, public: bool
) -> None:
    """It is what is hashed, and what makes a block public; before the difference all hashes are shared."""
    cached, at = variants["plain"], min(at, len(ids) - 1)
    cached.set_public([np.array(ids, dtype=np.int32)])
    root, identity = OTHER_ROOT if public else b"", np.array(ids, dtype=np.int32)
    identity[at] = -1
    plain, other = cached.encode_ids(ids, ROOT, root), cached.encode_ids(ids, ROOT, root, identity=identity)
    assert other.token_ids.tolist() == plain.token_ids.tolist() == plain.identity.tolist()
    assert common_blocks(plain.block_hashes, other.block_hashes) == at // 4
    assert not set(split_chain(plain.block_hashes[16 * (at // 4) :])) & set(split_chain(other.block_hashes))
    assert other.public_blocks == (at // 4 if public else 0)


@pytest.mark.parametrize("more", range(4))
def test_a_block_is_public_with_the_tokens_that_change_its_kv(demo_model_path: Path, more: int) -> None:
    """The next cached part of a prompt decides it, wherever in a block the part before it ends."""
    cached = PromptTokenizer(demo_model_path, lookahead=3, block_size=4)
    begin = " a" * (1100 + more) + "<|im_end|>"
    public = cached.encode(begin + " one two three four five six seven", ROOT).token_ids
    cached.set_public([public])
    for text in (begin + " one two three four five six seven eight", begin + " other words"):
        encoded = cached.encode(text, ROOT, public_root=OTHER_ROOT)
        shared = PublicTokens([public]).count(encoded.token_ids)
        assert encoded.public_blocks == (shared - 3) // 4
        whole = extend_chain(OTHER_ROOT + ROOT, encoded.public_blocks, encoded.token_ids, 4)
        assert encoded.block_hashes == whole
    assert cached.stats().hits == 1


def test_only_tokenizers_with_exact_cuts_are_cut(variants: dict[str, PromptTokenizer]) -> None:
    """A space for the first part, or a token that swallows spaces, makes whole texts the unit."""
    exact = {name for name, cached in variants.items() if cached._segmenter.exact}
    assert exact == {"plain", "bos", "ahead", "sentencepiece"}


def test_a_text_is_never_taken_for_one_encoded_differently(demo_model_path: Path, tmp_path: Path) -> None:
    """Each way of encoding has its own cache; text that no tokenizer can read is the client's error."""
    cached = PromptTokenizer(variant_of(demo_model_path, tmp_path / "bos", bos_around), block_size=4)
    for special in (True, False):
        for public_root in (b"", OTHER_ROOT, OTHER_ROOT[:8]):
            encoded = cached.encode("X", ROOT, public_root=public_root, add_special_tokens=special)
            assert encoded.token_ids.tolist() == cached.pretrained("X", add_special_tokens=special)["input_ids"]
    assert cached.stats().hits == 0
    with pytest.raises(InvalidRequest, match="surrogate"):
        cached.encode("a\ud800b", ROOT)


def test_ids_outside_the_vocabulary_are_refused(tokenizer: PromptTokenizer) -> None:
    """This includes very large ids."""
    for wrong in (-1, tokenizer.vocab_size, 10**30):
        with pytest.raises(InvalidRequest, match="Token ids must be from 0 to 4095"):
            tokenizer.encode_ids([1, wrong], ROOT)


PLAIN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ calls(m) }}\n{% endfor %}"
CALLS = "{% macro calls(m) %}{% for c in m.tool_calls or [] %} <{{ c.function | tojson }}>{% endfor %}{% endmacro %}"
TOOLS = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"


def made(template: str, source: Path, directory: Path) -> ChatTemplate:
    """Return a template on the demo model's tokenizer."""
    path = variant_of(source, directory / "model")
    (path / "chat_template.jinja").write_text(template)
    return PromptTokenizer(path).template


def call(call_id: str, name: str = "f", **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def said(role: str, content: str = "", *calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **({"tool_calls": [*calls]} if calls else {}), **more}


def refusing(when: str) -> str:
    """Return a template that refuses a conversation if ``when``, about each message ``m``, is true."""
    refused = f"{{% for m in messages %}}{{% if {when} %}}{{{{ raise_exception('no') }}}}{{% endif %}}{{% endfor %}}"
    return CALLS + refused + TOOLS + PLAIN


U, V, A, B = said("user", "u"), said("user", "v"), said("assistant", "a"), said("assistant", "b")
S, T = said("system", "s"), said("system", "t")
R = said("tool", "r", tool_call_id="call_12345")
C = said("assistant", "", call("call_12345", x=1))
NEEDS = yaml.safe_load(Path(__file__).with_name("needs.yaml").read_text())


@pytest.mark.parametrize("name", NEEDS)
def test_a_template_gets_the_form_that_it_takes(name: str, demo_model_path: Path, tmp_path: Path) -> None:
    need = NEEDS[name]
    shown = made(need["template"], demo_model_path, tmp_path)
    assert shown.render(need["messages"], add_generation_prompt=False).text == need["prompt"]
    assert REPAIRS[name].said in shown.notes


def test_a_template_that_takes_everything_gets_it_as_it_is(demo_model_path: Path, tmp_path: Path) -> None:
    shown = made(CALLS + TOOLS + PLAIN, demo_model_path, tmp_path)
    assert shown.notes == []
    told = "[system] s\n[user] u\n[user] v\n[system] t\n[assistant] a\n[assistant] b\n"
    assert shown.render([S, U, V, T, A, B]).text == told


@pytest.mark.parametrize(
    "refused",
    [
        "false",
        "m.role == 'system'",
        "m.role == 'system' and not loop.first",
        "m.role == 'tool' or m.tool_calls",
        "m.role not in ('user', 'assistant') or (m.role == 'user') != (loop.index0 % 2 == 0)",
    ],
)
def test_tools_are_told_by_a_message_where_the_template_leaves_them_out(
    refused: str, demo_model_path: Path, tmp_path: Path
) -> None:
    """Before the user's words, whatever else the template refuses; later calls have the form that the message wants."""
    shown = made(refusing(refused).replace(TOOLS, ""), demo_model_path, tmp_path)
    assert (shown.reads_tools, shown.tells_tools) == (True, True)
    assert REPAIRS["tools_as_text"].said in shown.notes
    parameters = {"type": "object", "properties": {"size": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "find", "description": "Looks.", "parameters": parameters}}
    turns = [
        said("user", "Where?"),
        said("assistant", "", call("call_12345", "find", size=7)),
        R,
        said("user", "Thanks."),
    ]
    begun, whole = (
        shown.render([S, *messages], [tool], add_generation_prompt=False) for messages in (turns[:1], turns)
    )
    words = [
        "s",
        "find",
        "Looks.",
        "size",
        "<tool_call>",
        "Where?",
        "<tool_call>",
        '"size": 7',
        "</tool_call>",
        "Thanks.",
    ]
    at = 0
    for word in words:
        at = whole.text.index(word, at) + len(word)
    assert whole.text.startswith(begun.text)
    assert "Looks." in begun.system_text and "Where?" not in begun.system_text
    assert "Looks." not in shown.render([S, *turns]).text
    assert "<tool_call>" not in shown.render([S, U]).text


def test_a_tool_without_description_and_parameters_gets_empty_ones(demo_model_path: Path, tmp_path: Path) -> None:
    function = "t.function.name + t.function.description }}{{ t.function.parameters.properties | tojson"
    template = f"{{% for t in tools or [] %}}{{{{ {function} }}}}{{% endfor %}}{CALLS}{PLAIN}"
    shown = made(template, demo_model_path, tmp_path)
    now = {"type": "function", "function": {"name": "now"}}
    assert shown.render([U], [now]).text == "now{}[user] u\n"
    assert now == {"type": "function", "function": {"name": "now"}}


def test_what_cannot_be_shown_is_refused_by_name(demo_model_path: Path, tmp_path: Path) -> None:
    """By the template itself, or because it leaves the message out; `notes` says so before."""
    shown_first = "{{ m.content }}{% if m.content == 'wide' %}{% break %}{% endif %}{{ '\\n' }}"
    shown = made(f"{{% for m in messages %}}{shown_first}{{% endfor %}}", demo_model_path, tmp_path)
    assert shown.render([U, A]).text == "u\na\n"
    with pytest.raises(InvalidRequest, match="leaves out message 1, of the role assistant"):
        shown.render([said("user", "wide"), said("assistant", "answered"), V])


roles = st.sampled_from(["system", "user", "assistant", "calls", "user", "assistant"])
JOINED = {"bridged", "joined_neighbours"}


@given(
    parts=st.lists(st.tuples(roles, st.sampled_from(["", "text"]), st.integers(1, 3)), max_size=8),
    names=st.sets(st.sampled_from(sorted(REPAIRS))),
)
@example(parts=[("assistant", "", 1), ("calls", "", 1)], names=JOINED)
@example(parts=[("assistant", "text", 1), ("calls", "", 1), ("assistant", "text", 1)], names=JOINED)
@example(parts=[(role, "text", 1) for role in ("user", "assistant", "system", "assistant", "calls")], names=JOINED)
@example(parts=[("system", "text", 1), ("system", "text", 1)], names={"joined_systems", "user_needed"})
def test_a_repaired_conversation_keeps_its_beginning(parts: list[tuple[str, str, int]], names: set[str]) -> None:
    """With any repairs: what one more turn adds is behind all that was there, or ends its last message."""
    repairs = Repairs(lambda messages, tools: "", ())
    repairs._names = frozenset(names)
    turns: list[list[dict[str, Any]]] = []
    for number, (role, text, calls) in enumerate(parts):
        content = f"{text}{number}" if text else ""
        if role == "calls":
            ids = [f"call_{number}_{place}" for place in range(calls)]
            asked = said("assistant", content, *(call(call_id, f"f{call_id}", x=number) for call_id in ids))
            turns.append([asked, *(said("tool", f"result {call_id}", tool_call_id=call_id) for call_id in ids)])
        else:
            turns.append([said(role, content)])
    before: list[Mapping[str, Any]] = []
    for end in range(1, len(turns) + 1):
        messages = [message for turn in turns[:end] for message in turn]
        after = [*repairs.mended(Chat(messages)).messages]
        # Empty messages around the last one only lead to it, or hold the place of one to come. A plain message that
        # calls join counts no more as a turn, and an empty user before a call would be wrong in a history cut there.
        told = [*before]
        while told and _is_empty(told[-1]):
            told.pop()
        last = told.pop() if told else {"content": ""}
        if told and _is_empty(told[-1]) and after[: len(told)] != told:
            told.pop()
        assert after[: len(told)] == told
        rest = [message for message in after[len(told) :] if not _is_empty(message)]
        assert not _text(last) or _text(rest[0]).startswith(_text(last))
        words = {word for message in messages for word in re.findall(r"text\d+|result \w+|fcall_\w+", str(message))}
        assert all(word in str(after) for word in words)
        before = after


def _is_empty(message: Mapping[str, Any]) -> bool:
    return not _text(message) and not message.get("tool_calls")


def _text(message: Mapping[str, Any]) -> str:
    content = message["content"] or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def test_a_left_out_message_is_found() -> None:
    """By a word of it; what a template cuts out of an answer does not count."""
    messages = [said("user", "first words"), said("assistant", "<think>x</think>"), C, said("user", "ünï")]
    assert left_out(messages, "first words ... f ... n") is None
    assert left_out(messages, "... f ... n") == 0
    assert left_out(messages, "irst words") == 0
    assert left_out(messages[2:], "") == 0


def test_check_and_doctor_tell_what_a_template_needs(demo_model_path: Path, tmp_path: Path) -> None:
    made(refusing("m.role == 'system'"), demo_model_path, tmp_path)
    file = tmp_path / "settings.yaml"
    file.write_text(f"model: {tmp_path / 'model'}\n")
    with programs_here():
        checked = CliRunner().invoke(app, ["check", str(file)])
        told = CliRunner().invoke(app, ["doctor", "--port", "1", "--model", str(tmp_path / "model")])
    note = "it takes no system message: it is put before the user's first"
    assert checked.exit_code == 0, checked.output
    assert f"settings.yaml:1: model: note: the chat template: {note}\n" in checked.output
    assert "ok       chat template: " in told.output
    assert note in told.output
