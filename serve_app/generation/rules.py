"""A request's rules for tokens, checked for this model: sampling rules for the engine, and grammars."""

from collections.abc import Collection, Sequence

from serve_app.api.request import CompletionRequest, GenerateRequest, not_enforced
from serve_app.checkpoints.checkpoint import CheckpointInfo
from serve_app.engine.protocol import SamplingParams, TokenRules
from serve_app.errors import ContextLengthExceeded, InvalidRequest
from serve_app.fairness.queue import FairWorkers
from serve_app.fairness.work import TenantsLru
from serve_app.structured.compiler import GrammarError
from serve_app.structured.grammar import Grammar
from serve_app.structured.trial import trials_of
from serve_app.tenants import Tenant

_NO_RULES = TokenRules()

MAX_TOLD = 1 << 19
"""Log-probabilities of prompts' tokens in one answer: some 30 MB of JSON, and a few times as much memory."""


def rules_of(request: GenerateRequest, bad_words: Sequence[tuple[int, ...]], vocab_size: int) -> TokenRules | None:
    """Return a request's rules, None for none. Raises InvalidRequest for token ids beyond the model's vocabulary."""
    for field, ids in (
        ("logit_bias", [token for token, _ in request.logit_bias] if request.logit_bias else ()),
        ("stop_token_ids", request.stop_token_ids),
        ("logprob_token_ids", request.logprob_token_ids),
        ("allowed_token_ids", request.allowed_token_ids),
    ):
        if ids and max(ids) >= vocab_size:
            raise InvalidRequest(
                f"{field} must name token ids from 0 to {vocab_size - 1}; {max(ids)} is not one.", param=field
            )
    rules = TokenRules(
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=request.logit_bias,
        min_tokens=request.min_tokens,
        bad_words=tuple(bad_words),
        allowed=request.allowed_token_ids,
    )
    return None if rules == _NO_RULES else rules


def sampling_of(
    request: GenerateRequest,
    prompt_tokens: int,
    rules: TokenRules | None,
    max_model_len: int,
    default_max_tokens: int,
    end_token_ids: Sequence[int],
) -> SamplingParams:
    """Return a request's sampling parameters without its seed. Raises ContextLengthExceeded, InvalidRequest."""
    room = max_model_len - prompt_tokens
    if room < 1:
        raise ContextLengthExceeded(
            f"The prompt is too long: {prompt_tokens} tokens > {max_model_len - 1}, the most that leave this model a "
            "token to answer with; shorten the prompt.",
            param=request.prompt_field,
        )
    if prompt_tokens < 1:
        message = "The prompt is empty: it needs at least one token."
        raise ContextLengthExceeded(message, param=request.prompt_field, code=None)
    max_tokens = min(default_max_tokens, room) if request.max_tokens is None else request.max_tokens
    if max_tokens > room:
        raise ContextLengthExceeded(
            # Claude Code searches for these words, to ask again for fewer tokens.
            f"The input length and `max_tokens` exceed context limit: {prompt_tokens} + {max_tokens} > "
            f"{max_model_len}; use at most {room}, or a shorter prompt.",
            param="max_tokens",
        )
    if request.min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens must be at most max_tokens, which is {max_tokens}.", param="min_tokens")
    # A grammar itself decides where an answer ends.
    ends = () if request.ignore_eos and request.grammar is None else tuple(end_token_ids)
    stops = tuple(dict.fromkeys((*ends, *request.stop_token_ids)))
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop_token_ids=stops,
        disable_spec_decode=request.disable_spec_decode,
        min_p=request.min_p,
        rules=rules,
        logprobs=request.logprobs,
        logprob_token_ids=request.logprob_token_ids,
        shown_stop_token_ids=stops if request.return_token_ids else _ends_in_text(request, ends),
    )


def hidden_ends(request: GenerateRequest, stop_token_ids: Sequence[int]) -> frozenset[int]:
    """Return those of the stop tokens that an answer with ids has only by their id: no text, no log-probability."""
    stops = frozenset(stop_token_ids)
    return stops.difference(_ends_in_text(request, stops.difference(request.stop_token_ids)))


def _ends_in_text(request: GenerateRequest, ends: Collection[int]) -> tuple[int, ...]:
    stops = request.stop_token_ids if request.include_stop_str_in_output else ()
    if isinstance(request, CompletionRequest) and request.told_echo is not None:
        return (*stops, *ends)  # scoring programs expect max_tokens more tokens than the prompt has
    return stops


def check_told(request: GenerateRequest, numbers: int) -> None:
    """Raise InvalidRequest if an answer would tell more log-probabilities of its prompts' tokens than it may."""
    if numbers > MAX_TOLD:
        field = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
        raise InvalidRequest(
            f"This request asks for {numbers} log-probabilities of its prompts' tokens, and an answer has at most "
            f"{MAX_TOLD}: send fewer or shorter prompts at once, or a lower {field}.",
            param=field,
        )


def stores_kv(request: GenerateRequest, tenant: Tenant) -> bool:
    """Return whether a request's KV may stay. Raises InvalidRequest if the request contradicts that."""
    if request.store_kv and not tenant.store_kv:
        message = "store_kv cannot be true: no request with this API key leaves anything in the cache; leave it out."
        raise InvalidRequest(message, param="store_kv")
    stores = tenant.store_kv and request.store_kv is not False
    if request.save_system_prompt_kv_cache and not stores:
        why = "store_kv is false" if tenant.store_kv else "no request with this API key leaves anything in the cache"
        message = f"save_system_prompt_kv_cache cannot be true, because {why}; leave it out."
        raise InvalidRequest(message, param="save_system_prompt_kv_cache")
    return stores


def refuse_without_logits(request: GenerateRequest) -> None:
    """Raise InvalidRequest for fields that need a model's logits, for an engine without any."""
    values = {
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "repetition_penalty": request.repetition_penalty != 1,
        "logit_bias": request.logit_bias,
        "min_p": request.min_p,
        "bad_words": request.bad_words,
        "allowed_token_ids": request.allowed_token_ids,
        "logprobs": request.logprobs is not None,
        "prompt_logprobs": request.prompt_logprobs is not None,
        request.grammar.field if request.grammar is not None else "": request.grammar,
    }
    for field, value in values.items():
        if value:
            raise InvalidRequest(
                f"{field} needs a model's logits, and this deployment's engine is simulated; leave it out.", param=field
            )


MAX_KNOWN = 256
"""Number of remembered grammars, valid or not, over all tenants."""


class CheckedGrammars:
    """Grammars that an ingress has compiled, so that a bad one is a 400 at once. Each tenant has its own."""

    def __init__(self, info: CheckpointInfo, workers: FairWorkers) -> None:
        self._ends = bool(info.eos_token_ids)
        self._trials = trials_of(info.path, info.vocab_size, tuple(info.eos_token_ids))
        self._workers = workers
        self._cached: TenantsLru[Grammar, tuple[str, str] | GrammarError] = TenantsLru(MAX_KNOWN)

    async def form(self, grammar: Grammar, tenant: str) -> tuple[str, str]:
        """Return a grammar in llguidance's form, and a warning about what it leaves out, "" for nothing.

        Raises InvalidRequest if no answer could match it.
        """
        if not self._ends:
            message = f"{grammar.field} needs a model with an end token, and this one has none."
            raise InvalidRequest(message, param=grammar.field)
        result = self._cached.get(tenant, grammar)
        if result is None:
            result = await self._workers.run(tenant, len(grammar.text), self._checked, grammar, tenant)
        if isinstance(result, GrammarError):
            raise InvalidRequest(f"{grammar.field} cannot be followed: {result}.", param=grammar.field)
        return result

    def _checked(self, grammar: Grammar, tenant: str) -> tuple[str, str] | GrammarError:
        """Check a grammar, unless a request that came before with the same one has done so meanwhile."""
        result = self._cached.get(tenant, grammar)
        if result is None:
            try:
                form, left_out = self._trials.checked(grammar)
                result = form, not_enforced(left_out)
            except GrammarError as error:
                result = error.with_traceback(None)
            self._cached.put(tenant, grammar, result)
        return result
