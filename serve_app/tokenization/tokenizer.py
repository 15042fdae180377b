"""Text to token ids and block hashes. The known history of a conversation is only hashed, not tokenized.

A segment's key covers the scope root and all text up to the segment's end. Hits are faster than misses, and no tenant
may learn another tenant's text by timing. Keys are xxh3_128 with a seed of this process, unpredictable outside it.
"""

import asyncio
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from jinja2 import TemplateSyntaxError
from transformers import AutoTokenizer

from router.protocol.block_hash import HASH_BYTES, TokenArray, extend_chain, next_hashes
from router.settings import DEFAULTS
from serve_app.errors import InvalidRequest
from serve_app.fairness.queue import FairWorkers
from serve_app.fairness.shares import Shares
from serve_app.tokenization.chat_template import ChatTemplate, RenderedPrompt
from serve_app.tokenization.detokenizer import Detokenizer, TokenTexts
from serve_app.tokenization.segments import (
    PublicTokens,
    SegmentCache,
    SegmentCacheStats,
    Segmenter,
    TokenizedSegment,
    longest_token_chars,
)

INLINE_BYTES = 4096
"""``encode_async`` uses a worker thread if more text than this must be tokenized (about 1 ms)."""

INLINE_RENDER_CHARS = 64 << 10
"""``render_async`` uses a worker thread if the messages have more characters than this."""
MESSAGE_CHARS = 64
"""A message's rendering cost besides its content, in characters of content."""

_NO_IDS: TokenArray = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class EncodedPrompt:
    """A prompt's tokens and hashes.

    ``token_ids``: what the model reads, int32, the caller's own copy. ``identity``: what is hashed and compared, an id
    for each token. It is the token ids, except for ids that stand for contents (a placeholder): prompts share KV only
    as far as their identities agree. ``block_hashes``: packed chain of the full blocks. ``public_blocks``: the number
    of public blocks. The others belong to the private root.
    """

    token_ids: TokenArray
    identity: TokenArray
    block_hashes: bytes
    public_blocks: int = 0


@dataclass(slots=True)
class _Lookup:
    """The keys of one text's segments, and the cached segments. ``missing``: the texts of the others, in UTF-8."""

    root: bytes
    public_root: bytes
    public: PublicTokens
    keys: list[bytes]
    segments: list[TokenizedSegment | None]
    missing: list[bytes]


class PromptTokenizer:
    """The tokenizer of one checkpoint, safe to use from many threads and one event loop.

    ``cache_bytes`` limits its memory. ``workers``: threads for long texts, fair to tenants. ``pretrained``: the
    tokenizer loaded by transformers. ``as_is``: see ``ChatTemplate``. ``chat_template``: in place of the checkpoint's.
    ``lookahead``: how many later tokens may change a block's KV; a block is public if these are public too.
    """

    def __init__(
        self,
        path: Path,
        *,
        cache_bytes: int = 64 << 20,
        block_size: int = DEFAULTS.block_size,
        workers: FairWorkers | None = None,
        as_is: bool = False,
        chat_template: str | None = None,
        lookahead: int = 0,
    ) -> None:
        self.pretrained: Any = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        if chat_template is not None:
            self.pretrained.chat_template = chat_template
            try:
                self.pretrained.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
            except TemplateSyntaxError as error:
                raise ValueError(f"chat_template is no Jinja template: {error.message}, line {error.lineno}") from None
            except Exception:  # noqa: S110  # it may refuse this conversation
                pass
        backend = getattr(self.pretrained, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(f"{path} has no fast tokenizer; save one (tokenizer.json) into the directory")
        backend.no_truncation()
        backend.no_padding()
        self._backend: Any = backend
        self.block_size = block_size
        self._lookahead = lookahead
        self._segmenter = Segmenter(backend)
        self._prefix, self._suffix = self._find_template_ids()
        self._cache = SegmentCache(cache_bytes)
        self._public = PublicTokens()
        self._seed = secrets.randbits(64)
        self._texts = TokenTexts(backend)
        vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.template = ChatTemplate(self.pretrained, as_is=as_is)
        self.longest_token_chars = longest_token_chars(backend)
        self._workers = workers or FairWorkers(Shares({}))
        self._in_flight: dict[bytes, asyncio.Future[None]] = {}

    def set_public(self, prompts: Iterable[TokenArray]) -> None:
        """Set the token ids of all public prompts. Chains cached under earlier ones are not used again."""
        self._public = PublicTokens(prompts, self._public.generation + 1)

    def stats(self) -> SegmentCacheStats:
        """Return the cache's size and counters."""
        with self._cache.lock:
            return self._cache.stats()

    @property
    def special_tokens(self) -> frozenset[str]:
        """The special tokens' texts."""
        return self._texts.special_tokens

    def ids_in_grammars(self, words: Collection[str]) -> dict[str, int]:
        """Return the ids of the words that are no text for llguidance: special tokens, and all added ones like <this>.

        Qwen3's ``<think>`` is one, although its tokenizer says that it is not special.
        """
        added = self._backend.get_added_tokens_decoder().items()
        return {
            token.content: token_id
            for token_id, token in added
            if token.content in words and (token.special or (token.content[0], token.content[-1]) == ("<", ">"))
        }

    def encode(
        self, text: str, root: bytes, *, public_root: bytes = b"", add_special_tokens: bool = False
    ) -> EncodedPrompt:
        """Tokenize ``text`` and hash its full blocks under the scope root. Raises InvalidRequest on a lone surrogate.

        ``public_root``: for blocks wholly inside a public prompt. ``add_special_tokens``: around a bare text.
        """
        return self._complete(self._look_up(text, root, public_root, add_special_tokens), add_special_tokens)

    async def render_async(
        self,
        messages: Sequence[Mapping[str, Any]],
        tenant: str,
        chars: int,
        tools: Sequence[Mapping[str, Any]] = (),
        /,
        **options: Any,
    ) -> RenderedPrompt:
        """Render a chat with ``chars`` characters in all. A long one runs in a thread, at the tenant's turn."""
        size = chars + MESSAGE_CHARS * len(messages)
        render = partial(self.template.render, messages, tools, **options)
        return render() if size <= INLINE_RENDER_CHARS else await self._workers.run(tenant, size, render)

    async def encode_async(
        self, text: str, root: bytes, tenant: str, *, public_root: bytes = b"", add_special_tokens: bool = False
    ) -> EncodedPrompt:
        """Encode like ``encode``. Much unknown text is tokenized in a fair thread, once for all concurrent callers."""
        while True:
            lookup = self._look_up(text, root, public_root, add_special_tokens)
            missing_bytes = sum(map(len, lookup.missing))
            if missing_bytes <= INLINE_BYTES:
                return self._complete(lookup, add_special_tokens)
            key = lookup.keys[lookup.segments.index(None)]
            leader = self._in_flight.get(key)
            if leader is not None:
                await asyncio.wait([leader])
                continue
            ended = self._in_flight[key] = asyncio.get_running_loop().create_future()
            try:
                return await self._workers.run(tenant, missing_bytes, self._complete, lookup, add_special_tokens)
            finally:  # also if this caller was cancelled: the next one takes its place
                del self._in_flight[key]
                ended.set_result(None)

    def encode_ids(
        self, ids: Sequence[int], root: bytes, public_root: bytes = b"", *, identity: TokenArray | None = None
    ) -> EncodedPrompt:
        """Hash a prompt given as token ids. Raises InvalidRequest for an id outside the vocabulary.

        ``identity``: see ``EncodedPrompt``; None: the ids.
        """
        if ids and (min(ids) < 0 or max(ids) >= self.vocab_size):
            raise InvalidRequest(f"Token ids must be from 0 to {self.vocab_size - 1}.", param="prompt")
        token_ids = np.array(ids, dtype=np.int32)
        identity = token_ids if identity is None else identity
        public_blocks = self._public_blocks(self._public, identity) if public_root else 0
        root = public_root + root if public_blocks else root
        chain = extend_chain(root, public_blocks, identity, self.block_size)
        return EncodedPrompt(token_ids, identity, chain, public_blocks)

    def _public_blocks(self, public: PublicTokens, identity: TokenArray) -> int:
        return max(0, public.count(identity) - self._lookahead) // self.block_size

    @property
    def texts(self) -> TokenTexts:
        """The texts of its ids."""
        return self._texts

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids without special tokens."""
        return self._texts.decode(token_ids)

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens."""
        # decode_batch lets other threads run meanwhile, decode does not; a million ids take a fifth of a second.
        return str(self._backend.decode_batch([token_ids], skip_special_tokens=False)[0])

    def names_of(self, token_ids: Sequence[int]) -> list[str]:
        """Return the entries of token ids in the vocabulary."""
        return [str(self._backend.id_to_token(token_id)) for token_id in token_ids]

    async def word_ids(self, words: Sequence[str], tenant: str) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of words, each at the beginning of a text and within one. Source: vLLM."""

        def encode() -> tuple[tuple[int, ...], ...]:
            encoded: list[tuple[int, ...]] = []
            for word in words:
                bare, spaced = (
                    tuple(self._backend.encode(text, add_special_tokens=False).ids)
                    for text in (word.lstrip(), f" {word.lstrip()}")
                )
                encoded += [bare, spaced]
            return tuple(ids for ids in dict.fromkeys(encoded) if ids)

        chars = sum(map(len, words))
        return encode() if chars <= INLINE_BYTES // 4 else await self._workers.run(tenant, chars, encode)

    def decoder(self, special: Iterable[str] = ()) -> Detokenizer:
        """Return a decoder for the tokens of one answer. ``special``: special tokens that it does not omit."""
        return Detokenizer(self._texts, self._texts.special(special) if special else None)

    def _find_template_ids(self) -> tuple[TokenArray, TokenArray]:
        """Return the ids that ``add_special_tokens`` puts before and after a text that is cut into segments."""
        bare = self._backend.encode("a", add_special_tokens=False).ids
        full = self._backend.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                suffix = full[start + len(bare) :]
                return np.array(full[:start], dtype=np.int32), np.array(suffix, dtype=np.int32)
        raise ValueError("the tokenizer's post-processor changes the text's own tokens; it cannot be served")

    def _look_up(self, text: str, root: bytes, public_root: bytes, add_special_tokens: bool) -> _Lookup:
        try:
            raw = text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest("The text holds a lone surrogate; send valid Unicode.") from error
        public, ends, keys = self._public, self._segmenter.cut(raw), []
        spans = list(zip([0, *ends], ends, strict=False))
        generation = b"%d" % public.generation if public_root else b""
        kind = b"with special tokens" if add_special_tokens else b""
        # Fields are length-prefixed, so that no text can imitate one.
        fields = (len(field).to_bytes(4, "little") + field for field in (root, kind, generation, public_root))
        so_far = xxhash.xxh3_128(b"".join(fields), self._seed)
        for start, end in spans:
            so_far.update(memoryview(raw)[start:end])
            keys.append(so_far.digest())
        with self._cache.lock:
            segments = self._cache.get(keys)
        missing = [raw[slice(*spans[i])] for i, segment in enumerate(segments) if segment is None]
        return _Lookup(root, public_root, public, keys, segments, missing)

    def _complete(self, lookup: _Lookup, add_special_tokens: bool) -> EncodedPrompt:
        """Tokenize, hash and cache the missing segments, and join all segments."""
        texts = [text.decode() for text in lookup.missing]
        encodings = iter(self._backend.encode_batch_fast(texts, add_special_tokens=False) if texts else ())
        ids = [
            np.array(next(encodings).ids, dtype=np.int32) if segment is None else segment.ids
            for segment in lookup.segments
        ]
        prefix, suffix = (self._prefix, self._suffix) if add_special_tokens else (_NO_IDS, _NO_IDS)
        token_ids: TokenArray = np.concatenate((prefix, *ids, suffix))
        public_blocks = self._public_blocks(lookup.public, token_ids) if lookup.public_root else 0
        root = lookup.public_root + lookup.root if public_blocks else lookup.root

        def next_hashes_to(end: int) -> bytes:
            """Return the hashes after ``chain`` for the blocks that are full at token ``end``."""
            done, last = len(chain) // HASH_BYTES, bytes(chain[-HASH_BYTES:])
            return next_hashes(root, public_blocks, token_ids[:end], self.block_size, done, last)

        chain, end = bytearray(), len(prefix)
        new: list[tuple[bytes, TokenizedSegment]] = []
        for key, segment, segment_ids in zip(lookup.keys, lookup.segments, ids, strict=True):
            end += len(segment_ids)
            if segment is None:
                # Of other blocks, the next segment decides whether they are public.
                segment = TokenizedSegment(segment_ids, next_hashes_to(max(0, end - self._lookahead)))
                new.append((key, segment))
            chain += segment.block_hashes
        if new:
            with self._cache.lock:
                self._cache.put(reversed(new))
        if len(suffix) or self._lookahead:
            chain += next_hashes_to(len(token_ids))
        return EncodedPrompt(token_ids, token_ids, bytes(chain), public_blocks)
