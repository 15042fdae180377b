"""Families of what clients see, counted by the ingresses."""

from __future__ import annotations

from serve_app.ingress.observe.families.family import Section, section

SECTIONS: tuple[Section, ...] = (
    section(
        "What clients see",
        "Counted by each ingress. For dashboards and alerts: only these times hold everything a client waits for.",
        """
warmpath_requests_total: ingress endpoint status tenant
    HTTP requests answered, of every endpoint, errors included. status 499: the client left first. tenant none:
    no valid key.
warmpath_time_to_first_token_seconds: ingress tenant (histogram)
    From a request's arrival at the ingress to its first token: reading, waiting for a place, tokenizing,
    routing, queueing, prefill. Once for each prompt and choice that got a token, streamed or not.
warmpath_inter_token_latency_seconds: ingress tenant (histogram)
    Seconds a token after the first, as they reach the ingress. Tokens that come together are one value, their
    mean.
warmpath_requests_in_flight: ingress
    Requests past the ingress' line whose answer is being made now.
warmpath_requests_waiting: ingress tenant
    Requests in the ingress' line for a place at the replicas now. Above zero for long: more replicas are
    needed, or a tenant asks for more than its turns.
warmpath_tenant_prompt_tokens_total: ingress tenant
    Prompt tokens of requests that got their first token, cached ones included.
warmpath_tenant_cached_prompt_tokens_total: ingress tenant
    Of warmpath_tenant_prompt_tokens_total those that were served from cache, as `usage` told the client.
warmpath_tenant_written_prompt_tokens_total: ingress tenant
    Prompt tokens computed in whole blocks which stay cached, once for all choices of a request.
warmpath_cache_misses_total: ingress tenant reason
    Prompts that were computed to a good part, by what differs from the tenant's own earlier prompts.
warmpath_cache_missed_tokens_total: ingress tenant reason
    Of their tokens those that an earlier prompt of the tenant had in the same order: what a fix would save.
warmpath_prompt_version_tokens_total: ingress prompt
    Prompt tokens of requests with prompt_ref that got their first token, by the version that it meant. Only the
    1,024 latest versions.
warmpath_prompt_version_cached_tokens_total: ingress prompt
    Of warmpath_prompt_version_tokens_total those that were served from cache.
warmpath_tenant_completion_tokens_total: ingress tenant
    Tokens generated and received by the ingress.
warmpath_request_retries_total: ingress after_first_token
    Generations sent to another replica because theirs was lost. after_first_token true: the client already had
    a part, and got the rest.
warmpath_client_disconnects_total: ingress
    Clients that left before their answer's end.
warmpath_event_streams: ingress
    Watchers of /v1/cache/events now.
warmpath_dropped_events_total: ingress
    Events that watchers did not get because they read too slowly; each got a new snapshot instead.
warmpath_tokenizer_cache_bytes: ingress
    Memory of cached token ids and block hashes of texts seen before.
warmpath_tokenizer_cache_max_bytes: ingress
    The bound of warmpath_tokenizer_cache_bytes, a setting.
warmpath_refused_configurations_total: ingress replica
    Live settings (user_config) that could not be used and changed nothing; the log and /v1/cache/state say why.
""",
    ),
)
