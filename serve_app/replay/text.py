"""Made prompts: of exactly as many tokens as a file's, with exactly its shared prefixes, and no text of anybody.

A prompt is a row of whole words, each of one token wherever it stands, so lengths and prefixes follow from the numbers
of words. Segments (runs of a file's blocks) that follow the same one begin with different words. Nothing here knows of
servers; what one adds to a text is told by ``head`` and ``tail``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

Numbers = npt.NDArray[np.int64]

LEAST_WORDS = 64
MOST_WORDS = 32_768
_CHECKED_TOGETHER = 64
_CHECKS = 4


@dataclass(frozen=True, slots=True)
class Words:
    """Words of one token each, and their ids. ``spaced``: a text begins with a space; False: with its first word.

    ``head``, ``tail``: the tokens that the tokenizer itself puts before and after a text.
    """

    texts: Sequence[str]
    ids: npt.NDArray[np.int32]
    spaced: bool
    head: int = 0
    tail: int = 0

    def text(self, numbers: Sequence[int]) -> str:
        """Return the text of words by their numbers."""
        return (" " if self.spaced else "") + " ".join([self.texts[number] for number in numbers])


def tokenizer_at(place: str) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json, a directory or a model. Raises ValueError or CheckpointError."""
    from serve_app.checkpoints.sources import resolve_model

    path = Path(place).expanduser()
    if not path.is_file() or path.suffix != ".json":
        path = resolve_model(place, weights=False)
        if not (path / "tokenizer.json").is_file():
            return _converted(path)
        path /= "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises no other
        raise ValueError(f"{path} cannot be read as a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _converted(path: Path) -> Tokenizer:
    """Return the tokenizer of a directory with another form than tokenizer.json, such as tokenizer.model."""
    from transformers import AutoTokenizer

    loaded: Any = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    tokenizer = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(tokenizer, Tokenizer):
        raise ValueError(f"{path} has no fast tokenizer; save one (tokenizer.json) into the directory")
    return tokenizer


def words_of(tokenizer: Tokenizer) -> Words:
    """Return the words that a tokenizer of any kind keeps whole. Raises ValueError if it has too few."""
    vocabulary = sorted(tokenizer.get_vocab(with_added_tokens=False).values())
    decoded = tokenizer.decode_batch([[token_id] for token_id in vocabulary], skip_special_tokens=False)
    candidates = list(dict.fromkeys(word for text in decoded if len(word := text.strip()) > 1 and word.isalpha()))
    # Tokenizers agree best about plain words; others are for those that have no plain ones.
    plain = [word for word in candidates if word.isascii()]
    candidates = (plain if len(plain) >= LEAST_WORDS else candidates)[: 2 * MOST_WORDS]
    found = max((_whole(tokenizer, candidates, spaced) for spaced in (True, False)), key=lambda words: len(words.texts))
    if len(found.texts) < LEAST_WORDS:
        raise ValueError(f"the tokenizer has {len(found.texts)} whole words; text needs {LEAST_WORDS}")
    return found


def _whole(tokenizer: Tokenizer, candidates: Sequence[str], spaced: bool) -> Words:
    start = " " if spaced else ""
    encoded = tokenizer.encode_batch([f"{start}{word} {word} {word}" for word in candidates], add_special_tokens=False)
    whole: dict[int, str] = {}
    for word, encoding in zip(candidates, encoded, strict=True):
        ids = encoding.ids
        if len(ids) == 3 and ids[0] == ids[1] == ids[2]:
            whole.setdefault(ids[0], word)
    kept = dict(list(whole.items())[:MOST_WORDS])
    head, tail = _added(tokenizer)
    words = Words(list(kept.values()), np.array(list(kept), np.int32), spaced, head, tail)
    return _without_clashes(tokenizer, words)


def _without_clashes(tokenizer: Tokenizer, words: Words) -> Words:
    """Return the words that stay whole beside any other, as far as random rows of all of them show it."""
    rng, passed = np.random.default_rng(0), 0
    while passed < _CHECKS and len(words.texts) >= LEAST_WORDS:
        order = rng.permutation(len(words.texts))
        rows = [order[at : at + _CHECKED_TOGETHER] for at in range(0, len(order), _CHECKED_TOGETHER)]
        encoded = tokenizer.encode_batch([words.text(row.tolist()) for row in rows], add_special_tokens=False)
        bad: set[int] = set()
        for row, encoding in zip(rows, encoded, strict=True):
            expected = words.ids[row].tolist()
            if encoding.ids != expected:
                same = sum(1 for _ in _common(encoding.ids, expected))
                bad |= set(row[max(same - 1, 0) : same + 1].tolist())
        passed = 0 if bad else passed + 1
        left = [number for number in range(len(words.texts)) if number not in bad]
        words = Words([words.texts[n] for n in left], words.ids[left], words.spaced, words.head, words.tail)
    return words


def _common(one: Sequence[int], other: Sequence[int]) -> Sequence[int]:
    """Return the common beginning."""
    length = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]


def _added(tokenizer: Tokenizer) -> tuple[int, int]:
    """Return the numbers of special tokens that the tokenizer puts before and after a text."""
    mask = tokenizer.encode("a", add_special_tokens=True).special_tokens_mask
    head = next((at for at, special in enumerate(mask) if not special), len(mask))
    return head, next((at for at, special in enumerate(reversed(mask)) if not special), 0)


class PromptShapes:
    """The prompts of a file: lengths in tokens, and paths of segments, of ``sizes`` blocks of ``block_tokens`` each.

    ``paths``: of all requests, one behind the other; ``path_start``: where each begins, and the end. What a prompt has
    beyond its path is its own. A segment follows one other, or begins prompts.
    """

    def __init__(
        self,
        lengths: Sequence[int] | npt.NDArray[Any],
        paths: Sequence[int] | npt.NDArray[Any],
        path_start: Sequence[int] | npt.NDArray[Any],
        sizes: Sequence[int] | npt.NDArray[Any],
        block_tokens: int,
    ) -> None:
        self.lengths = np.asarray(lengths, np.int64)
        self._paths, self._start = np.asarray(paths, np.int64), np.asarray(path_start, np.int64)
        self._tokens = np.asarray(sizes, np.int64) * block_tokens
        segments = len(self._tokens)
        before = np.concatenate(([-1], self._paths[:-1])) if len(self._paths) else self._paths
        before[self._start[:-1][self._start[:-1] < self._start[1:]]] = -1
        used, first = np.unique(self._paths, return_index=True)
        parents = before[first] + 1  # 0: none
        children = np.bincount(parents, minlength=segments + 1)
        self._places = np.zeros(segments, np.int64)
        self._places[used] = _ranks(parents)
        ends = np.concatenate(([0], np.cumsum(self._tokens[self._paths])))
        self._own = np.maximum(self.lengths - (ends[self._start[1:]] - ends[self._start[:-1]]), 0)
        lasts = np.zeros(len(self.lengths), np.int64)
        has = self._start[:-1] < self._start[1:]
        lasts[has] = self._paths[self._start[1:][has] - 1] + 1
        longer = np.flatnonzero(self._own)
        self._own_places = np.zeros(len(self.lengths), np.int64)
        self._own_places[longer] = children[lasts[longer]] + _ranks(lasts[longer])
        self._brothers = children + np.bincount(lasts[longer], minlength=segments + 1)
        self._parents = np.zeros(segments, np.int64)
        self._parents[used] = parents
        self._lasts = lasts

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def most_brothers(self) -> int:
        """The most segments that follow the same one."""
        return int(self._brothers.max(initial=0))

    def pieces(self, number: int) -> list[tuple[int, int, int, int]]:
        """Return a prompt's pieces: a key, its place among those that follow the same piece, their number, its tokens.

        Equal keys are equal pieces; they add up to the prompt's length.
        """
        left, found = int(self.lengths[number]), []
        for segment in self._paths[self._start[number] : self._start[number + 1]].tolist():
            tokens = min(int(self._tokens[segment]), left)
            if tokens:
                brothers = int(self._brothers[self._parents[segment]])
                found.append((2 * segment, int(self._places[segment]), brothers, tokens))
            left -= tokens
        if left:
            brothers = int(self._brothers[self._lasts[number]])
            found.append((2 * number + 1, int(self._own_places[number]), brothers, left))
        return found


def _ranks(groups: Numbers) -> Numbers:
    """Return each entry's place among the equal ones."""
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1]))) if len(groups) else order
    ranks = np.empty(len(groups), np.int64)
    ranks[order] = np.arange(len(groups)) - np.repeat(starts, np.diff(np.concatenate((starts, [len(groups)]))))
    return ranks


class MadePrompts:
    """The prompts of ``shapes`` in ``words``. ``head``, ``tail``: tokens that a server adds before and after each.

    ``seed``: other prompts, so that one replay finds nothing of another in a cache.
    """

    def __init__(self, words: Words, shapes: PromptShapes, *, head: int = 0, tail: int = 0, seed: int = 0) -> None:
        self._words, self._shapes, self._seed = words, shapes, seed
        self._head, self._tail = head, tail

    @property
    def shared_too_far(self) -> int:
        """The tokens by which a shared prefix may be too long: 0, unless more prompts go on than there are words."""
        return self._width(self._shapes.most_brothers) - 1

    def tokens(self, number: int) -> int:
        """Return the words of a prompt: its tokens without those that the server adds, at least 1."""
        return max(int(self._shapes.lengths[number]) - self._head - self._tail, 1)

    def text(self, number: int) -> str:
        """Return a prompt's text."""
        return self._words.text(self._numbers(number).tolist())

    def ids(self, number: int) -> list[int]:
        """Return a prompt's token ids."""
        ids: list[int] = self._words.ids[self._numbers(number)].tolist()
        return ids

    def _numbers(self, number: int) -> Numbers:
        pieces, late = [], self._head
        for key, place, brothers, tokens in self._shapes.pieces(number):
            # What the server adds takes the room of first words, but every piece keeps the one that tells it apart.
            kept = max(tokens - late, 1)
            late -= tokens - kept
            pieces.append(self._piece(key, place, brothers, kept))
        numbers = np.concatenate(pieces) if pieces else np.zeros(1, np.int64)
        return numbers[: self.tokens(number)]

    def _piece(self, key: int, place: int, brothers: int, tokens: int) -> Numbers:
        count = len(self._words.texts)
        numbers = np.random.default_rng([self._seed, key]).integers(0, count, tokens)
        for at in range(min(self._width(brothers), tokens)):
            place, numbers[at] = divmod(place, count)
        return numbers

    def _width(self, brothers: int) -> int:
        """Return the number of words that tell so many pieces apart."""
        width, apart = 1, len(self._words.texts)
        while apart < brothers:
            width, apart = width + 1, apart * len(self._words.texts)
        return width
