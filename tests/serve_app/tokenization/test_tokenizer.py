"""The cached tokenizer equals tokenizing and hashing from nothing, stays in its bound, and keeps the loop free."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from router.protocol.block_hash import extend_chain, hash_blocks
from serve_app.errors import InvalidRequest
from serve_app.tokenization.public_tokens import PublicTokens
from serve_app.tokenization.segmenter import MIN_SEGMENT_BYTES
from serve_app.tokenization.tokenizer import EncodedPrompt, PromptTokenizer
from tests.serve_app.tokenization.variants import variant_of

ROOT, OTHER_ROOT = b"r" * 16, b"o" * 16
PIECES = [
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|im_",
    "|>",
    "<|",
    "\n",
    "  ",
    " a",
    "system",
    "é",
    "e\u0301",
]
TEXTS = st.lists(
    st.one_of(
        st.sampled_from([*PIECES, "word " * 250]), st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    ),
    max_size=14,
).map("".join)


def _bos_around(tokenizer: Tokenizer) -> None:
    """NFC before everything, a bos before and an eos after a bare text."""
    tokenizer.normalizer = normalizers.NFC()
    ids = tokenizer.get_vocab()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        special_tokens=[(token, ids[token]) for token in ("<|im_start|>", "<|im_end|>")],
    )


def _space_first(tokenizer: Tokenizer) -> None:
    """The first part of a text gets a space and no other does: no cut is exact."""
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _greedy_end(tokenizer: Tokenizer) -> None:
    """An added token that swallows the spaces after it."""
    tokenizer.add_special_tokens([AddedToken("<|greedy|>", special=True, normalized=False, rstrip=True)])


VARIANTS = {"plain": None, "bos": _bos_around, "first": _space_first, "greedy": _greedy_end}


@pytest.fixture(scope="module")
def variants(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, PromptTokenizer]:
    parent = tmp_path_factory.mktemp("tokenizers")
    return {
        name: PromptTokenizer(variant_of(demo_model_path, parent / name, change), cache_bytes=60_000, block_size=4)
        for name, change in VARIANTS.items()
    }


@pytest.fixture
def tokenizer(demo_model_path: Path) -> PromptTokenizer:
    return PromptTokenizer(demo_model_path, cache_bytes=8 << 20, block_size=16)


def _conversation(turns: int, chars: int) -> str:
    turn = "".join(chr(97 + i * i % 26) + " " * (i % 5 == 0) for i in range(chars))
    return "".join(f"<|im_start|>user\n{turn} {i}<|im_end|>\n" for i in range(turns))


@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=80)
@given(texts=st.lists(TEXTS, min_size=1, max_size=4), special=st.booleans())
def test_encoding_equals_tokenizing_and_hashing_from_nothing(
    variants: dict[str, PromptTokenizer], name: str, texts: list[str], special: bool
) -> None:
    """Any text, after any others, with a cache so small that parts are always being evicted."""
    cached = variants[name]
    reference = cached._tokenizer
    history = ""
    for text in texts:
        history += text
        for whole in (history, text):
            encoded = cached.encode(whole, ROOT, add_special_tokens=special)
            expected = reference(whole, add_special_tokens=special)["input_ids"]
            assert encoded.token_ids.tolist() == expected
            assert encoded.token_ids.dtype == np.int32
            assert encoded.block_hashes == hash_blocks(ROOT, np.array(expected, dtype=np.int32), 4)


@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=40)
@given(public=st.lists(TEXTS, max_size=3), texts=st.lists(TEXTS, min_size=1, max_size=3), special=st.booleans())
def test_remembered_chains_change_root_where_the_public_part_ends(
    variants: dict[str, PromptTokenizer], name: str, public: list[str], texts: list[str], special: bool
) -> None:
    """Whatever is public, and however often that changes: a chain is the one that its ids and the index give."""
    cached = variants[name]
    prompts = [cached.encode(text, OTHER_ROOT, add_special_tokens=special).token_ids for text in public]
    for known in (prompts, prompts[:1]):
        cached.set_public(known)
        history = "".join(public[:1])
        for text in texts:
            history += text
            for _ in range(2):
                encoded = cached.encode(history, ROOT, public_root=OTHER_ROOT, add_special_tokens=special)
                blocks = PublicTokens(known).count(encoded.token_ids) // 4
                root = OTHER_ROOT + ROOT if blocks else ROOT
                assert encoded.public_blocks == blocks
                assert encoded.block_hashes == extend_chain(root, blocks, encoded.token_ids, 4)
                from_ids = cached.encode_ids(encoded.token_ids.tolist(), ROOT, OTHER_ROOT)
                assert from_ids.block_hashes == encoded.block_hashes


def test_only_tokenizers_with_exact_cuts_are_cut(variants: dict[str, PromptTokenizer]) -> None:
    """A space for the first part, or a token that swallows spaces, makes whole texts the unit."""
    assert {name: cached._segmenter.exact for name, cached in variants.items()} == {
        "plain": True,
        "bos": True,
        "first": False,
        "greedy": False,
    }


def test_a_grown_conversation_tokenizes_only_what_is_new(tokenizer: PromptTokenizer) -> None:
    """The second turn misses the segments of the new text, not those of the history."""
    history = _conversation(20, 1500)
    tokenizer.encode(history, ROOT)
    before = tokenizer.stats()
    tokenizer.encode(history + "<|im_start|>user\nnew<|im_end|>\n", ROOT)
    after = tokenizer.stats()
    assert after.misses - before.misses == 1
    assert after.hits - before.hits >= 19


def test_nothing_is_shared_across_roots(tokenizer: PromptTokenizer) -> None:
    """A text another scope has sent is as unknown as any other, so timing tells nothing."""
    text = _conversation(5, 2000)
    tokenizer.encode(text, ROOT)
    hits = tokenizer.stats().hits
    tokenizer.encode(text, OTHER_ROOT)
    assert tokenizer.stats().hits == hits


@pytest.mark.parametrize(
    ("first", "first_kwargs", "second"),
    [
        ("X", {"add_special_tokens": True}, "+X"),
        ("X", {"public_root": OTHER_ROOT}, f"0 of {OTHER_ROOT.decode()}X"),
        ("X", {"public_root": OTHER_ROOT, "add_special_tokens": True}, f"+0 of {OTHER_ROOT.decode()}X"),
    ],
    ids=["special tokens", "public root", "both"],
)
def test_a_text_is_never_taken_for_another_one_encoded_differently(
    demo_model_path: Path, tmp_path: Path, first: str, first_kwargs: dict[str, Any], second: str
) -> None:
    """How a text is encoded is no part of it: writing the one's mark at the beginning of the text finds nothing."""
    cached = PromptTokenizer(variant_of(demo_model_path, tmp_path / "bos", _bos_around), block_size=4)
    cached.encode(first, ROOT, **first_kwargs)
    expected = cached._tokenizer(second, add_special_tokens=False)["input_ids"]
    encoded = cached.encode(second, ROOT)
    assert encoded.token_ids.tolist() == expected
    assert encoded.block_hashes == hash_blocks(ROOT, np.array(expected, dtype=np.int32), 4)
    assert cached.stats().hits == 0


def test_hashes_are_right_after_ids_were_evicted_and_in_another_context(tokenizer: PromptTokenizer) -> None:
    """A segment known from one conversation is hashed anew behind another beginning."""
    shared = _conversation(3, 1600)
    for beginning in ("", "<|im_start|>system\nA<|im_end|>" * 60, "<|im_start|>system\nBB<|im_end|>" * 60):
        encoded = tokenizer.encode(beginning + shared, ROOT)
        assert encoded.block_hashes == hash_blocks(ROOT, encoded.token_ids, 16)


def test_the_result_belongs_to_the_caller(tokenizer: PromptTokenizer) -> None:
    """Writing into one result changes no later one."""
    first = tokenizer.encode("<|im_start|>hello", ROOT).token_ids
    kept = first.tolist()
    first[:] = 0
    assert tokenizer.encode("<|im_start|>hello", ROOT).token_ids.tolist() == kept


def test_the_cache_stays_in_its_bound(demo_model_path: Path) -> None:
    """Charged bytes never pass the bound and use it; a text over the bound leaves the rest in place."""
    bounded = PromptTokenizer(demo_model_path, cache_bytes=200_000)
    for i in range(150):
        bounded.encode(_conversation(2, 1000 + 37 * i), ROOT)
        assert bounded.stats().bytes <= 200_000
    entries = bounded.stats().entries
    assert bounded.stats().bytes > 150_000
    bounded.encode("x y" * 100_000, ROOT)
    assert entries <= bounded.stats().entries <= entries + 1
    assert bounded.stats().bytes <= 200_000


@pytest.mark.parametrize(("texts", "turns", "chars"), [(3000, 1, 3), (150, 2, 4000)])
def test_what_is_charged_is_what_is_taken(demo_model_path: Path, texts: int, turns: int, chars: int) -> None:
    """For tiny entries and for large ones, charged bytes are within a fifth of what Python's allocator says."""
    cached = PromptTokenizer(demo_model_path, cache_bytes=100 << 20)
    conversations = [f"{i} {_conversation(turns, chars)}" for i in range(texts)]
    cached.encode(conversations[0], OTHER_ROOT)
    tracemalloc.start()
    for text in conversations:
        cached.encode(text, ROOT)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.8 < cached.stats().bytes / taken < 1.2


def test_a_cache_of_no_bytes_works(demo_model_path: Path) -> None:
    """Nothing is kept and the results are right."""
    cached = PromptTokenizer(demo_model_path, cache_bytes=0)
    first, second = (cached.encode(_conversation(3, 1200), ROOT) for _ in range(2))
    assert first.token_ids.tolist() == second.token_ids.tolist()
    assert first.block_hashes == second.block_hashes
    assert (cached.stats().entries, cached.stats().bytes, cached.stats().hits) == (0, 0, 0)


def test_threads_agree(demo_model_path: Path) -> None:
    """Eight threads over one small cache all get the right answer."""
    cached = PromptTokenizer(demo_model_path, cache_bytes=30_000)
    texts = [_conversation(3 + i, 1100) for i in range(6)]
    expected = [cached._tokenizer(text)["input_ids"] for text in texts]
    wrong: list[int] = []

    def work(offset: int) -> None:
        for step in range(30):
            i = (offset + step) % len(texts)
            encoded = cached.encode(texts[i], ROOT)
            ids = np.array(expected[i], dtype=np.int32)
            if encoded.token_ids.tolist() != expected[i] or encoded.block_hashes != hash_blocks(ROOT, ids, 16):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert cached.stats().bytes <= 30_000


def test_of_a_known_conversation_nothing_is_tokenized_or_hashed(
    demo_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What 100,000 tokens cost the second time is looking them up."""
    cached = PromptTokenizer(demo_model_path, cache_bytes=64 << 20)
    text = _conversation(100, 1700)
    first = cached.encode(text, ROOT)
    assert len(first.token_ids) > 100_000
    monkeypatch.setattr(cached, "_backend", None)
    monkeypatch.setattr("serve_app.tokenization.tokenizer.next_hashes", None)
    again = cached.encode(text, ROOT)
    assert again.block_hashes == first.block_hashes
    assert np.array_equal(again.token_ids, first.token_ids)


def test_cold_text_is_tokenized_off_the_loop_once(tokenizer: PromptTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten callers with one unknown text: one tokenization, in another thread, and ten equal answers."""
    text = _conversation(40, 2500)
    threads: list[str] = []
    complete = tokenizer._complete

    def watched(*args: Any) -> EncodedPrompt:
        if args[0].missing:
            threads.append(threading.current_thread().name)
        return complete(*args)

    monkeypatch.setattr(tokenizer, "_complete", watched)

    async def ask() -> list[EncodedPrompt]:
        return await asyncio.gather(*(tokenizer.encode_async(text, ROOT, "a") for _ in range(10)))

    answers = asyncio.run(ask())
    assert len(threads) == 1
    assert threads[0].startswith("prepare")
    expected = tokenizer._tokenizer(text)["input_ids"]
    assert all(answer.token_ids.tolist() == expected for answer in answers)
    assert tokenizer._in_flight == {}


def test_a_cancelled_caller_does_not_take_the_others_down(tokenizer: PromptTokenizer) -> None:
    """The first of two callers is cancelled while its text waits for a worker; the second still gets it."""
    text = _conversation(60, 2500)
    release = threading.Event()

    async def ask() -> EncodedPrompt:
        busy = [asyncio.create_task(tokenizer._workers.run("a", 1, release.wait, 10)) for _ in range(8)]
        first = asyncio.create_task(tokenizer.encode_async(text, ROOT, "a"))
        second = asyncio.create_task(tokenizer.encode_async(text, ROOT, "a"))
        await asyncio.sleep(0.01)
        assert len(tokenizer._in_flight) == 1
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        release.set()
        await asyncio.gather(*busy)
        return await second

    assert asyncio.run(ask()).token_ids.tolist() == tokenizer._tokenizer(text)["input_ids"]


def test_the_loop_runs_on_while_a_megabyte_is_tokenized(tokenizer: PromptTokenizer) -> None:
    """Another task gets its turns before a cold encode is done: the thread leaves it the interpreter."""
    text = _conversation(40, 25_000)

    async def turns() -> int:
        task = asyncio.create_task(tokenizer.encode_async(text, ROOT, "a"))
        taken = 0
        while not task.done():
            await asyncio.sleep(0.001)
            taken += 1
        return taken

    assert asyncio.run(turns()) > 5


def test_a_lone_surrogate_is_the_clients_error(tokenizer: PromptTokenizer) -> None:
    """No UnicodeEncodeError gets out."""
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer.encode("a\ud800b", ROOT)


def test_prompts_given_as_ids(tokenizer: PromptTokenizer) -> None:
    """Ids are hashed like tokenized text; an id outside the vocabulary is refused, however large."""
    ids = tokenizer.encode("some text " * 40, ROOT).token_ids
    encoded = tokenizer.encode_ids(ids.tolist(), ROOT)
    assert encoded.token_ids.tolist() == ids.tolist()
    assert encoded.block_hashes == hash_blocks(ROOT, ids, 16)
    for wrong in (-1, tokenizer.vocab_size, 10**30):
        with pytest.raises(InvalidRequest, match="Token ids must be from 0 to 4095"):
            tokenizer.encode_ids([1, wrong], ROOT)


def test_segments_are_kept_when_the_text_grows(tokenizer: PromptTokenizer) -> None:
    """Every cut of a text but its end is a cut of each longer text, and no segment is shorter than the minimum."""
    text = _conversation(30, 700).encode()
    ends = tokenizer._segmenter.cut(text)
    longer = tokenizer._segmenter.cut(text + b"<|im_start|>" * 300)
    assert longer[: len(ends) - 1] == ends[:-1]
    assert all(b - a >= MIN_SEGMENT_BYTES for a, b in zip([0, *ends], ends[:-1], strict=False))


def test_the_reference_tokenizer_is_the_checkpoints(demo_model_path: Path, tokenizer: PromptTokenizer) -> None:
    """Loading for serving changed nothing: a fresh AutoTokenizer gives the same ids."""
    text = json.dumps({"text": "Grüße, 世界 🌍\n\n  x = [1, 2]"}) + "<|im_end|>"
    fresh = AutoTokenizer.from_pretrained(demo_model_path)(text)["input_ids"]
    assert tokenizer.encode(text, ROOT).token_ids.tolist() == fresh


def sentencepiece_like(directory: Path, source: Path) -> PromptTokenizer:
    """Build a Llama-2-like tokenizer: spaces as U+2581, bytes for what it lacks, the first space dropped."""
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    bytes_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"\u2581?[^\u2581]+|\u2581"), behavior="isolated")
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", "<|im_start|>", "<|im_end|>", *bytes_tokens], show_progress=False
    )
    made.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 5, "a b c d e f 0 1 2 3"], trainer)
    state = json.loads(made.to_str())
    for token in state["added_tokens"]:
        token["special"] = not token["content"].startswith("<0x")
    state["added_tokens"] = [token for token in state["added_tokens"] if token["special"]]
    (directory / "tokenizer.json").write_text(json.dumps(state))
    return PromptTokenizer(directory)


def test_a_sentencepiece_like_tokenizer_is_cut_exactly_too(demo_model_path: Path, tmp_path: Path) -> None:
    """Its normalizer puts a space before every part, so cuts are exact."""
    cached = sentencepiece_like(tmp_path / "model", demo_model_path)
    assert cached._segmenter.exact
    text = ("<|im_start|>the fox" + " jumps" * 200 + "<|im_end|> é") * 5
    for _ in range(2):
        assert cached.encode(text, ROOT).token_ids.tolist() == cached._tokenizer(text)["input_ids"]
    assert cached.stats().hits > 2
