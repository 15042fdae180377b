"""Families of the replicas: engine, KV pool, tiers, pulls. They reach the ingresses twice a second through the feed."""

from __future__ import annotations

from serve_app.ingress.observe.families.family import Family, Section


def _of(name: str, help_text: str, *labels: str, histogram: bool = False) -> Family:
    return Family(name, help_text, ("replica", "engine", *labels), histogram)


def _beside(name: str, help_text: str, *labels: str, histogram: bool = False) -> Family:
    """Return a family of what a replica does beside its engine."""
    return Family(name, help_text, ("replica", *labels), histogram)


_ENGINE = (
    _of("warmpath_num_requests_running", "Sequences in the running batch now."),
    _of("warmpath_num_requests_waiting", "Sequences that wait in the replica for blocks or for a place in the batch."),
    _of(
        "warmpath_request_queue_time_seconds",
        "From a sequence's arrival at the engine to the first step that it is in. One value a sequence.",
        histogram=True,
    ),
    _of(
        "warmpath_request_prefill_time_seconds",
        "From the first step that a sequence is in to its first token. With the queue time before it, the replica's "
        "part of the time to first token.",
        histogram=True,
    ),
    _of("warmpath_requests_finished_total", "Sequences that ended, by how.", "finished_reason"),
    _of("warmpath_prompt_tokens_total", "Prompt tokens of sequences that were started; resent ones count again."),
    _of(
        "warmpath_prompt_tokens_computed_total",
        "Prompt tokens that were computed for the first time: the real prefill.",
    ),
    _of("warmpath_recomputed_tokens_total", "Tokens computed again after a preemption took their KV."),
    _of("warmpath_generation_tokens_total", "Tokens that the model generated, also those that no client got."),
    _of("warmpath_num_preemptions_total", "Sequences that gave their blocks back before their end.", "tenant"),
    _of(
        "warmpath_prefill_tokens_per_second",
        "Prefill rate, over about the last 8,192 tokens that were computed; stands still while nothing is. Routing "
        "counts with it.",
    ),
    _of("warmpath_decode_step_seconds", "Time of a step without prefill, over about the last ten."),
    _beside("warmpath_replica_info", "Always 1; the replica's process id is a label.", "pid"),
)
_CACHE = (
    _of(
        "warmpath_kv_cache_blocks",
        "Blocks of the KV pool. used: of running sequences; cached: reusable and held by nobody else, pinned ones "
        "included; free: empty. Their sum is the pool.",
        "state",
    ),
    _of("warmpath_kv_cache_block_bytes", "Bytes of one block: multiply any number of blocks of the pool by it."),
    _of(
        "warmpath_prefix_cache_queries_total",
        "Prompt tokens looked up in the prefix cache, when a sequence is first started.",
        "tenant",
    ),
    _of("warmpath_prefix_cache_hits_total", "Of the queried tokens those whose KV was reused.", "tenant"),
    _of("warmpath_prefix_cache_evicted_blocks_total", "Cached blocks that gave room to others in the pool."),
    _of(
        "warmpath_prefix_cache_evicted_reused_blocks_total",
        "Of the evicted blocks those that a request had reused since they were computed: what comes back and finds "
        "nothing where the pool is too small.",
    ),
    _of(
        "warmpath_tenant_kv_cache_blocks",
        "Blocks in the pool by whose they are, running and cached. Beyond 100 tenants the rest is `other`.",
        "tenant",
    ),
    _of("warmpath_pinned_prefixes", "Saved system prompts that are kept in the pool now."),
    _of("warmpath_pinned_blocks", "Blocks that saves keep in the pool now."),
    _of("warmpath_tenant_pinned_blocks", "Blocks that saves keep in the pool now, by whose they are.", "tenant"),
    _of("warmpath_pin_budget_blocks", "The most blocks that saves may keep (pin_budget); further saves are refused."),
    _of("warmpath_pins_recalled_total", "Saves beyond their tenant's share that made room for one within its share."),
    _of("warmpath_prompt_saves_total", "Requests with save_system_prompt_kv_cache, by what became of it.", "outcome"),
    _beside(
        "warmpath_feed_mirror_drift_total",
        "Times that what was published of the caches was not what they hold; all is told anew then. Should be 0.",
    ),
)
_TIERS = (
    _of("warmpath_kv_tier_blocks", "Blocks that the tier holds now.", "tier"),
    _of("warmpath_kv_tier_bytes", "Bytes that the tier holds now.", "tier"),
    _of("warmpath_kv_tier_hits_total", "Blocks brought back from the tier into the pool.", "tier"),
    _of("warmpath_kv_tier_stores_total", "Blocks written to the tier.", "tier"),
    _of(
        "warmpath_kv_tier_drops_total",
        "Blocks that the tier did not take: its queue was full, or a write failed.",
        "tier",
    ),
    _of("warmpath_kv_tier_evicted_blocks_total", "Blocks that gave room to others in the tier.", "tier"),
    _of(
        "warmpath_kv_tier_load_seconds",
        "Time of one load from the tier, of one or many blocks.",
        "tier",
        histogram=True,
    ),
    _of(
        "warmpath_kv_tier_refused_files_total",
        "Files on disk that were not what was written, and were not used.",
        "tier",
    ),
    _of("warmpath_kv_tier_pending_blocks", "Blocks that wait to be written to disk.", "tier"),
)
_PULLS = (
    _beside("warmpath_kv_pulls_begun_total", "Copies of a prefix from another replica that were begun."),
    _beside(
        "warmpath_kv_pulls_joined_total", "Requests that waited for a pull of their prefix that another had begun."
    ),
    _beside(
        "warmpath_kv_pulls_total",
        "Pulls that ended. whole: as planned; part: the holder had no more; all others: the rest was computed instead.",
        "outcome",
    ),
    _beside(
        "warmpath_kv_pulls_refused_total",
        "Pulls that the router planned and the replica did not begin. held: already here; short: too little; slow: "
        "computing is faster; busy: too many under way.",
        "reason",
    ),
    _beside("warmpath_kv_pulled_tokens_total", "Tokens whose KV was pulled instead of computed."),
    _beside("warmpath_kv_pull_seconds", "Time of one pull, of all its pieces.", histogram=True),
    _beside("warmpath_kv_pull_tokens_per_second", "Measured rate of pulls; routing counts with it. 0: none yet."),
    _beside(
        "warmpath_kv_exports_total",
        "Pieces of KV that other replicas asked for: sent, gone (evicted by then), busy (asked to wait).",
        "outcome",
    ),
    _beside("warmpath_kv_exported_tokens_total", "Tokens whose KV was sent to other replicas."),
)
_MOVES = (
    _beside(
        "warmpath_prewarm_blocks_total", "Blocks that this replica copied from peers before it took requests.", "kind"
    ),
    _beside("warmpath_prewarm_skipped_blocks_total", "Blocks it would have copied and did not, by why.", "reason"),
    _beside("warmpath_prewarm_bytes_total", "Bytes of the blocks that it copied."),
    _beside("warmpath_prewarm_seconds", "How long that took; no request waits for it on the other replicas."),
    _beside("warmpath_handover_blocks_total", "Blocks that this replica took over from peers that left.", "kind"),
    _beside(
        "warmpath_handover_saves_total", "Saved prompts that leaving peers gave it, by what became of them.", "outcome"
    ),
    _beside("warmpath_handover_bytes_total", "Bytes of the blocks that it took over."),
    _beside("warmpath_handover_refused_blocks_total", "Blocks offered by leaving peers that it did not take."),
)
_MODELS = (
    _of(
        "warmpath_lora_adapters",
        "LoRA adapters. loaded: in memory; slots: of those in a slot of the batch; running: with sequences in it.",
        "state",
    ),
    _of("warmpath_lora_loads_total", "Adapters loaded from files."),
    _of("warmpath_lora_evictions_total", "Adapters dropped from memory to make room for another."),
    _of("warmpath_spec_decode_num_drafts_total", "Drafts that were verified; only with a drafter, as all spec_decode."),
    _of("warmpath_spec_decode_num_draft_tokens_total", "Tokens proposed by the drafter."),
    _of("warmpath_spec_decode_num_accepted_tokens_total", "Of the proposed tokens those that the model agreed with."),
    _of(
        "warmpath_spec_decode_base_steps_total", "Steps of the model that gave a sequence tokens, counted by sequence."
    ),
)
SECTIONS = (
    Section("Replicas: requests and speed", "By replica; `engine` is `torch`, `vllm` or `simulated`.", _ENGINE),
    Section("Replicas: KV cache", "The pool of each replica.", _CACHE),
    Section("Replicas: tiers below the pool", "Only where a tier is configured; `tier` is `host` or `disk`.", _TIERS),
    Section("Replicas: pulls", "KV copied from one replica to another in place of computing it.", _PULLS),
    Section("Replicas: joining and leaving", "Zero or absent until replicas join or leave.", _MOVES),
    Section("Replicas: adapters and speculation", "Since the replica's start.", _MODELS),
)
