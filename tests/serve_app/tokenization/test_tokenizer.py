"""The cached tokenizer equals tokenizing and hashing from scratch, for any tokenizer and text."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers, processors

from router.protocol.block_hash import extend_chain
from serve_app.errors import InvalidRequest
from serve_app.tokenization.segment_cache import PublicTokens
from serve_app.tokenization.tokenizer import PromptTokenizer
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
    return {**made, "sentencepiece": sentencepiece_like(parent / "sentencepiece", demo_model_path, **SMALL)}


@pytest.mark.parametrize("name", [*VARIANTS, "sentencepiece"])
@settings(max_examples=80)
@given(
    public=st.lists(TEXTS, max_size=3), texts=st.lists(TEXTS, min_size=1, max_size=4), special=st.booleans(),
)  # fmt: skip
def test_encoding_equals_tokenizing_and_hashing_from_nothing(
    variants: dict[str, PromptTokenizer], name: str, public: list[str], texts: list[str], special: bool
) -> None:
    """It holds for any text after any others, with changing public prompts, while parts are evicted.

    A chain changes its root at the end of the public part.
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
                ids = np.array(cached._tokenizer(whole, add_special_tokens=special)["input_ids"], dtype=np.int32)
                assert encoded.token_ids.dtype == np.int32
                assert encoded.token_ids.tolist() == ids.tolist()
                blocks = PublicTokens(known).count(ids) // 4 if public_root else 0
                assert encoded.public_blocks == blocks
                assert encoded.block_hashes == extend_chain(public_root + ROOT if blocks else ROOT, blocks, ids, 4)
                assert cached.encode_ids(ids.tolist(), ROOT, public_root).block_hashes == encoded.block_hashes


def test_only_tokenizers_with_exact_cuts_are_cut(variants: dict[str, PromptTokenizer]) -> None:
    """A space for the first part, or a token that swallows spaces, makes whole texts the unit."""
    exact = {name for name, cached in variants.items() if cached._segmenter.exact}
    assert exact == {"plain", "bos", "sentencepiece"}


def test_a_text_is_never_taken_for_one_encoded_differently(demo_model_path: Path, tmp_path: Path) -> None:
    """Each way of encoding has its own cache; text that no tokenizer can read is the client's error."""
    cached = PromptTokenizer(variant_of(demo_model_path, tmp_path / "bos", bos_around), block_size=4)
    for special in (True, False):
        for public_root in (b"", OTHER_ROOT, OTHER_ROOT[:8]):
            encoded = cached.encode("X", ROOT, public_root=public_root, add_special_tokens=special)
            assert encoded.token_ids.tolist() == cached._tokenizer("X", add_special_tokens=special)["input_ids"]
    assert cached.stats().hits == 0
    with pytest.raises(InvalidRequest, match="surrogate"):
        cached.encode("a\ud800b", ROOT)


def test_ids_outside_the_vocabulary_are_refused(tokenizer: PromptTokenizer) -> None:
    """This includes very large ids."""
    for wrong in (-1, tokenizer.vocab_size, 10**30):
        with pytest.raises(InvalidRequest, match="Token ids must be from 0 to 4095"):
            tokenizer.encode_ids([1, wrong], ROOT)
