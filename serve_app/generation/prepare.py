"""A validated request and its tenant -> one engine request for each sequence.

Its prompts come whole from ``PromptMaker``; each becomes as many requests as it has choices.
"""

import hashlib
import math
import secrets
from dataclasses import InitVar, dataclass, field, replace

from msgspec import structs

from serve_app.api.request import ChatRequest, CompletionRequest, GenerateRequest
from serve_app.checkpoints.adapter_registry import AdapterRegistry
from serve_app.checkpoints.checkpoint import CheckpointInfo
from serve_app.engine.protocol import EngineRequest, SamplingParams, Save, TokenRules
from serve_app.fairness.queue import FairWorkers
from serve_app.fairness.shares import Shares
from serve_app.generation.prompt import PreparedPrompt, PromptMaker, RequestScope, ScopeKeys
from serve_app.generation.rules import (
    CheckedGrammars,
    check_told,
    refuse_without_logits,
    rules_of,
    sampling_of,
    stores_kv,
)
from serve_app.prompts.registry import Prompts
from serve_app.tenants import Tenant, Tenants
from serve_app.tokenization.tokenizer import PromptTokenizer

WHOLE_INTERVAL_S = 0.25
"""Time between chunks of an answer that is sent whole: no client sees its parts, and each costs the ingress as much."""

TOLD_TOOLS = "this model's chat template has no tools: they are told in a system message, which may serve less well"
"""The warning where it is so."""


def session_key(tenant: str, word: str) -> str:
    """Return 16 hexadecimal digits for a tenant's session word, "" for none; the word itself is not passed on."""
    return hashlib.blake2b(f"{tenant}\0{word}".encode(), digest_size=8).hexdigest() if word else ""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of generations, in tokens, and of the time that saves stay. ``save_ttl_s`` None: until a reset."""

    max_model_len: int
    default_max_tokens: int
    save_ttl_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Checked:
    """A request whose every field was checked, and what all of its sequences share. ``rules`` None: it has none.

    ``grammar``: in llguidance's form; ``warning``: what it and the tools do without. "" stands for none.
    """

    request: GenerateRequest
    scope: RequestScope
    store_kv: bool
    seed: int
    rules: TokenRules | None
    grammar: str
    warning: str


@dataclass(eq=False)
class Preparer:
    """Turns requests into generations for one model. ``simulated``: there are no logits that rules could change.

    ``shares_prompts``: whether the engine keeps public prompts for all tenants at once.
    """

    info: CheckpointInfo
    tokenizer: PromptTokenizer
    tenants: InitVar[Tenants]
    secret: InitVar[bytes]
    adapters: AdapterRegistry
    limits: Limits
    registered: InitVar[Prompts | None] = None
    workers: FairWorkers = field(default_factory=lambda: FairWorkers(Shares({})))
    simulated: bool = False
    shares_prompts: InitVar[bool] = True
    prompts: PromptMaker = field(init=False)

    def __post_init__(self, tenants: Tenants, secret: bytes, registered: Prompts | None, shares_prompts: bool) -> None:
        registered = Prompts() if registered is None else registered
        keys = ScopeKeys(self.info.fingerprint, tenants, secret, registered, public=shares_prompts)
        self.prompts = PromptMaker(
            self.tokenizer, keys, self.adapters, registered, self.workers, self.limits.max_model_len
        )
        self._grammars = CheckedGrammars(self.info, self.workers)

    def configure(self, limits: Limits) -> None:
        """Use these limits, and the current tenants and prompts, from the next request on."""
        self.limits = limits
        self.prompts.max_model_len = limits.max_model_len
        self.prompts_changed()

    def prompts_changed(self) -> None:
        """Use the current prompts."""
        self.prompts.prompts_changed()

    async def prepare(
        self, request: GenerateRequest, tenant: Tenant, request_id: str, deadline_s: float = math.inf
    ) -> list[EngineRequest]:
        """Return prompts x n generations, a prompt's choices in a row. Raises NotFound, or InvalidRequest."""
        checked = await self._checked(request, tenant)
        # Each choice of a completion repeats its prompt's log-probabilities, a chat has them once.
        tops, telling = request.told_prompt, request.n if isinstance(request, CompletionRequest) else 1
        generations: list[EngineRequest] = []
        numbers = 0
        async for prompt in self.prompts.prompts(request, checked.scope):
            ids = prompt.encoded.token_ids
            sampling = sampling_of(
                request, len(ids), checked.rules, self.limits.max_model_len, self.limits.default_max_tokens,
                self.info.eos_token_ids,
            )  # fmt: skip
            saves, system_tokens = await self.prompts.system_save(
                request, checked.scope, prompt, self.limits.save_ttl_s
            )
            if isinstance(request, ChatRequest) and request.breakpoints and checked.store_kv:
                saves += await self.prompts.breakpoint_saves(request, checked.scope, prompt)
            first = self._generation(checked, prompt, sampling, saves, system_tokens)
            echo = self.prompts.echo(request, len(generations) // request.n, prompt) if request.echo else ""
            if tops is not None:
                numbers += len(ids) * telling * (1 + tops)
                check_told(request, numbers)
            for choice in range(request.n):
                generations.append(
                    structs.replace(
                        first,
                        request_id=f"{request_id}.{len(generations)}",
                        deadline_s=deadline_s,
                        # Choices of one request must differ; the first equals a single one's.
                        sampling=replace(
                            sampling,
                            seed=checked.seed + choice,
                            seeded=request.seed is not None,
                            prompt_logprobs=tops if choice < telling else None,
                        ),
                        echo=echo,
                        charged=choice == 0,
                    )
                )
        return generations

    async def _checked(self, request: GenerateRequest, tenant: Tenant) -> _Checked:
        """Check what does not depend on the length of a prompt."""
        if self.simulated:
            refuse_without_logits(request)
        store_kv = stores_kv(request, tenant)
        scope = await self.prompts.scope(request, tenant)
        seed = secrets.randbits(62) if request.seed is None else request.seed
        grammar = warning = ""
        if request.grammar is not None:
            grammar, warning = await self._grammars.form(request.grammar, tenant.name)
        if request.tool_use.tools and request.tool_use.shown and self.tokenizer.template.tells_tools:
            warning = "; ".join(filter(None, (warning, TOLD_TOOLS)))
        bad_words = await self.tokenizer.word_ids(request.bad_words, tenant.name) if request.bad_words else ()
        rules = rules_of(request, bad_words, self.info.vocab_size)
        return _Checked(request, scope, store_kv, seed, rules, grammar, warning)

    def _generation(
        self,
        checked: _Checked,
        prompt: PreparedPrompt,
        sampling: SamplingParams,
        saves: tuple[Save, ...],
        system_tokens: int,
    ) -> EngineRequest:
        """Return what all choices of a prompt share."""
        request, scope = checked.request, checked.scope
        session = session_key(scope.tenant, request.session) if request.session else ""
        parent = session_key(scope.tenant, request.parent) if request.parent else ""
        return EngineRequest(
            request_id="",
            token_ids=prompt.encoded.token_ids,
            hashed_ids=prompt.encoded.identity if prompt.encoded.identity is not prompt.encoded.token_ids else None,
            block_hashes=prompt.encoded.block_hashes,
            scope=prompt.scope,
            root=prompt.root,
            placement_key=prompt.placement_key,
            tenant=scope.tenant,
            sampling=sampling,
            saves=saves,
            lora_path=scope.adapter.path if scope.adapter is not None else "",
            # Stop strings are searched here, and the replica continues until one is found.
            interval_s=0.0 if request.stream or request.stop else WHOLE_INTERVAL_S,
            store_kv=checked.store_kv,
            grammar=checked.grammar,
            grammar_field=request.grammar.field if request.grammar is not None else "",
            warning=checked.warning,
            prompt_ref=scope.prompt_ref,
            system_chars=len(prompt.system_text),
            system_tokens=system_tokens,
            order=request.order,
            session=session,
            parent=parent if parent != session else "",
            final=request.final,
            expected_tokens=min(request.expected_tokens, sampling.max_tokens),
            model=request.answering_model,
            tokenizer=self.info.tokenizer,
        )
