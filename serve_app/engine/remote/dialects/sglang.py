"""SGLang, by /generate."""

from collections.abc import Mapping
from typing import Any

import msgspec

from serve_app.engine.protocol import AdapterSpec, EngineRequest, TokenLogprob, TokenRules
from serve_app.engine.remote.answers import Part, VocabularyId, WorkerError, failed_part, logprob_of
from serve_app.engine.remote.dialect import Dialect, WorkerFacts, grammar_of, sampling_fields, seed_of


class Sglang(Dialect):
    """SGLang."""

    owner = "sglang"
    product = "SGLang"
    answers_at = "/generate"
    body_schema = "GenerateReqInput"
    describes_at = ("/server_info", "/get_server_info")  # the second is the older name
    adapters_at = ""
    running_metric = "sglang:num_running_reqs"
    waiting_metric = "sglang:num_queue_reqs"
    repeats_tokens = True

    def body(self, request: EngineRequest, facts: WorkerFacts, salt: str, bad_words: list[str]) -> dict[str, Any]:
        """See ``Dialect``."""
        sampling, rules = request.sampling, request.sampling.rules or TokenRules()
        refused = {
            "allowed_token_ids": rules.allowed,
            "bad_words of several tokens": bad_words,
            "prompt_logprobs": sampling.prompt_logprobs is not None,
        }
        if missing := [name for name, value in refused.items() if value]:
            raise ValueError(f"{facts.called} takes no {', '.join(missing)}")
        params = sampling_fields(request, rules, "max_new_tokens")
        params["min_new_tokens"] = max(0, rules.min_tokens - request.resumed_tokens)
        params["skip_special_tokens"] = False
        params["no_stop_trim"] = True
        if (seed := seed_of(request)) is not None:
            params["sampling_seed"] = seed
        if request.grammar:
            params |= _grammar(request)
        body: dict[str, Any] = {
            "input_ids": request.token_ids.tolist(),
            "sampling_params": params,
            "cache_salt": salt,
            "stream": True,
        }
        if request.scope.lora:
            body["lora_path"] = AdapterSpec.of_key(request.scope.lora, "").name
        if sampling.logprobs is not None:
            body |= {"return_logprob": True, "top_logprobs_num": sampling.logprobs}
            if sampling.logprob_token_ids:
                body["token_ids_logprob"] = list(sampling.logprob_token_ids)
        return body

    def part(self, event: bytes, request: EngineRequest, had: int) -> Part:
        """See ``Dialect``. An event has all tokens so far, or only the new ones."""
        read = _event(event)
        if read.error is not None:
            return failed_part(read.error)
        meta = read.meta_info
        count = meta.completion_tokens or len(read.output_ids)
        new = max(0, count - had)
        ids = tuple(read.output_ids[len(read.output_ids) - new :]) if new else ()
        end = meta.finish_reason or _End()
        if end.type == "abort":
            return Part(error=end.message or "aborted", status=end.status_code or 500)
        part = Part(ids, finish=end.type, cached_tokens=meta.cached_tokens)
        if meta.output_token_logprobs is not None and new:
            own = meta.output_token_logprobs[-new:]
            tops = meta.output_token_ids_logprobs or meta.output_top_logprobs
            tops = tops or [None] * len(meta.output_token_logprobs)
            part.logprobs = tuple(
                TokenLogprob(logprob_of(value), tuple((token, logprob_of(each)) for each, token, _ in top or ()))
                for (value, _, _), top in zip(own, tops[-new:], strict=False)
            )
        return part


def _grammar(request: EngineRequest) -> Mapping[str, Any]:
    schema, lark = grammar_of(request)
    return {"json_schema": msgspec.json.encode(schema).decode()} if schema is not None else {"ebnf": lark}


_Logprob = tuple[float | None, VocabularyId, msgspec.Raw]


class _End(msgspec.Struct):
    type: str = ""
    message: str | None = None
    status_code: int | None = None


class _Meta(msgspec.Struct):
    finish_reason: _End | None = None
    cached_tokens: int | None = None
    completion_tokens: int = 0
    output_token_logprobs: list[_Logprob] | None = None
    output_top_logprobs: list[list[_Logprob] | None] | None = None
    output_token_ids_logprobs: list[list[_Logprob] | None] | None = None


class _Event(msgspec.Struct):
    output_ids: list[VocabularyId] = []
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    error: WorkerError | str | None = None


_event = msgspec.json.Decoder(_Event).decode
