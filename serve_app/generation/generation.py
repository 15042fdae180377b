"""One sequence to generate, and the tokens that come of it: plain data, no Ray."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from router.protocol.block_hash import PrefixScope, TokenArray
from serve_app.engine.protocol import FinishReason, SamplingParams, Save, SaveResult, TokenLogprob


@dataclass(frozen=True, slots=True)
class Generation:
    """One sequence to generate: the prompt, its keys, and how to sample.

    ``deadline_s``: the moment of ``time.perf_counter`` after which nobody waits for it any more. ``interval_s``: at
    least so much lies between its tokens' ways here, except the first ones' and the last ones'. ``store_kv``: whether
    its KV may stay in the cache. ``grammar``: in llguidance's form, "" for none. The last ``resumed_tokens`` of the
    prompt are the answer's first ones. ``echo``: the prompt, where it stands before the answer. ``saves``: an explicit
    one, then those of cache breakpoints, the shortest first. ``prompt_ref``: the version of a registered prompt that
    it begins with, "" for none.
    ``system_chars``: of the formatted system prompt, 0 for none; ``system_tokens``: those of the prompt that are its.
    ``traceparent``: W3C's, of the request's span; "": it is not traced.
    """

    request_id: str
    token_ids: TokenArray
    block_hashes: bytes
    scope: PrefixScope
    root: bytes
    placement_key: bytes
    tenant: str
    sampling: SamplingParams
    saves: tuple[Save, ...] = ()
    lora_path: str = ""
    deadline_s: float = math.inf
    interval_s: float = 0.0
    store_kv: bool = True
    grammar: str = ""
    resumed_tokens: int = 0
    echo: str = ""
    prompt_ref: str = ""
    system_chars: int = 0
    system_tokens: int = 0
    traceparent: str = ""

    @property
    def public(self) -> bool:
        """Whether some of its blocks are public: other tenants' prompts have them, too."""
        return self.scope.public_blocks > 0


class Tokens(msgspec.Struct, frozen=True):
    """New tokens of one sequence. ``cached_tokens`` is set once, in the first item, with ``save`` if asked for.

    ``logprobs``: one for each token, where they were asked for.
    """

    token_ids: tuple[int, ...]
    cached_tokens: int | None = None
    finish_reason: FinishReason | None = None
    save: SaveResult | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
