"""A replica's grammars: compiled in separate threads, in turns of tenants, before requests reach the engine."""

from collections.abc import Mapping

from serve_app.checkpoints.checkpoint import CheckpointInfo
from serve_app.config.app import AppConfig
from serve_app.fairness.queue import FairWorkers
from serve_app.fairness.shares import Shares
from serve_app.structured.compiler import GrammarCompiler
from serve_app.structured.matcher import AnswerMatcher, Matchers


class ReplicaMatchers:
    """Matchers of one replica. Used from one event loop."""

    def __init__(self, config: AppConfig, info: CheckpointInfo) -> None:
        self._matchers = Matchers(GrammarCompiler(info.path, info.vocab_size, info.eos_token_ids))
        self._shares = Shares(config.cache_shares)
        self._workers = FairWorkers(self._shares, threads=2)

    def set_shares(self, shares: Mapping[str, float]) -> None:
        """Use these weights of tenants from now on."""
        self._shares.set_weights(shares)

    async def matcher(self, grammar: str, tenant: str) -> AnswerMatcher:
        """Return a new matcher for one answer. Raises GrammarError."""
        return await self._workers.run(tenant, len(grammar), self._matchers.matcher, grammar, tenant)
