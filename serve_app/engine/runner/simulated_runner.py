"""A cost model in place of a model: the same steps, simulated durations, pseudo-random tokens.

Scheduling and caching around it are real. Every result from it must be labelled "simulated".
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serve_app.cache.kv_chain import KvFormat, KvPart, Row
from serve_app.config.engine import SIMULATED_DECODE_EACH_S
from serve_app.engine.adapter_slots import LoadedAdapters
from serve_app.engine.lora.peft_files import read_described
from serve_app.engine.runner.position_random import position_uniform
from serve_app.engine.settings import EngineSettings
from serve_app.engine.step import Segment


@dataclass(frozen=True, slots=True)
class CostModel:
    """Time of a step = base + prefill tokens / rate + decoding sequences * per sequence, in seconds.

    A step without prefill costs ``decode_base_s``; one with prefill adds it only if it also decodes.
    """

    prefill_tokens_per_s: float = 5000.0
    decode_base_s: float = 0.02
    decode_per_sequence_s: float = SIMULATED_DECODE_EACH_S
    vocab_size: int = 32000
    max_positions: int = 1 << 20
    block_bytes: int = 2 * 1024 * 1024

    def step_s(self, prefill_tokens: int, decodes: int) -> float:
        """Return the duration of a step with this work."""
        decode_s = self.decode_base_s + decodes * self.decode_per_sequence_s if decodes else 0.0
        return prefill_tokens / self.prefill_tokens_per_s + decode_s


class SimulatedRunner:
    """Replaces a ``ModelRunner``; sleeps instead of computing."""

    kind = "simulated"

    def __init__(
        self, cost: CostModel, settings: EngineSettings, *, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.cost = cost
        self.kv_format = KvFormat(settings.model_fingerprint, settings.block_size, (KvPart("simulated", ()),))
        # Adapters are read and distinguished, but change no token: only their scope and their slots are real.
        self.adapters = LoadedAdapters(
            lambda spec: read_described(spec).config, max_loras=settings.max_loras, max_cpu_loras=settings.max_cpu_loras
        )
        self.vocab_size = cost.vocab_size
        self.max_positions = cost.max_positions
        self.block_bytes = cost.block_bytes
        self._sleep = sleep

    def execute(self, segments: Sequence[Segment]) -> None:
        """Sleep for the step's simulated duration and add deterministic pseudo-random tokens."""
        decodes = sum([segment.start > 0 and len(segment.token_ids) == 1 for segment in segments])
        tokens = sum([len(segment.token_ids) for segment in segments])
        self._sleep(self.cost.step_s(tokens - decodes, decodes))
        for segment in segments:
            segment.token = self._token(segment) if segment.sampling else None

    def read_blocks(self, blocks: Sequence[int], rows: Sequence[Row]) -> None:
        """Do nothing: simulated KV has no bytes."""

    def write_blocks(self, blocks: Sequence[int], rows: Sequence[Row]) -> None:
        """Do nothing: simulated KV has no bytes."""

    def _token(self, segment: Segment) -> int:
        """Draw from (last token, position, seed); skip stop tokens, so that answers have the requested length."""
        sampling = segment.sampling
        assert sampling is not None
        seed = sampling.seed * self.vocab_size + int(segment.token_ids[-1])
        token = int(position_uniform(seed, segment.start + len(segment.token_ids)) * self.vocab_size)
        while token in sampling.stop_token_ids:
            token = (token + 1) % self.vocab_size
        return token
