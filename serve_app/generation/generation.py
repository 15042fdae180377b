"""One sequence to generate, and its resulting tokens: plain data, no Ray."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from router.protocol.block_hash import PrefixScope, TokenArray
from serve_app.api.format import TokenIds
from serve_app.api.request import GenerateRequest
from serve_app.engine.protocol import EngineRequest, FinishReason, FirstToken, SamplingParams, Save, TokenLogprob


@dataclass(frozen=True, slots=True)
class Generation:
    """One sequence to generate: the prompt, its keys, and how to sample.

    ``deadline_s``: by ``time.perf_counter``. ``interval_s``: minimum time between two chunks of its tokens, except the
    first and the last. ``store_kv``: whether its KV may stay in the cache. ``grammar``: in llguidance's form;
    ``grammar_field``: the request's with it; ``warning``: what it leaves out. The last
    ``resumed_tokens`` of the prompt are the answer's first ones. ``echo``: the prompt, if the answer repeats it.
    ``saves``: an explicit one, then those of cache breakpoints, the shortest first. ``prompt_ref``: the version of its
    registered prompt. ``model``: its name in usage; ``charged``: whether its prompt is charged, once for all choices.
    ``system_chars``: of the formatted system prompt; ``system_tokens``: those that the prompt has in
    common with it. ``order``: see ``EngineRequest``. ``session``: a ``session_key``. ``traceparent``: W3C's, of the
    span. "" and 0 stand for none.
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
    grammar_field: str = ""
    warning: str = ""
    resumed_tokens: int = 0
    echo: str = ""
    prompt_ref: str = ""
    system_chars: int = 0
    system_tokens: int = 0
    order: int = 0
    session: str = ""
    traceparent: str = ""
    model: str = ""
    charged: bool = False

    @property
    def reads_kv(self) -> bool:
        """Whether cached blocks are of use to it (see ``EngineRequest.reads_kv``)."""
        return self.sampling.prompt_logprobs is None

    @property
    def public(self) -> bool:
        """Whether some of its blocks are public: other tenants' prompts may have them too."""
        return self.scope.public_blocks > 0

    def engine_request(self, request_id: str, now_s: float) -> EngineRequest:
        """Return the engine's request, without the fields that its replica adds. ``now_s``: ``time.perf_counter``."""
        return EngineRequest(
            request_id=request_id,
            token_ids=self.token_ids,
            scope=self.scope,
            root=self.root,
            sampling=self.sampling,
            tenant=self.tenant,
            saves=self.saves,
            timeout_s=self.deadline_s - now_s,
            store_kv=self.store_kv,
            resumed_tokens=self.resumed_tokens,
            order=self.order,
        )


class Tokens(msgspec.Struct, frozen=True):
    """New tokens of one sequence. Only the item with the first token has ``first``.

    ``prompt_logprobs``: of the prompt's next tokens, all before the answer's first.
    """

    token_ids: tuple[int, ...]
    first: FirstToken | None = None
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


def told_ids(request: GenerateRequest, generations: Sequence[Generation]) -> TokenIds | None:
    """Return the token ids that an answer reports, with those of the prompts, None if they are not requested."""
    return TokenIds([made.token_ids.tolist() for made in generations]) if request.return_token_ids else None


TakeTokens = Callable[[Tokens], bool]
"""Takes a sequence's tokens as they arrive, except its first and last, bypassing the generator; False: not now."""
