"""A trace's block ids as text with the same common prefixes: an id becomes a run of words of one token each."""

from functools import lru_cache
from pathlib import Path
from random import Random

from transformers import AutoTokenizer

from serve_app.checkpoints.reuse import TRACE_BLOCK_TOKENS, TraceRequest

_WORDS_NEEDED = 200


class TraceText:
    """Converts each id to text of ``tokens_per_id`` tokens, at most the trace's 512."""

    def __init__(self, model_path: Path, tokens_per_id: int = TRACE_BLOCK_TOKENS) -> None:
        """Raises ValueError if the tokenizer has too few whole words, or an id would have under two tokens."""
        if not 2 <= tokens_per_id <= TRACE_BLOCK_TOKENS:
            raise ValueError(f"tokens_per_id must be from 2 to {TRACE_BLOCK_TOKENS}, not {tokens_per_id}")
        self.tokens_per_id = tokens_per_id
        self._words = whole_words(model_path)
        self.piece = lru_cache(maxsize=1 << 16)(self._piece)

    def prompt_tokens(self, request: TraceRequest) -> int:
        """Return the shrunk length of the prompt."""
        full = (len(request.hash_ids) - 1) * self.tokens_per_id
        return max(full + 1, request.prompt_tokens * self.tokens_per_id // TRACE_BLOCK_TOKENS)

    def output_tokens(self, request: TraceRequest) -> int:
        """Return the shrunk length of the answer, at least 1."""
        return max(1, round(request.output_tokens * self.tokens_per_id / TRACE_BLOCK_TOKENS))

    def prompt(self, request: TraceRequest) -> str:
        """Return the prompt, of exactly ``prompt_tokens`` tokens."""
        last = self.prompt_tokens(request) - (len(request.hash_ids) - 1) * self.tokens_per_id
        pieces = [self.piece(hash_id) for hash_id in request.hash_ids]
        pieces[-1] = pieces[-1][:last]
        return "".join(word for piece in pieces for word in piece)

    def _piece(self, hash_id: int) -> tuple[str, ...]:
        # The id, in digits of the vocabulary, comes first, so that all ids have different words.
        digits: list[str] = []
        rest = hash_id
        while rest or not digits:
            rest, digit = divmod(rest, len(self._words))
            digits.append(self._words[digit])
        rng = Random(hash_id)
        return (*digits, *rng.choices(self._words, k=self.tokens_per_id))[: self.tokens_per_id]


@lru_cache(maxsize=4)
def whole_words(model_path: Path) -> tuple[str, ...]:
    """Return words with a leading space that are one token in any order. Raises ValueError if there are too few."""
    tokenizer = AutoTokenizer.from_pretrained(str(model_path), local_files_only=True)
    vocabulary = sorted(tokenizer.get_vocab().values())
    words = []
    for token_id in vocabulary:
        word = tokenizer.decode([token_id])
        plain = len(word) > 2 and word[0] == " " and word[1:].isascii() and word[1:].isalpha()
        # Neighbouring words must not change the tokens of a word.
        if plain and tokenizer(word * 3, add_special_tokens=False)["input_ids"] == [token_id] * 3:
            words.append(word)
    if len(words) < _WORDS_NEEDED:
        raise ValueError(f"the tokenizer of {model_path} knows {len(words)} whole words; {_WORDS_NEEDED} are needed")
    return tuple(words)
