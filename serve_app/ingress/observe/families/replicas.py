"""Families of the replicas: engine, KV pool, tiers, pulls. They reach the ingresses twice a second through the feed."""

from __future__ import annotations

from serve_app.ingress.observe.families.family import Section, section

SECTIONS: tuple[Section, ...] = (
    section(
        "Replicas: requests and speed",
        "By replica; `engine` is `torch`, `vllm` or `simulated`.",
        """
warmpath_num_requests_running: replica engine
    Sequences in the running batch now.
warmpath_num_requests_waiting: replica engine
    Sequences that wait in the replica for blocks or for a place in the batch.
warmpath_request_queue_time_seconds: replica engine (histogram)
    From a sequence's arrival at the engine to the first step that it is in. One value a sequence.
warmpath_request_prefill_time_seconds: replica engine (histogram)
    From the first step that a sequence is in to its first token. With the queue time before it, the replica's
    part of the time to first token.
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
    Prefill rate, over about the last 8,192 tokens that were computed; stands still while nothing is. Routing
    counts with it.
warmpath_decode_step_seconds: replica engine
    Time of a step without prefill, over about the last ten.
warmpath_replica_info: replica pid
    Always 1; the replica's process id is a label.
""",
    ),
    section(
        "Replicas: KV cache",
        "The pool of each replica.",
        """
warmpath_kv_cache_blocks: replica engine state
    Blocks of the KV pool. used: of running sequences; cached: reusable and held by nobody else, pinned ones
    included; free: empty. Their sum is the pool.
warmpath_kv_cache_block_bytes: replica engine
    Bytes of one block: multiply any number of blocks of the pool by it.
warmpath_prefix_cache_queries_total: replica engine tenant
    Prompt tokens looked up in the prefix cache, when a sequence is first started.
warmpath_prefix_cache_hits_total: replica engine tenant
    Of the queried tokens those whose KV was reused.
warmpath_prefix_cache_evicted_blocks_total: replica engine
    Cached blocks that gave room to others in the pool.
warmpath_prefix_cache_evicted_reused_blocks_total: replica engine
    Of the evicted blocks those that a request had reused since they were computed: what comes back and finds
    nothing where the pool is too small.
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
""",
    ),
    section(
        "Replicas: tiers below the pool",
        "Only where a tier is configured; `tier` is `host` or `disk`.",
        """
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
""",
    ),
    section(
        "Replicas: pulls",
        "KV copied from one replica to another in place of computing it.",
        """
warmpath_kv_pulls_begun_total: replica
    Copies of a prefix from another replica that were begun.
warmpath_kv_pulls_joined_total: replica
    Requests that waited for a pull of their prefix that another had begun.
warmpath_kv_pulls_total: replica outcome
    Pulls that ended. whole: as planned; part: the holder had no more; all others: the rest was computed
    instead.
warmpath_kv_pulls_refused_total: replica reason
    Pulls that the router planned and the replica did not begin. held: already here; short: too little; slow:
    computing is faster; busy: too many under way.
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
""",
    ),
    section(
        "Replicas: joining and leaving",
        "Zero or absent until replicas join or leave.",
        """
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
""",
    ),
    section(
        "Replicas: adapters and speculation",
        "Since the replica's start.",
        """
warmpath_lora_adapters: replica engine state
    LoRA adapters. loaded: in memory; slots: of those in a slot of the batch; running: with sequences in it.
warmpath_lora_loads_total: replica engine
    Adapters loaded from files.
warmpath_lora_evictions_total: replica engine
    Adapters dropped from memory to make room for another.
warmpath_spec_decode_num_drafts_total: replica engine
    Drafts that were verified; only with a drafter, as all spec_decode.
warmpath_spec_decode_num_draft_tokens_total: replica engine
    Tokens proposed by the drafter.
warmpath_spec_decode_num_accepted_tokens_total: replica engine
    Of the proposed tokens those that the model agreed with.
warmpath_spec_decode_base_steps_total: replica engine
    Steps of the model that gave a sequence tokens, counted by sequence.
""",
    ),
)
