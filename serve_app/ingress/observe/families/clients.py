"""Families of what clients see, counted by the ingresses."""

from __future__ import annotations

from serve_app.ingress.observe.families.family import Family, Section


def _of(name: str, help_text: str, *labels: str, histogram: bool = False) -> Family:
    return Family(name, help_text, ("ingress", *labels), histogram)


SECTIONS = (
    Section(
        "What clients see",
        "Counted by each ingress. For dashboards and alerts: only these times hold everything a client waits for.",
        (
            _of(
                "warmpath_requests_total",
                "HTTP requests answered, of every endpoint, errors included. status 499: the client left first. "
                "tenant none: no valid key.",
                "endpoint",
                "status",
                "tenant",
            ),
            _of(
                "warmpath_time_to_first_token_seconds",
                "From a request's arrival at the ingress to its first token: reading, waiting for a place, tokenizing, "
                "routing, queueing, prefill. Once for each prompt and choice that got a token, streamed or not.",
                "tenant",
                histogram=True,
            ),
            _of(
                "warmpath_inter_token_latency_seconds",
                "Seconds a token after the first, as they reach the ingress. Tokens that come together are one value, "
                "their mean.",
                "tenant",
                histogram=True,
            ),
            _of(
                "warmpath_requests_in_flight",
                "Requests past the ingress' line whose answer is being made now.",
            ),
            _of(
                "warmpath_requests_waiting",
                "Requests in the ingress' line for a place at the replicas now. Above zero for long: more replicas are "
                "needed, or a tenant asks for more than its turns.",
                "tenant",
            ),
            _of(
                "warmpath_tenant_prompt_tokens_total",
                "Prompt tokens of requests that got their first token, cached ones included.",
                "tenant",
            ),
            _of(
                "warmpath_tenant_cached_prompt_tokens_total",
                "Of warmpath_tenant_prompt_tokens_total those that were served from cache, as `usage` told the client.",
                "tenant",
            ),
            _of(
                "warmpath_tenant_written_prompt_tokens_total",
                "Prompt tokens computed in whole blocks which stay cached, once for all choices of a request.",
                "tenant",
            ),
            _of(
                "warmpath_cache_misses_total",
                "Prompts that were computed to a good part, by what differs from the tenant's own earlier prompts.",
                "tenant",
                "reason",
            ),
            _of(
                "warmpath_cache_missed_tokens_total",
                "Of their tokens those that an earlier prompt of the tenant had in the same order: what a fix "
                "would save.",
                "tenant",
                "reason",
            ),
            _of(
                "warmpath_prompts_of_other_tenants_total",
                "Prompts new to their tenant whose first 64 tokens another tenant had sent under its own salt: make "
                "them public, or put the tenants into one trust_group. Shown to operators alone.",
                "tenant",
            ),
            _of(
                "warmpath_prompt_version_tokens_total",
                "Prompt tokens of requests with prompt_ref that got their first token, by the version that it meant. "
                "Only the 1,024 latest versions.",
                "prompt",
            ),
            _of(
                "warmpath_prompt_version_cached_tokens_total",
                "Of warmpath_prompt_version_tokens_total those that were served from cache.",
                "prompt",
            ),
            _of("warmpath_tenant_completion_tokens_total", "Tokens generated and received by the ingress.", "tenant"),
            _of(
                "warmpath_request_retries_total",
                "Generations sent to another replica because theirs was lost. after_first_token true: the client "
                "already had a part, and got the rest.",
                "after_first_token",
            ),
            _of("warmpath_client_disconnects_total", "Clients that left before their answer's end."),
            _of("warmpath_event_streams", "Watchers of /v1/cache/events now."),
            _of(
                "warmpath_dropped_events_total",
                "Events that watchers did not get because they read too slowly; each got a new snapshot instead.",
            ),
            _of(
                "warmpath_tokenizer_cache_bytes",
                "Memory of cached token ids and block hashes of texts seen before.",
            ),
            _of("warmpath_tokenizer_cache_max_bytes", "The bound of warmpath_tokenizer_cache_bytes, a setting."),
            Family(
                "warmpath_refused_configurations_total",
                "Live settings (user_config) that could not be used and changed nothing; the log and /v1/cache/state "
                "say why.",
                ("ingress", "replica"),
            ),
        ),
    ),
)
