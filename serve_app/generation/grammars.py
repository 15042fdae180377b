"""Grammars of requests are compiled once in the ingress, so that a bad one is a 400 before anything is scheduled."""

from __future__ import annotations

import json
from collections import OrderedDict

from serve_app.errors import InvalidRequest
from serve_app.fairness.workers import FairWorkers
from serve_app.structured.compiler import GrammarCompiler, GrammarError, llguidance_form
from serve_app.structured.grammar import Grammar

MAX_KNOWN = 128
"""Grammars that are known to be good, over all tenants."""


class CheckedGrammars:
    """Grammars that an ingress has compiled. A tenant's are its own: no other's request is faster for them."""

    def __init__(self, compiler: GrammarCompiler, workers: FairWorkers) -> None:
        self._compiler = compiler
        self._workers = workers
        self._known: OrderedDict[tuple[str, Grammar], str] = OrderedDict()

    async def form(self, grammar: Grammar, tenant: str) -> str:
        """Return a grammar in llguidance's form. Raises InvalidRequest where no answer could follow it."""
        key = (tenant, grammar)
        found = self._known.get(key)
        if found is None:
            found = await self._workers.run(tenant, len(grammar.text), self._check, grammar)
            self._known[key] = found
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(key)
        return found

    def _check(self, grammar: Grammar) -> str:
        try:
            form = llguidance_form(grammar)
            self._compiler.compile(form)
        except GrammarError as error:
            schema = json.loads(grammar.text) if grammar.kind == "json" else {}
            place = self._compiler.place_of_error(schema, str(error))
            where = f"{grammar.field} cannot be followed" + (f", at {place[:200]}" if place else "")
            raise InvalidRequest(f"{where}: {error}.", param=grammar.field) from error
        return form
