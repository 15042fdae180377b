"""What crosses between ingress and replica, as msgpack: a call and its end by the Serve handle, chunks by a channel.

msgpack of typed structs is several times cheaper than pickling objects, and the token ids travel as raw int32 bytes.
What the engine takes as one object, scope or sampling, crosses as one: its fields are listed where it is defined.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import numpy as np

from router.protocol.block_hash import PrefixScope
from router.protocol.events import LoadReport
from serve_app.engine.protocol import (
    EngineRequest,
    FinishReason,
    SamplingParams,
    Save,
    SaveResult,
    TokenLogprob,
    TokenMatcher,
)

ChunkError = Literal["", "too_long", "queue_full", "invalid", "failed", "unavailable", "timeout", "rerouted"]


class ReplyTo(msgspec.Struct, frozen=True, array_like=True):
    """Where an ingress takes tokens. ``public_key``: its CURVE key (Z85 text); only who was told it can connect."""

    address: str = ""
    public_key: str = ""


class GenerateCall(msgspec.Struct, frozen=True, array_like=True):
    """One generation. ``caller``: the name of the Serve actor that asks, with whose death it ends.

    ``reply_to``: where its chunks go.

    ``token_ids``: little-endian int32 bytes; ``root``: as in ``EngineRequest``.

    ``lora_path``: where a replica that lacks the adapter ``scope.lora`` finds it. ``timeout_s``: how long it may
    still take, counted by the replica from the call on: no two clocks are compared. ``interval_s``: between chunks.
    ``store_kv``, ``resumed_tokens``, ``saves``: as in ``EngineRequest``. ``grammar``: in llguidance's form.
    ``traceparent``: W3C's, of the span that the replica's are children of; "": not traced.
    """

    request_id: str
    caller: str
    reply_to: ReplyTo
    token_ids: bytes
    scope: PrefixScope
    root: bytes
    tenant: str
    sampling: SamplingParams
    saves: tuple[Save, ...] = ()
    lora_path: str = ""
    timeout_s: float = math.inf
    interval_s: float = 0.0
    store_kv: bool = True
    grammar: str = ""
    resumed_tokens: int = 0
    traceparent: str = ""

    def to_engine_request(
        self, block_hashes: bytes, router_id: str, reservation: int, matcher: TokenMatcher | None = None
    ) -> EngineRequest:
        """Build the engine's view of this call; ``block_hashes`` and the reservation come from the router.

        ``matcher``: what ``grammar`` says.
        """
        return EngineRequest(
            request_id=self.request_id,
            token_ids=np.frombuffer(self.token_ids, dtype="<i4"),
            scope=self.scope,
            root=self.root,
            sampling=self.sampling,
            block_hashes=block_hashes,
            tenant=self.tenant,
            router_id=router_id,
            reservation=reservation,
            saves=self.saves,
            timeout_s=self.timeout_s,
            store_kv=self.store_kv,
            resumed_tokens=self.resumed_tokens,
            matcher=matcher,
        )


class GenerateChunk(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that were ready together. The first chunk has ``replica_id``, ``cached_tokens``, ``queue_s``, ``save``.

    ``seq``: how many chunks of its call were sent before. A call returns a last one without tokens, which says that no
    more come: with the end of those that were sent, or with an error. ``error`` names a class of failure and
    ``message`` the sentence for the client. ``load``: what the replica has to do, where that is more than the router
    believed ("rerouted"). ``logprobs``: one a token.
    """

    token_ids: tuple[int, ...] = ()
    replica_id: str = ""
    cached_tokens: int | None = None
    queue_s: float = 0.0
    finish_reason: FinishReason | None = None
    error: ChunkError = ""
    message: str = ""
    retry_after_s: float = 0.0
    save: SaveResult | None = None
    load: LoadReport | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    seq: int = 0


encode = msgspec.msgpack.Encoder().encode
decode_call = msgspec.msgpack.Decoder(GenerateCall).decode
decode_chunk = msgspec.msgpack.Decoder(GenerateChunk).decode
