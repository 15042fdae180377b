"""A prompt's identity: what caches hash and compare in place of ids that stand for other contents."""

import numpy as np
import pytest
from msgspec import structs

from router.protocol.block_hash import extend_chain
from serve_app.engine.protocol import EngineRequest, request_of_wire, to_wire
from tests.serve_app.conftest import MakeEngine
from tests.serve_app.engine.tiny import prompt, request, run_all

IDS = prompt(96, 7)
PLACE = slice(40, 48)
"""Ids that are equal in all of these prompts, and stand for another picture in each."""


def picture(name: str, number: int, max_tokens: int = 1) -> EngineRequest:
    identity = IDS.copy()
    identity[PLACE] = np.arange(8, dtype=np.int32) - (1 << 20) * number  # below every vocabulary
    return structs.replace(request(name, IDS, max_tokens), hashed_ids=identity)


def test_equal_ids_with_another_identity_share_nothing_from_the_difference_on(make_engine: MakeEngine) -> None:
    """Not even by each other's hashes: the cache compares identities. An answer's tokens are their own."""
    engine = make_engine()
    first, again, other = picture("one", 1, 40), picture("again", 1), picture("other", 2)
    answer = run_all(engine, [first]).tokens["one"]
    assert run_all(engine, [again, other, request("plain", IDS, 1)]).cached == {"again": 80, "other": 32, "plain": 32}
    forged = structs.replace(picture("forged", 3), block_hashes=extend_chain(again.root, 0, again.identity, 16))
    assert run_all(engine, [forged]).cached["forged"] == 32
    more = np.array(answer, dtype=np.int32)
    ids, identity = (np.concatenate((them, more)) for them in (IDS, first.identity))
    turns = [structs.replace(first, request_id=name, token_ids=ids, hashed_ids=hashed) for name, hashed in
             (("next", identity), ("stranger", np.concatenate((other.identity, more))))]  # fmt: skip
    assert run_all(engine, turns).cached == {"next": (len(ids) - 1) // 16 * 16, "stranger": 96}, (
        "no more than its own prompt"
    )


def test_it_travels_with_the_request_and_costs_nothing_where_it_is_the_ids() -> None:
    for sent in (picture("one", 1), request("plain", IDS)):
        read = request_of_wire(to_wire(sent))
        assert np.array_equal(read.identity, sent.identity) and np.array_equal(read.token_ids, IDS)
    assert read.hashed_ids is None and read.identity is read.token_ids


def test_an_identity_of_another_length_is_refused(make_engine: MakeEngine) -> None:
    wrong = structs.replace(picture("one", 1), hashed_ids=IDS[:-1])
    with pytest.raises(ValueError, match="hashed_ids"):
        make_engine().submit(wrong, lambda _: None)
