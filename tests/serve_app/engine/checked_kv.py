"""A runner that computes nothing, but notices every wrong byte of KV: each position remembers its inputs.

A prompt token's log-probability is minus its id.
"""

from collections.abc import Sequence
from hashlib import blake2b

from serve_app.cache.kv_chain import KvFormat, KvPart, Row
from serve_app.engine.adapter_slots import LoadedAdapters
from serve_app.engine.protocol import TokenLogprob
from serve_app.engine.step import Segment
from tests.serve_app.engine.tiny import VOCAB

BLOCK = 16


def digest(before: bytes, token: int) -> bytes:
    return blake2b(before + int(token).to_bytes(4, "little"), digest_size=8).digest()


def sampled(state: bytes, position: int, seed: int) -> int:
    """Return the token at ``position`` after the tokens of ``state``."""
    return int.from_bytes(blake2b(state + f"{position} {seed}".encode(), digest_size=4).digest(), "little") % VOCAB


def undisturbed(prompt: Sequence[int], max_tokens: int, seed: int, lora: str = "") -> list[int]:
    """Return the tokens that a run alone generates, without engine, blocks or KV."""
    state = lora.encode()
    for token in prompt:
        state = digest(state, token)
    tokens: list[int] = []
    for position in range(len(prompt), len(prompt) + max_tokens):
        tokens.append(sampled(state, position, seed))
        state = digest(state, tokens[-1])
    return tokens


class CheckedRunner:
    """KV slots hold (digest of everything before, digest with their token); a step checks every slot that it reads."""

    kind = "simulated"
    vocab_size = VOCAB
    max_positions = 4096
    block_bytes = 1024
    kv_format = KvFormat("", BLOCK, (KvPart("simulated", ()),))

    def __init__(self, max_loras: int = 4) -> None:
        self.adapters: LoadedAdapters[str] = LoadedAdapters(
            lambda spec: spec.key, max_loras=max_loras, max_cpu_loras=32
        )
        self.slots: dict[tuple[int, int], tuple[bytes, bytes]] = {}
        self.steps = 0

    def execute(self, segments: Sequence[Segment]) -> None:
        self.steps += 1
        written: set[tuple[int, int]] = set()
        for segment in segments:
            state = segment.lora.encode()
            for position in range(segment.start):
                before, after = self.slots[self._slot(segment, position)]
                assert before == state, f"position {position} has KV of other tokens"
                state = after
            for position, token in enumerate(segment.token_ids, segment.start):
                slot = self._slot(segment, position)
                assert slot not in written, "two sequences of a step write the same slot"
                written.add(slot)
                before, state = state, digest(state, int(token))
                self.slots[slot] = before, state
            sampling = segment.sampling
            token = sampled(state, segment.end, sampling.seed) if sampling is not None else None
            targets = () if segment.targets is None else segment.targets
            told = tuple(TokenLogprob(-float(target)) for target in targets)
            segment.token, segment.prompt_logprobs = token, told

    def read_blocks(self, blocks: Sequence[int], rows: Sequence[Row]) -> None:
        raise AssertionError("nothing is exported here")

    def write_blocks(self, blocks: Sequence[int], rows: Sequence[Row]) -> None:
        raise AssertionError("nothing is imported here")

    @staticmethod
    def _slot(segment: Segment, position: int) -> tuple[int, int]:
        return segment.blocks[position // BLOCK], position % BLOCK
