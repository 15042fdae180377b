"""Made prompts have exactly the tokens and the shared prefixes of a file, for tokenizers of every kind."""

from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from serve_app.replay.text import LEAST_WORDS, MadePrompts, PromptShapes, Words, tokenizer_at, words_of
from tests.serve_app.replay.tokenizers import KINDS

BLOCK = 4


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return KINDS[request.param]()


@pytest.fixture(scope="module")
def words(tokenizer: Tokenizer) -> Words:
    return words_of(tokenizer)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(map(len, (one, other)))
    )


class Naive:
    """A file's prompts by blocks: an id stands for a whole prefix. Their segments are single blocks."""

    def __init__(self, prompts: list[tuple[list[int], int]]) -> None:
        """``prompts``: what each block goes on with, from the beginning, and tokens beyond the blocks."""
        self.chains = [tuple(chain) for chain, _ in prompts]
        self.lengths = [max(len(chain) * BLOCK + more, 1) for chain, more in prompts]
        numbers: dict[tuple[int, ...], int] = {}
        paths: list[int] = []
        start = [0]
        for chain in self.chains:
            paths += [numbers.setdefault(chain[: end + 1], len(numbers)) for end in range(len(chain))]
            start.append(len(paths))
        self.shapes = PromptShapes(self.lengths, paths, start, [1] * len(numbers), BLOCK)

    def shared(self, one: int, other: int) -> int:
        """Return the tokens that two prompts share."""
        return min(common(self.chains[one], self.chains[other]) * BLOCK, self.lengths[one], self.lengths[other])


PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), max_size=5), st.integers(-BLOCK + 1, 2 * BLOCK)), min_size=1, max_size=8
)


@settings(max_examples=100)
@given(prompts=PROMPTS, seed=st.integers(0, 1 << 31))
def test_prompts_share_tokens_exactly_as_far_as_the_file_says(
    tokenizer: Tokenizer, words: Words, prompts: list[tuple[list[int], int]], seed: int
) -> None:
    """Lengths are the file's; two prompts differ in the first token behind their common blocks, no earlier or later."""
    naive = Naive(prompts)
    made = MadePrompts(words, naive.shapes, seed=seed)
    tokens = [tokenizer.encode(made.text(number), add_special_tokens=False).ids for number in range(len(prompts))]
    assert [len(ids) for ids in tokens] == naive.lengths
    assert tokens == [made.ids(number) for number in range(len(prompts))]
    assert made.shared_too_far == 0
    for one, other in combinations(range(len(prompts)), 2):
        assert common(tokens[one], tokens[other]) == naive.shared(one, other)


@settings(max_examples=50)
@given(prompts=PROMPTS)
def test_what_the_tokenizer_adds_takes_the_place_of_words(
    tokenizer: Tokenizer, words: Words, prompts: list[tuple[list[int], int]]
) -> None:
    """With its special tokens a prompt has the file's length, and shared prefixes end where the file's do."""
    naive = Naive([(chain, more + 2 * BLOCK) for chain, more in prompts])
    made = MadePrompts(words, naive.shapes, head=words.head, tail=words.tail)
    tokens = [tokenizer.encode(made.text(number)).ids for number in range(len(prompts))]
    assert [len(ids) for ids in tokens] == naive.lengths
    for one, other in combinations(range(len(prompts)), 2):
        shared = naive.shared(one, other)
        found = common(tokens[one], tokens[other])
        if shared == min(naive.lengths[one], naive.lengths[other]) and naive.lengths[one] != naive.lengths[other]:
            assert shared - words.tail <= found <= shared, "an end token stands at the end of the shorter one"
        else:
            assert found == max(shared, words.head)


def test_words_are_whole_and_different(tokenizer: Tokenizer, words: Words) -> None:
    """Each is one token in any order and any number; no two are the same token."""
    count = len(words.texts)
    assert count >= LEAST_WORDS
    assert len(set(words.ids.tolist())) == count
    for at, _ in pairwise(range(0, count, 7)):
        row = [at, count - 1 - at, at, 0, 0]
        assert tokenizer.encode(words.text(row), add_special_tokens=False).ids == words.ids[row].tolist()


def test_specials_are_found(tokenizer: Tokenizer, words: Words) -> None:
    added = len(tokenizer.encode("ba ce").ids) - len(tokenizer.encode("ba ce", add_special_tokens=False).ids)
    assert words.head + words.tail == added


@given(count=st.integers(1, 300))
def test_more_prompts_than_words_share_a_few_tokens_more(count: int) -> None:
    """Each still has words of its own at its beginning, and how many are shared is told."""
    words = Words([f"w{number}" for number in range(6)], np.arange(6, dtype=np.int32), spaced=False)
    shapes = PromptShapes([8] * count, [], [0] * (count + 1), [], BLOCK)
    made = MadePrompts(words, shapes)
    beginnings = {tuple(made.ids(number)[: made.shared_too_far + 1]) for number in range(count)}
    assert len(beginnings) == count
    assert 6**made.shared_too_far < count or made.shared_too_far == 0


def test_another_seed_makes_other_prompts(words: Words) -> None:
    """A second replay finds nothing of the first in a cache, beyond the first tokens."""
    shapes = Naive([([0, 1, 2], 3), ([0, 1], 1)]).shapes
    one, other = (MadePrompts(words, shapes, seed=seed) for seed in (1, 2))
    assert all(common(one.ids(number), other.ids(number)) <= 3 for number in range(2))
    assert one.ids(0) == MadePrompts(words, shapes, seed=1).ids(0)


def test_segments_of_several_blocks_are_as_good_as_blocks(words: Words) -> None:
    """A run of blocks is one piece, whose first word alone tells it apart."""
    shapes = PromptShapes([3 * BLOCK, 3 * BLOCK + 2, 2], [0, 1, 0, 2], [0, 2, 4, 4], [2, 1, 1], BLOCK)
    made = MadePrompts(words, shapes)
    ids = [made.ids(number) for number in range(3)]
    assert [len(one) for one in ids] == [12, 14, 2]
    assert common(ids[0], ids[1]) == 2 * BLOCK
    assert common(ids[0], ids[2]) == 0


def test_a_tokenizer_without_words_is_refused(tmp_path: Path) -> None:
    """One of bytes, or of numbers, cannot make text of whole words."""
    made = Tokenizer(models.WordLevel({"[UNK]": 0, "1": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ValueError, match="has 0 whole words; text needs 64"):
        words_of(made)
    (tmp_path / "tokenizer.json").write_text("{}")
    for place in (tmp_path, tmp_path / "tokenizer.json"):
        with pytest.raises(ValueError, match="cannot be read as a tokenizer"):
            tokenizer_at(str(place))


def test_a_tokenizer_is_found_by_file_directory_or_model(demo_model_path: Path) -> None:
    for place in (demo_model_path, demo_model_path / "tokenizer.json", "demo"):
        assert tokenizer_at(str(place)).get_vocab_size() == 4096
