"""Who asks what of an engine under churn: tenants, salts, adapters and prefixes that come and go, drawn at random.

Knows no engine but for the adapters it has loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import numpy as np

from router.protocol.block_hash import PrefixScope, TokenArray
from serve_app.checkpoints.checkpoint import CheckpointInfo
from serve_app.engine.protocol import EngineRequest, SamplingParams

SECRET = b"churn"


class Traffic:
    """Draws requests from ``rng``. ``adapters``: the keys that can be named now; ``prefixes``: of each tenant."""

    def __init__(
        self, info: CheckpointInfo, rng: Random, tenants: int, prefixes: int, adapters: Callable[[], Sequence[str]]
    ) -> None:
        self._random = rng
        self._vocab = info.vocab_size
        self._fingerprint = info.fingerprint
        self._tenants = tenants
        self._prefixes = prefixes
        self._adapters = adapters
        self._families: dict[tuple[str, int], TokenArray] = {}
        self._numbers = 0

    def tenant(self) -> str:
        """Return a configured tenant, or one of a window of others that moves on for ever."""
        if self._random.random() < 0.7:
            return f"tenant-{self._random.randrange(self._tenants)}"
        return f"visitor-{self._numbers // 200 + self._random.randrange(4)}"

    def scope(self, tenant: str) -> PrefixScope:
        """Return one of a tenant's scopes: with its own salt mostly, now and then with an adapter that is loaded."""
        salt = tenant if self._random.random() < 0.8 else f"{tenant} {self._random.randrange(3)}"
        loaded = self._adapters()
        lora = self._random.choice(loaded) if loaded and self._random.random() < 0.4 else ""
        return PrefixScope(self._fingerprint, lora, salt.encode())

    def prefix(self, tenant: str, family: int) -> TokenArray:
        """Return one of a tenant's prefixes; now and then it is a new one from then on."""
        found = self._families.get((tenant, family))
        if found is None or self._random.random() < 0.03:
            found = self._families[tenant, family] = self.tokens(self._random.randrange(40, 400))
            if len(self._families) > 100:
                del self._families[next(iter(self._families))]
        return found

    def tokens(self, count: int) -> TokenArray:
        """Return so many tokens that nobody had before."""
        generator = np.random.default_rng(self._random.randrange(1 << 60))
        return generator.integers(300, self._vocab, count, dtype=np.int32)

    def request(
        self,
        tenant: str,
        *,
        prefix: TokenArray | None = None,
        family: int | None = None,
        scope: PrefixScope | None = None,
    ) -> EngineRequest:
        """Return a request of a tenant's prefix and a question of its own; what is not given is drawn."""
        if prefix is None:
            prefix = self.prefix(tenant, self._random.randrange(self._prefixes) if family is None else family)
        scope = scope or self.scope(tenant)
        self._numbers += 1
        return EngineRequest(
            f"request-{self._numbers}",
            np.append(prefix, self.tokens(self._random.randrange(1, 60))),
            scope,
            scope.root(SECRET),
            SamplingParams(self._random.choice([1, 1, 4, 8, 16, 120]), temperature=0.0),
            tenant=tenant,
            router_id=f"router-{self._numbers % 3}",
            reservation=self._numbers,
        )
