"""Messages between ingress and replica, as msgpack: calls and their ends by the Serve handle, chunks by a channel.

msgpack of typed structs is several times cheaper than pickling objects; token ids travel as raw int32 bytes.
"""

from typing import Literal

import msgspec
import numpy as np

from router.protocol.block_hash import TokenArray
from router.protocol.events import LoadReport
from serve_app.engine.protocol import EngineRequest, FinishReason, FirstToken, TokenLogprob
from serve_app.errors import LimitReason

ChunkError = Literal["", "too_long", "queue_full", "invalid", "grammar", "failed", "unavailable", "timeout", "rerouted"]


class ReplyTo(msgspec.Struct, frozen=True, array_like=True):
    """The token address of an ingress. ``public_key``: its CURVE key (Z85 text), without which no peer can connect."""

    address: str = ""
    public_key: str = ""


class GenerateCall(msgspec.Struct, frozen=True, array_like=True):
    """One generation. ``caller``: the name of the calling Serve actor; the generation ends when it dies.

    ``request``: without the router's fields, and without the matcher for ``grammar``, which is in llguidance's form,
    "" for none. The replica counts ``timeout_s`` from the call on: no two clocks are compared.
    ``reply_to``: the destination of its chunks. ``lora_path``: path of the adapter for a replica that lacks it.
    ``interval_s``: between chunks. ``traceparent``: W3C's, of the parent of the replica's spans; "": not traced.
    ``session``: the client's word for it, "" for none.
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
    """Tokens that were ready together. The chunk with the first token has ``replica_id`` and ``first``.

    ``seq``: number of earlier chunks of its call. A call returns a last chunk without tokens, with the finish reason or
    an error. ``error`` names a class of failure, and ``message`` explains it to the client; ``reason``: of a refusal.
    ``load``: the replica's load, if it exceeds the router's estimate ("rerouted"). ``logprobs``: one per token.
    ``prompt_logprobs``: of the prompt's next tokens, in chunks before the one with ``first``.
    """

    token_ids: tuple[int, ...] = ()
    replica_id: str = ""
    first: FirstToken | None = None
    finish_reason: FinishReason | None = None
    error: ChunkError = ""
    message: str = ""
    retry_after_s: float = 0.0
    reason: LimitReason | None = None
    load: LoadReport | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    seq: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


def _pack(token_ids: TokenArray) -> bytes:
    return token_ids.astype("<i4", copy=False).tobytes()


def _unpack(_: type, token_ids: bytes) -> TokenArray:
    return np.frombuffer(token_ids, dtype="<i4")


encode = msgspec.msgpack.Encoder(enc_hook=_pack).encode
decode_call = msgspec.msgpack.Decoder(GenerateCall, dec_hook=_unpack).decode
decode_chunk = msgspec.msgpack.Decoder(GenerateChunk).decode
