"""Prefixes that a replica is computing now and its cache does not report yet.

This short record of unreleased decisions by placement key sends a second request for a cold prompt after the first.
"""

from collections import OrderedDict

from router.protocol.block_hash import common_blocks

_CHAINS_A_KEY = 4


class PendingPrefixes:
    """Placement key -> the last few (reservation, replica, chain). Beyond ``max_keys``, the oldest key is dropped."""

    def __init__(self, block_size: int, max_keys: int = 4096) -> None:
        self.block_size = block_size
        self._max_keys = max_keys
        self._chains: OrderedDict[bytes, dict[int, tuple[str, bytes]]] = OrderedDict()
        self._key_of: dict[int, bytes] = {}

    def add(self, placement_key: bytes, reservation: int, replica_id: str, chain: bytes) -> None:
        """Record that a replica received ``chain`` (packed hashes)."""
        chains = self._chains.setdefault(placement_key, {})
        chains[reservation] = (replica_id, chain)
        self._key_of[reservation] = placement_key
        if len(chains) > _CHAINS_A_KEY:
            oldest = next(iter(chains))
            del chains[oldest], self._key_of[oldest]
        if len(self._chains) > self._max_keys:
            for oldest in self._chains.popitem(last=False)[1]:
                del self._key_of[oldest]

    def discard(self, reservation: int) -> None:
        """Forget one decision. Unknown decisions are ignored."""
        placement_key = self._key_of.pop(reservation, None)
        if placement_key is not None:
            chains = self._chains[placement_key]
            del chains[reservation]
            if not chains:
                del self._chains[placement_key]

    def match(self, placement_key: bytes, chain: bytes) -> dict[str, int]:
        """Return, by replica, the leading tokens that ``chain`` shares with a prompt already in progress there."""
        chains = self._chains.get(placement_key)
        if not chains:
            return {}
        tokens: dict[str, int] = {}
        for replica_id, other in chains.values():
            common = common_blocks(chain, other) * self.block_size
            if common > tokens.get(replica_id, 0):
                tokens[replica_id] = common
        return tokens
