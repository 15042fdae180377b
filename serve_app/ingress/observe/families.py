"""Every metric family that /metrics shows, with its help; a replica cannot bring families or labels of its own."""

import re
from typing import NamedTuple


class Family(NamedTuple):
    """``name``: as PromQL has it. ``labels``: all but ``le``. ``help``: the subject, and when it moves."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


_TEXT = """
# What clients see
Counted by each ingress. For dashboards and alerts: only these times hold everything a client waits for.
warmpath_requests_total: ingress endpoint status tenant
    HTTP requests answered, of every endpoint, errors included. status 499: the client left first. tenant none: no valid
    key.
warmpath_time_to_first_token_seconds: ingress tenant (histogram)
    From a request's arrival at the ingress to its first token: reading, waiting for a place, tokenizing, routing,
    queueing, prefill. Once for each prompt and choice that got a token, streamed or not.
warmpath_inter_token_latency_seconds: ingress tenant (histogram)
    Seconds a token after the first, as they reach the ingress. Tokens that come together are one value, their mean.
warmpath_requests_in_flight: ingress
    Requests past the ingress' line whose answer is being made now.
warmpath_requests_waiting: ingress tenant
    Requests in the ingress' line for a place at the replicas now. Above zero for long: more replicas are needed, or a
    tenant asks for more than its turns.
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
    Prompt tokens of requests with prompt_ref that got their first token, by the version that it meant. Only the 1,024
    latest versions.
warmpath_prompt_version_cached_tokens_total: ingress prompt
    Of warmpath_prompt_version_tokens_total those that were served from cache.
warmpath_tenant_completion_tokens_total: ingress tenant
    Tokens generated and received by the ingress.
warmpath_request_retries_total: ingress after_first_token
    Generations sent to another replica because theirs was lost. after_first_token true: the client already had a part,
    and got the rest.
warmpath_client_disconnects_total: ingress
    Clients that left before their answer's end.
warmpath_event_streams: ingress
    Watchers of /v1/cache/events now.
warmpath_dropped_events_total: ingress
    Events that watchers did not get because they read too slowly; each got a new snapshot instead.
warmpath_refused_configurations_total: ingress replica
    Live settings (user_config) that could not be used and changed nothing; the log and /v1/cache/state say why.

# Replicas: requests and speed
By replica; `engine` is `torch`, `vllm` or `simulated`.
warmpath_num_requests_running: replica engine
    Sequences in the running batch now.
warmpath_num_requests_waiting: replica engine
    Sequences that wait in the replica for blocks or for a place in the batch.
warmpath_request_queue_time_seconds: replica engine (histogram)
    From a sequence's arrival at the engine to the first step that it is in. One value a sequence.
warmpath_request_prefill_time_seconds: replica engine (histogram)
    From the first step that a sequence is in to its first token. With the queue time before it, the replica's part of
    the time to first token.
warmpath_requests_finished_total: replica engine finished_reason
    Sequences that ended, by how.
warmpath_prompt_tokens_total: replica engine
    Prompt tokens of sequences that were started; resent ones count again.
warmpath_prompt_tokens_computed_total: replica engine
    Prompt tokens that were computed for the first time: the real prefill.
warmpath_recomputed_tokens_total: replica engine
    Tokens computed again after a preemption took their KV.
warmpath_generation_tokens_total: replica engine
    Tokens that the model generated, also those that no client got.
warmpath_num_preemptions_total: replica engine tenant
    Sequences that gave their blocks back before their end.
warmpath_prefill_tokens_per_second: replica engine
    Prefill rate, over about the last 8,192 tokens that were computed; stands still while nothing is. Routing counts
    with it.
warmpath_decode_step_seconds: replica engine
    Time of a step without prefill, over about the last ten.
warmpath_replica_info: replica pid node gpu
    Always 1; labels are the replica's process id, its machine's name and its GPUs' numbers ("" without).

# Replicas: KV cache
The pool of each replica.
warmpath_kv_cache_blocks: replica engine state
    Blocks of the KV pool. used: of running sequences; cached: reusable and held by nobody else, pinned ones included;
    free: empty. Their sum is the pool.
warmpath_kv_cache_block_bytes: replica engine
    Bytes of one block: multiply any number of blocks of the pool by it.
warmpath_unplaced_kv_blocks_total: replica engine
    Blocks that vLLM cached and no router is told of, since its events do not say of which prompt they are: images, KV
    offloaded elsewhere, unknown roots. Requests are routed by load as to them.
warmpath_prefix_cache_queries_total: replica engine tenant
    Prompt tokens looked up in the prefix cache, when a sequence is first started.
warmpath_prefix_cache_hits_total: replica engine tenant
    Of the queried tokens those whose KV was reused.
warmpath_prefix_cache_evicted_blocks_total: replica engine
    Cached blocks that gave room to others in the pool.
warmpath_prefix_cache_evicted_reused_blocks_total: replica engine
    Of the evicted blocks those that a request had reused since they were computed: what comes back and finds nothing
    where the pool is too small.
warmpath_tenant_kv_cache_blocks: replica engine tenant
    Blocks in the pool by whose they are, running and cached. Beyond 100 tenants the rest is `other`.
warmpath_pinned_prefixes: replica engine
    Saved system prompts that are kept in the pool now.
warmpath_pinned_blocks: replica engine
    Blocks that saves keep in the pool now.
warmpath_tenant_pinned_blocks: replica engine tenant
    Blocks that saves keep in the pool now, by whose they are.
warmpath_pin_budget_blocks: replica engine
    The most blocks that saves may keep (pin_budget); further saves are refused.
warmpath_pins_recalled_total: replica engine
    Saves beyond their tenant's share that made room for one within its share.
warmpath_prompt_saves_total: replica engine outcome
    Requests with save_system_prompt_kv_cache, by what became of it.
warmpath_feed_mirror_drift_total: replica
    Times that what was published of the caches was not what they hold; all is told anew then. Should be 0.

# Replicas: sessions
Chains of requests that continue each other ([caching](../explanation/caching.md#sessions)), as each replica sees them.
warmpath_sessions: replica state
    Sessions of the last hour. running, or waiting for room to start; paused: its next request is expected soon, and
    room is kept for it; left: none is expected.
warmpath_session_returns_total: replica outcome
    Requests that went on with a session. hit: of what they have in common with its last prompt at least nine tenths
    were still cached; missed: less, and the rest was computed again.
warmpath_session_wait_seconds: replica (histogram)
    How long requests waited until there was room for their contexts beside live sessions; of those alone that had to
    ask for room, at most `session_wait_s`.
warmpath_session_seconds: replica (histogram)
    From the first request of a session to the end of its last answer, once it is forgotten.
warmpath_session_unused_tokens_total: replica
    Tokens of forgotten sessions' contexts, but for those that were cached when they began: no request went on from
    them.

# Replicas: tiers below the pool
Only where a tier is configured; `tier` is `host` or `disk`.
warmpath_kv_tier_blocks: replica engine tier
    Blocks that the tier holds now.
warmpath_kv_tier_bytes: replica engine tier
    Bytes that the tier holds now.
warmpath_kv_tier_hits_total: replica engine tier
    Blocks brought back from the tier into the pool.
warmpath_kv_tier_stores_total: replica engine tier
    Blocks written to the tier.
warmpath_kv_tier_drops_total: replica engine tier
    Blocks that the tier did not take: its queue was full, or a write failed.
warmpath_kv_tier_evicted_blocks_total: replica engine tier
    Blocks that gave room to others in the tier.
warmpath_kv_tier_load_seconds: replica engine tier (histogram)
    Time of one load from the tier, of one or many blocks.
warmpath_kv_tier_refused_files_total: replica engine tier
    Files on disk that were not what was written, and were not used.
warmpath_kv_tier_pending_blocks: replica engine tier
    Blocks that wait to be written to disk.

# Replicas: pulls
KV copied from one replica to another in place of computing it.
warmpath_kv_pulls_begun_total: replica
    Copies of a prefix from another replica that were begun.
warmpath_kv_pulls_joined_total: replica
    Requests that waited for a pull of their prefix that another had begun.
warmpath_kv_pulls_total: replica outcome
    Pulls that ended. whole: as planned; part: the holder had no more; all others: the rest was computed instead.
warmpath_kv_pulls_refused_total: replica reason
    Pulls that the router planned and the replica did not begin. held: already here; short: too little; slow: computing
    is faster; busy: too many under way.
warmpath_kv_pulled_tokens_total: replica
    Tokens whose KV was pulled instead of computed.
warmpath_kv_pull_seconds: replica (histogram)
    Time of one pull, of all its pieces.
warmpath_kv_pull_tokens_per_second: replica
    Measured rate of pulls; routing counts with it. 0: none yet.
warmpath_kv_exports_total: replica outcome
    Pieces of KV that other replicas asked for: sent, gone (evicted by then), busy (asked to wait).
warmpath_kv_exported_tokens_total: replica
    Tokens whose KV was sent to other replicas.

# Replicas: joining and leaving
Zero or absent until replicas join or leave.
warmpath_prewarm_blocks_total: replica kind
    Blocks that this replica copied from peers before it took requests.
warmpath_prewarm_skipped_blocks_total: replica reason
    Blocks it would have copied and did not, by why.
warmpath_prewarm_bytes_total: replica
    Bytes of the blocks that it copied.
warmpath_prewarm_seconds: replica
    How long that took; no request waits for it on the other replicas.
warmpath_handover_blocks_total: replica kind
    Blocks that this replica took over from peers that left.
warmpath_handover_saves_total: replica outcome
    Saved prompts that leaving peers gave it, by what became of them.
warmpath_handover_bytes_total: replica
    Bytes of the blocks that it took over.
warmpath_handover_refused_blocks_total: replica
    Blocks offered by leaving peers that it did not take.

# Replicas: adapters and drafts
Since the replica's start.
warmpath_lora_adapters: replica engine state
    LoRA adapters. loaded: in memory; slots: of those in a slot of the batch; running: with sequences in it.
warmpath_lora_loads_total: replica engine
    Adapters loaded from files.
warmpath_lora_evictions_total: replica engine
    Adapters dropped from memory to make room for another.
warmpath_spec_decode_num_drafts_total: replica engine
    Drafts that were verified; only where vLLM drafts, as all spec_decode.
warmpath_spec_decode_num_draft_tokens_total: replica engine
    Tokens that were drafted.
warmpath_spec_decode_num_accepted_tokens_total: replica engine
    Of the drafted tokens those that the model agreed with.

# Routing: decisions
Counted by the router in each ingress, under the policy that acted. Where prefixes are is known from hints; only
`delivered` is what happened.
warmpath_router_decisions_total: ingress policy reason
    Requests that were given a replica, by policy and why that one.
warmpath_router_replica_decisions_total: ingress replica
    Decisions for each replica that is there now.
warmpath_router_decision_seconds: ingress (histogram)
    Time of one decision.
warmpath_router_prompt_tokens_total: ingress policy reason
    Prompt tokens of the requests that were decided about.
warmpath_router_best_cached_tokens_total: ingress policy reason
    Of those tokens, what the replica with the longest prefix held.
warmpath_router_selected_cached_tokens_total: ingress policy reason
    Of those tokens, what the chosen replica held, as far as the directory knew.
warmpath_router_delivered_cached_tokens_total: ingress policy reason
    Of those tokens, what the chosen replica really reused.
warmpath_router_regret_tokens_total: ingress policy reason cause
    Cached tokens that were not used. not_selected: another replica held more, but was busier; evicted: gone before the
    request came; unused: the directory was wrong, or loading would have taken longer than computing.
warmpath_router_all_full_total: ingress
    Decisions that found every replica full; the request waited.
warmpath_router_rejected_total: ingress
    Requests that Serve's replica refused after the decision; decided again.
warmpath_router_sent_back_total: ingress
    Requests that the chosen replica sent back because more was queued there than the router knew; decided again.
warmpath_router_faults_total: ingress
    Faults of routing itself; the request went to the least loaded replica. Should be 0.
warmpath_router_replicas: ingress
    Replicas that this router knows.
warmpath_router_queued_tokens: ingress replica
    Uncached prompt tokens that a next request would wait for at each replica: what it reported, and what was sent
    since. Routing counts with it.

# Routing: estimates against what came
How far the times can be trusted that routing is made from.
warmpath_router_ttft_actual_to_estimated_ratio: ingress policy (histogram)
    Actual / estimated time from the routing decision to the first token; 1 is a true estimate.
warmpath_router_ttft_overhead_seconds: ingress
    What a first token takes beside the work, learned from the latest 64 requests: calls, the step under way, a step's
    own cost. Equal for all replicas, so it changes estimates and no decision.

# Routing: directory and feed
What a router knows of the replicas' caches, and how it came.
warmpath_directory_blocks: ingress
    Distinct blocks that the directory knows, on whatever replicas.
warmpath_directory_refused_blocks_total: ingress
    Hints that the directory had no room for: routing misses those hits.
warmpath_directory_checks_total: ingress
    Comparisons of what the directory knows of a replica with what it holds.
warmpath_directory_drift_total: ingress replica kind
    Of those, where they differed, which a snapshot mends. extra: blocks were known that the replica does not hold;
    missing: it held some that were not known; altered: as many, but others. Should be 0.
warmpath_feed_gaps_total: ingress
    Times that messages were missing, and a snapshot was asked for.
warmpath_feed_snapshots_total: ingress
    Snapshots of a replica's whole cache that were read.
warmpath_feed_malformed_total: ingress
    Messages that were not believed. Should be 0.

# Autoscaling
Only with `autoscaling`; none before the first decision.
warmpath_autoscaling_target_replicas: reason
    Replicas there are to be, by the latest change and its reason.
warmpath_autoscaling_needed_replicas: reason
    The need it was made from, before delays, bounds and rounding.
"""
"""Sections: ``# title``, a note on all of it, then each family as ``name: labels`` with its help indented below."""

_FAMILY = re.compile(r"^(\w+): ([a-z_ ]+)(\(histogram\))?\n((?: .+\n)+)", re.MULTILINE)


def _families(text: str) -> list[Family]:
    return [
        Family(
            name,
            "histogram" if histogram else "counter" if name.endswith("_total") else "gauge",
            tuple(labels.split()),
            " ".join(words.split()),
        )
        for name, labels, histogram, words in _FAMILY.findall(text)
    ]


SECTIONS = {
    title: (" ".join(_FAMILY.split(text)[0].split()), _families(text))
    for title, _, text in (part.partition("\n") for part in _TEXT.split("\n# ")[1:])
}
"""By title: what all families of a section have in common, and the families."""

FAMILIES = {family.name: family for _, families in SECTIONS.values() for family in families}
