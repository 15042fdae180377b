"""What crosses the Serve handle between ingress and replica: one call in, chunks of tokens out, as msgpack.

Owns the byte format only. msgpack of a flat struct is several times cheaper than pickling objects, and the
token ids travel as raw int32 bytes.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from router.block_hash import PrefixScope
from serve_app.engine.protocol import EngineRequest, FinishReason, SamplingParams, Save, SaveOutcome

ChunkError = Literal["", "too_long", "queue_full", "invalid", "failed", "unavailable"]


class GenerateCall(msgspec.Struct, frozen=True, array_like=True):
    """One generation. ``token_ids``: little-endian int32 bytes; ``root`` and ``public_blocks`` as in block_hash.

    ``lora_path``: where a replica that lacks the adapter ``lora`` finds it.
    """

    request_id: str
    token_ids: bytes
    model: str
    lora: str
    salt: bytes
    root: bytes
    tenant: str
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop_token_ids: tuple[int, ...]
    disable_spec_decode: bool = False
    save: Save | None = None
    lora_path: str = ""
    public_blocks: int = 0

    def to_engine_request(self, block_hashes: bytes, router_id: str, reservation: int) -> EngineRequest:
        """Build the engine's view of this call; ``block_hashes`` and the reservation come from the router."""
        return EngineRequest(
            request_id=self.request_id,
            token_ids=np.frombuffer(self.token_ids, dtype="<i4"),
            scope=PrefixScope(self.model, self.lora, self.salt, self.public_blocks),
            root=self.root,
            sampling=SamplingParams(
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                seed=self.seed,
                stop_token_ids=self.stop_token_ids,
                disable_spec_decode=self.disable_spec_decode,
            ),
            block_hashes=block_hashes,
            tenant=self.tenant,
            router_id=router_id,
            reservation=reservation,
            save=self.save,
        )


class GenerateChunk(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that were ready together. The first chunk has ``replica_id``, ``cached_tokens``, ``queue_s``, ``save``.

    ``error`` names a class of failure and ``message`` the sentence for the client; both only on a last chunk.
    """

    token_ids: tuple[int, ...] = ()
    replica_id: str = ""
    cached_tokens: int | None = None
    queue_s: float = 0.0
    finish_reason: FinishReason | None = None
    error: ChunkError = ""
    message: str = ""
    retry_after_s: float = 0.0
    save: SaveOutcome | None = None


_call_encoder = msgspec.msgpack.Encoder()
_call_decoder = msgspec.msgpack.Decoder(GenerateCall)
_chunk_decoder = msgspec.msgpack.Decoder(GenerateChunk)


def encode(message: GenerateCall | GenerateChunk) -> bytes:
    """Serialize a call or a chunk."""
    return _call_encoder.encode(message)


def decode_call(data: bytes) -> GenerateCall:
    """Parse a call."""
    return _call_decoder.decode(data)


def decode_chunk(data: bytes) -> GenerateChunk:
    """Parse a chunk."""
    return _chunk_decoder.decode(data)
