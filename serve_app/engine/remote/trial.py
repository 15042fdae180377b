"""The trial of a server that is new or was away: three short prompts of this deployment's own show what it does."""

import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import numpy as np

from router.protocol.block_hash import HASH_BYTES, PrefixScope, hash_blocks
from serve_app.engine.protocol import EngineRequest, SamplingParams
from serve_app.engine.remote.answers import Busy, Part, WorkerGone
from serve_app.engine.remote.dialect import WorkerFacts
from serve_app.engine.remote.servers import Unfit
from serve_app.engine.remote.settings import RemoteSettings

SendTrial = Callable[[EngineRequest, bool], AsyncIterator[Part]]
"""Sends a request, with its priority if the second argument says so, and yields the parts of its answer."""


@dataclass(frozen=True, slots=True)
class TrialResult:
    """What a trial showed. ``priority``: whether requests may have one; ``chain``: the hashes of the first prompt.

    ``untold``: why its answers do not tell how many tokens were cached, "" if they do.
    """

    priority: bool
    untold: str
    chain: bytes


async def try_server(url: str, facts: WorkerFacts, settings: RemoteSettings, send: SendTrial) -> TrialResult:
    """Send a prompt under one salt twice, then under another. Raises Unfit for a server that cannot be used."""
    size, dialect = settings.block_size, facts.dialect
    ids = np.array([secrets.randbelow(max(2, settings.vocab_size - 1)) for _ in range(2 * size + 1)], np.int32)
    roots = [secrets.token_bytes(HASH_BYTES) for _ in range(2)]
    priority, cached = dialect.takes_priority, list[int | None]()

    for root, order in zip((roots[0], roots[0], roots[1]), (1, 0, 0), strict=True):
        request = EngineRequest(
            request_id="trial",
            token_ids=ids,
            scope=PrefixScope("trial", "", root),
            root=root,
            sampling=SamplingParams(1, temperature=0.0),
            order=order,
        )
        try:
            parts = [part async for part in send(request, priority)]
        except (WorkerGone, Busy) as error:
            raise Unfit(f"{url} answers no request: {error}") from None
        except ValueError:
            priority = False
            try:
                parts = [part async for part in send(request, priority)]
            except (ValueError, WorkerGone, Busy) as error:
                raise Unfit(f"{url} refuses a prompt of token ids: {error}") from None
        if not any(part.token_ids for part in parts):
            raise Unfit(f"{url} tells no token ids of its answers; update it")
        cached.append(next((part.cached_tokens for part in reversed(parts) if part.cached_tokens is not None), None))
    if settings.apart and (cached[2] or not (cached[1] or dialect.takes_salt(facts))):
        raise Unfit(f"{url} ignores cache_salt, so tenants would share its cache: update it")
    untold = "" if any(tokens is not None for tokens in cached) else "its answers tell no cached tokens"
    if untold and dialect.cached_tokens_option:
        untold += f" ({dialect.cached_tokens_option})"
    return TrialResult(priority, untold, hash_blocks(roots[0], ids, size))
