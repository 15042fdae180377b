"""What crosses between ingress and replica, as msgpack: a call and its end by the Serve handle, chunks by a channel.

msgpack of typed structs is several times cheaper than pickling objects; token ids travel as raw int32 bytes.
"""

from typing import Literal

import msgspec
import numpy as np

from router.protocol.block_hash import TokenArray
from router.protocol.events import LoadReport
from serve_app.engine.protocol import EngineRequest, FinishReason, FirstToken, TokenLogprob

ChunkError = Literal["", "too_long", "queue_full", "invalid", "failed", "unavailable", "timeout", "rerouted"]


class ReplyTo(msgspec.Struct, frozen=True, array_like=True):
    """Where an ingress takes tokens. ``public_key``: its CURVE key (Z85 text); only who was told it can connect."""

    address: str = ""
    public_key: str = ""


class GenerateCall(msgspec.Struct, frozen=True, array_like=True):
    """One generation. ``caller``: the name of the Serve actor that asks, with whose death it ends.

    ``request``: but for what the router says of it, and what ``grammar`` says, in llguidance's form, "" for none. Its
    ``timeout_s`` is counted by the replica from the call on: no two clocks are compared.
    ``reply_to``: where its chunks go. ``lora_path``: where a replica that lacks the request's adapter finds it.
    ``interval_s``: between chunks. ``traceparent``: W3C's, of the span that the replica's are children of; "": not
    traced. ``session``: the client's word for it, "" for none.
    """

    request: EngineRequest
    caller: str
    reply_to: ReplyTo
    lora_path: str = ""
    interval_s: float = 0.0
    grammar: str = ""
    traceparent: str = ""
    session: str = ""


class GenerateChunk(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that were ready together. The first chunk has ``replica_id`` and ``first``.

    ``seq``: how many chunks of its call were sent before. A call returns a last one without tokens, which says that no
    more come: with the end of those that were sent, or with an error. ``error`` names a class of failure and
    ``message`` the sentence for the client. ``load``: what the replica has to do, where that is more than the router
    believed ("rerouted"). ``logprobs``: one a token.
    """

    token_ids: tuple[int, ...] = ()
    replica_id: str = ""
    first: FirstToken | None = None
    finish_reason: FinishReason | None = None
    error: ChunkError = ""
    message: str = ""
    retry_after_s: float = 0.0
    load: LoadReport | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    seq: int = 0


def _pack(token_ids: TokenArray) -> bytes:
    return token_ids.astype("<i4", copy=False).tobytes()


def _unpack(_: type, token_ids: bytes) -> TokenArray:
    return np.frombuffer(token_ids, dtype="<i4")


encode = msgspec.msgpack.Encoder(enc_hook=_pack).encode
decode_call = msgspec.msgpack.Decoder(GenerateCall, dec_hook=_unpack).decode
decode_chunk = msgspec.msgpack.Decoder(GenerateChunk).decode
