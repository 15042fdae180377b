"""Every metric family of /metrics, with its help; replicas cannot add families or labels."""

import re
import sys
from typing import NamedTuple

from serve_app.ingress.observe.vllm_names import LABELS as VLLM_LABELS
from serve_app.ingress.observe.vllm_names import OURS


class Family(NamedTuple):
    """A metric family. ``name``: its name in PromQL. ``labels``: all except ``le``."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


_TEXT = """
# The clients' view
Counted by each ingress. Use these times in dashboards and alerts: only they include the client's whole waiting time.
warmpath_requests_total: ingress endpoint status tenant
    Answered HTTP requests of every endpoint, errors included. status 499: the client left before the end. tenant none:
    no valid key.
warmpath_time_to_first_token_seconds: ingress tenant (histogram)
    Time from a request's arrival at the ingress to its first token: reading, waiting for a place, tokenizing, routing,
    queueing, prefill. One value for each prompt and choice with a token, streamed or not.
warmpath_e2e_request_latency_seconds: ingress tenant (histogram)
    Time from a request's arrival at the ingress to the end of its whole answer, streamed or not. Answers that failed or
    were left have none.
warmpath_inter_token_latency_seconds: ingress tenant (histogram)
    Seconds from token to token, on arrival at the ingress: one value for each token after the first. Tokens that arrive
    together share their time; beside the first one they have none.
warmpath_broken_streams_total: ingress status tenant
    Streams that ended with an error after they had begun with status 200; status: the error's.
warmpath_build_info: ingress version
    Always 1; version: of the ingress' warmpath. Two values: a rolling update is under way.
warmpath_requests_in_flight: ingress
    Requests past the ingress' queue with an unfinished answer.
warmpath_requests_waiting: ingress tenant
    Requests in the ingress' queue for a place at the replicas. If this stays above zero, more replicas are needed, or
    a tenant sends more than its share.
warmpath_tenant_prompt_tokens_total: ingress tenant
    Prompt tokens of requests with a first token, cached ones included.
warmpath_tenant_cached_prompt_tokens_total: ingress tenant
    The part of warmpath_tenant_prompt_tokens_total that was read from the cache, as reported in `usage`.
warmpath_tenant_written_prompt_tokens_total: ingress tenant
    Prompt tokens computed in whole blocks that stay cached, counted once for all choices of a request.
warmpath_tenant_budget_used_ratio: ingress tenant
    The used part of the tenant's budget of this day or month, over all ingresses; of several values the largest is it.
warmpath_cache_misses_total: ingress tenant reason
    Prompts with a large computed part, by the difference from the tenant's earlier prompts.
warmpath_cache_missed_tokens_total: ingress tenant reason
    Their tokens that an earlier prompt of the tenant had in the same order: the possible saving of a fix.
warmpath_prompt_version_tokens_total: ingress prompt
    Prompt tokens of requests with prompt_ref and a first token, by resolved version. Only the latest 1,024 versions
    are kept.
warmpath_prompt_version_cached_tokens_total: ingress prompt
    The part of warmpath_prompt_version_tokens_total that was read from the cache.
warmpath_prompt_version_requests_total: ingress prompt
    These requests. During a cut-over in part, both versions have some.
warmpath_prompt_version_ttft_seconds_total: ingress prompt
    The sum of their seconds from arrival to the first token; divided by the requests, the mean.
warmpath_tenant_completion_tokens_total: ingress tenant
    Generated tokens that the ingress received.
warmpath_request_retries_total: ingress after_first_token
    Generations resent to another replica because theirs was lost. after_first_token true: the client already had a
    part, and got the rest.
warmpath_refusals_total: ingress tenant place limit
    Requests refused with a `reason`: the place, and the setting that is the limit there (docs: api).
warmpath_fallbacks_total: ingress model fallback cause
    Requests for a model that its `fallback` answered, because it was down (no replica), asleep (none until a
    request comes) or full.
warmpath_wait_seconds: ingress replica place (histogram)
    Time that requests waited for capacity, if they had to. place ingress: in its queue; router: while no replica took
    more, pause by pause; session: for space beside live sessions, at most `session_wait_s`. The wait in a replica's
    engine is warmpath_request_queue_time_seconds.
warmpath_traffic_lines_total: ingress
    Lines that `traffic_log` wrote.
warmpath_traffic_lost_total: ingress reason
    Lines that `traffic_log` lost. reason queue: the disk is too slow; disk: it is full, or the file cannot be written;
    fault: a defect, see the log.
warmpath_client_disconnects_total: ingress
    Clients that disconnected before the end of their answer.
warmpath_event_streams: ingress
    Current watchers of /v1/cache/events.
warmpath_dropped_events_total: ingress
    Events dropped for watchers that read too slowly; each got a new snapshot instead.
warmpath_refused_configurations_total: ingress replica
    Invalid live settings (user_config), which changed nothing; the log and /v1/cache/state report the reason.
warmpath_background_failures_total: ingress replica loop
    Failures of work that lives as long as its process (feeds, batches, sweepers, writers). It was begun anew each time;
    the log has the error. loop: its function.
warmpath_background_failing: ingress replica loop
    1 for a minute after such a failure, as in /health (docs: api), else 0.

# Replicas: requests and speed
Counted by each replica; `engine` is `torch`, `vllm`, `remote` or `simulated`.
warmpath_num_requests_running: replica engine
    Sequences in the running batch.
warmpath_num_requests_waiting: replica engine
    Sequences in the replica that wait for blocks or for a place in the batch.
warmpath_request_queue_time_seconds: replica engine (histogram)
    Time from a sequence's arrival at the engine to its first step. One value for each sequence.
warmpath_request_prefill_time_seconds: replica engine (histogram)
    Time from a sequence's first step to its first token. Together with the queue time it is the replica's part of the
    time to first token.
warmpath_requests_finished_total: replica engine finished_reason
    Finished sequences, by reason.
warmpath_prompt_tokens_total: replica engine
    Prompt tokens of started sequences; resent ones count again.
warmpath_prompt_tokens_computed_total: replica engine
    Prompt tokens computed for the first time: the real prefill.
warmpath_recomputed_tokens_total: replica engine
    Tokens computed again after a preemption took their KV.
warmpath_generation_tokens_total: replica engine
    Tokens that the model generated, including those that no client received.
warmpath_num_preemptions_total: replica engine tenant
    Preemptions: sequences that lost their blocks before their end.
warmpath_prefill_tokens_per_second: replica engine
    Prefill rate over about the last 8,192 computed tokens; it stays constant while nothing is computed. Routing uses
    it.
warmpath_decode_step_seconds: replica engine
    Mean time of about the last ten steps without prefill.
warmpath_replica_info: replica pid node gpu
    Always 1; the labels are the replica's process id, its machine's name and its GPUs' numbers ("" without).

# Replicas: KV cache
The pool of each replica.
warmpath_kv_cache_blocks: replica engine state
    Blocks of the KV pool. used: held by running sequences; cached: reusable and held by no sequence, pinned ones
    included; free: empty. Their sum is the pool.
warmpath_kv_cache_block_bytes: replica engine
    Bytes of one block, to convert numbers of blocks.
warmpath_engine_capability: replica engine capability
    1 if the installed vLLM allows a capability, 0 if it differs there: then the replica goes without it.
warmpath_kv_cache_block_tokens: replica engine
    Tokens that vLLM's pool holds for each block, in requests of the longest length. Layers with windows, or in several
    groups, make it differ from block_size.
warmpath_unplaced_kv_blocks_total: replica engine
    Blocks in vLLM's cache that no router knows, since vLLM's events do not name their prompt: images, KV offloaded
    elsewhere, unknown roots. Routing ignores them.
warmpath_worker_up: replica engine
    With engine remote: 1 while the replica's server is fit and takes requests, else 0; explain tells why.
warmpath_worker_predictions_total: replica engine result
    With engine remote: requests whose cached prefix the server's KV events promised. right: the server reused at least
    as many tokens; wrong: fewer.
warmpath_prefix_cache_queries_total: replica engine tenant
    Prompt tokens looked up in the prefix cache, at the first start of a sequence.
warmpath_prefix_cache_hits_total: replica engine tenant
    Queried tokens with reused KV.
warmpath_prefix_cache_evicted_blocks_total: replica engine
    Cached blocks evicted from the pool for other blocks.
warmpath_prefix_cache_evicted_reused_blocks_total: replica engine
    Evicted blocks that a request had reused since they were computed. If the pool is too small, returning requests
    miss them.
warmpath_tenant_kv_cache_blocks: replica engine tenant
    Blocks in the pool by owner, running and cached. Tenants beyond 100 count as `other`.
warmpath_pinned_prefixes: replica engine
    Saved system prompts pinned in the pool.
warmpath_pinned_blocks: replica engine
    Blocks that saves pin in the pool.
warmpath_tenant_pinned_blocks: replica engine tenant
    Blocks that saves pin in the pool, by owner.
warmpath_pin_budget_blocks: replica engine
    Maximum number of blocks that saves may pin (pin_budget); further saves are refused.
warmpath_pins_recalled_total: replica engine
    Saves beyond their tenant's share, dropped for a save of a tenant within its share.
warmpath_prompt_saves_total: replica engine outcome
    Requests with save_system_prompt_kv_cache, by outcome.
warmpath_feed_mirror_drift_total: replica
    Differences between a replica's caches and their published state, which is then published again. Should be 0.

# Replicas: sessions
Chains of requests that continue each other ([caching](../explanation/caching.md#sessions)), from each replica's view.
warmpath_sessions: replica state
    Sessions of the last hour. running; waiting: for capacity to start; paused: the next request is expected soon, and
    capacity is reserved for it; left: no request is expected.
warmpath_session_returns_total: replica outcome
    Requests that continued a session. hit: at least nine tenths of their common prefix with its last prompt were
    still cached; missed: less, and the rest was computed again.
warmpath_session_wait_seconds: replica (histogram)
    Time that requests waited for capacity for their contexts beside live sessions, at most `session_wait_s`: the same
    as warmpath_wait_seconds with place session.
warmpath_session_seconds: replica (histogram)
    Time from a session's first request to the end of its last answer, counted when the session is dropped.
warmpath_session_unused_tokens_total: replica
    Context tokens of dropped sessions that no request continued from, except those cached at the session's start.

# Replicas: tiers below the pool
Only with a configured tier; `tier` is `host`, `disk` or `object` (the last without blocks and bytes).
warmpath_kv_tier_blocks: replica engine tier
    Blocks of KV that the tier holds.
warmpath_kv_tier_bytes: replica engine tier
    Bytes of KV that the tier holds.
warmpath_kv_tier_hits_total: replica engine tier
    Blocks loaded from the tier into the pool.
warmpath_kv_tier_stores_total: replica engine tier
    Blocks written to the tier.
warmpath_kv_tier_drops_total: replica engine tier
    Blocks that the tier did not store: its queue was full, or a write failed.
warmpath_kv_tier_evicted_blocks_total: replica engine tier
    Blocks evicted from the tier for other blocks.
warmpath_kv_tier_load_seconds: replica engine tier (histogram)
    Time of one load from the tier, of any number of blocks.
warmpath_kv_tier_refused_files_total: replica engine tier
    Files and objects with unexpected content, which were not used.
warmpath_kv_tier_pending_blocks: replica engine tier
    Blocks waiting to be written to the tier.
warmpath_kv_tier_failures_total: replica engine tier
    Failed writes to disk; calls of the object store that failed or were too late, after which it pauses.

# Replicas: pulls
KV copied from one replica to another instead of computing it.
warmpath_kv_pulls_begun_total: replica
    Started copies of a prefix from another replica.
warmpath_kv_pulls_joined_total: replica
    Requests that waited for another request's pull of their prefix.
warmpath_kv_pulls_total: replica outcome
    Finished pulls. whole: as planned; part: the holder had no more; all others: the rest was computed instead.
warmpath_kv_pulls_refused_total: replica reason
    Pulls that the router planned and the replica did not start. held: already here; short: too little; slow: computing
    is faster; busy: too many running.
warmpath_kv_pulled_tokens_total: replica
    Tokens with pulled instead of computed KV.
warmpath_kv_pull_seconds: replica (histogram)
    Time of one pull with all its pieces.
warmpath_kv_pull_tokens_per_second: replica
    Measured rate of pulls, used by routing. 0: none yet.
warmpath_kv_exports_total: replica outcome
    Pieces of KV that other replicas requested: sent, gone (already evicted), busy (told to wait).
warmpath_kv_exported_tokens_total: replica
    Tokens of KV sent to other replicas.

# Replicas: joining and leaving
Zero or absent until replicas join or leave.
warmpath_prewarm_blocks_total: replica kind
    Blocks that this replica copied from peers before it accepted requests.
warmpath_prewarm_skipped_blocks_total: replica reason
    Planned blocks that it did not copy, by reason.
warmpath_prewarm_bytes_total: replica
    Bytes of the copied blocks.
warmpath_prewarm_seconds: replica
    Duration of the copy; no request on the other replicas waits for it.
warmpath_handover_blocks_total: replica kind
    Blocks that this replica took over from leaving peers.
warmpath_handover_saves_total: replica outcome
    Saved prompts handed over by leaving peers, by outcome.
warmpath_handover_bytes_total: replica
    Bytes of the blocks taken over.
warmpath_handover_refused_blocks_total: replica
    Blocks that leaving peers offered and it refused.

# Replicas: adapters and drafts
Since the replica's start.
warmpath_lora_adapters: replica engine state
    LoRA adapters. loaded: in memory; slots: in a slot of the batch; running: with sequences in the batch.
warmpath_lora_loads_total: replica engine
    Adapters loaded from files.
warmpath_lora_evictions_total: replica engine
    Adapters evicted from memory for another one.
warmpath_spec_decode_num_drafts_total: replica engine
    Verified drafts. All spec_decode families exist only if vLLM drafts.
warmpath_spec_decode_num_draft_tokens_total: replica engine
    Tokens that speculative decoding drafted.
warmpath_spec_decode_num_accepted_tokens_total: replica engine
    Drafted tokens that the model accepted.

# Routing: decisions
Counted by the router in each ingress, under the acting policy. The places of prefixes are known from hints; only
`delivered` is measured.
warmpath_router_decisions_total: ingress policy reason
    Routed requests, by policy and reason.
warmpath_router_replica_decisions_total: ingress replica
    Decisions for each current replica.
warmpath_router_decision_seconds: ingress (histogram)
    Time of one decision.
warmpath_router_prompt_tokens_total: ingress policy reason
    Prompt tokens of routed requests.
warmpath_router_best_cached_tokens_total: ingress policy reason
    Of those tokens, the ones on the replica with the longest prefix.
warmpath_router_selected_cached_tokens_total: ingress policy reason
    Of those tokens, the ones on the chosen replica according to the directory.
warmpath_router_delivered_cached_tokens_total: ingress policy reason
    Of those tokens, the ones that the chosen replica really reused.
warmpath_router_regret_tokens_total: ingress policy reason cause
    Unused cached tokens. not_selected: another replica held more, but was busier; evicted: gone before the request
    arrived; unused: the directory was wrong, or loading would have taken longer than computing.
warmpath_router_all_full_total: ingress
    Decisions with every replica full; the request waited.
warmpath_router_rejected_total: ingress
    Requests that Serve's replica refused after the decision; routed again.
warmpath_router_sent_back_total: ingress
    Requests that the chosen replica sent back because its queue was longer than the router knew; routed again.
warmpath_router_faults_total: ingress
    Errors in the router itself; the request went to the least loaded replica. Should be 0.
warmpath_router_replicas: ingress model
    Replicas known to this router.
warmpath_router_queued_tokens: ingress replica
    Uncached prompt tokens queued at each replica before a new request: the reported ones and those sent since.
    Routing uses it.

# Routing: estimated and actual times
The accuracy of the times that routing uses.
warmpath_router_ttft_actual_to_estimated_ratio: ingress policy (histogram)
    Actual time from the routing decision to the first token / estimated work until then. Calls, the running step and
    a step's own cost are not estimated, since they are equal for all replicas; so short requests are above 1.

# Routing: a shadow policy
Only with `shadow_policy`: its choices beside the acting policy's, for the same requests from the same state. It sees
only the caches and queues that the acting policy made: with its own, it would find others.
warmpath_router_shadow_decisions_total: ingress policy shadow
    Requests about which both policies decided.
warmpath_router_shadow_share: ingress shadow
    Part of the requests that are compared now, chosen by a hash of their ids: 1, or as many as 10 us of CPU a request
    allow on average.
warmpath_router_shadow_different_total: ingress policy shadow
    Of those requests, the ones that the shadow would have sent to another replica.
warmpath_router_shadow_prompt_tokens_total: ingress policy shadow
    Prompt tokens of those requests.
warmpath_router_shadow_predicted_tokens_total: ingress policy shadow choice
    Of those tokens, the ones on the replica of each choice, according to the directory.
warmpath_router_shadow_estimated_ttft_seconds_total: ingress policy shadow choice
    Sum of the estimated work until the first token, on the replica of each choice.
warmpath_router_shadow_faults_total: ingress policy shadow
    Errors in the shadow policy, which change nothing and are in no other number. Should be 0.

# Routing: directory and feed
A router's knowledge of the replicas' caches, and its source.
warmpath_directory_blocks: ingress
    Distinct blocks in the directory, over all replicas.
warmpath_directory_refused_blocks_total: ingress
    Hints beyond the directory's capacity: routing misses those hits.
warmpath_directory_checks_total: ingress
    Comparisons of the directory with a replica's real blocks.
warmpath_directory_drift_total: ingress replica kind
    Comparisons with a difference, which a snapshot repairs. extra: the directory has blocks that the replica lacks;
    missing: it lacks some of the replica's blocks; altered: as many blocks, but others. Should be 0.
warmpath_feed_gaps_total: ingress
    Gaps in the messages; each leads to the request of a snapshot.
warmpath_feed_snapshots_total: ingress
    Received snapshots of a replica's whole cache.
warmpath_feed_malformed_total: ingress
    Malformed messages, which were ignored. Should be 0.

# Autoscaling
Only with `autoscaling`, after the first decision.
warmpath_autoscaling_target_replicas: model reason
    Target number of replicas, by the latest change and its reason.
warmpath_autoscaling_needed_replicas: reason
    Need behind the target, before delays, bounds and rounding.
"""
"""Sections: ``# title``, a note on the section, then each family as ``name: labels`` with its help indented below."""

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
"""By title: the note on the section, and its families."""

FAMILIES = {family.name: family for _, families in SECTIONS.values() for family in families}


def _vllm_family(theirs: str, ours: Family) -> Family:
    """Return vLLM's family for one of ours, of the same meaning."""
    kept = (VLLM_LABELS[label] for label in ours.labels if label in VLLM_LABELS)
    part = "The part of the KV pool that running sequences use: 1 is all of it."
    return Family(theirs, ours.kind, ("model_name", *kept), part if ours.name.endswith("_blocks") else ours.help)


VLLM_FAMILIES = {theirs: _vllm_family(theirs, FAMILIES[ours]) for theirs, ours in OURS.items()}

_INTRODUCTION = """\
# Metrics

Made from `serve_app/ingress/observe/families.py` by `make docs`.

`GET /metrics` of any ingress returns the whole app in Prometheus' text format: every ingress (label `ingress`) and
every replica (label `replica`; its figures arrive through the feed and are up to a second old). With tenants
configured it needs an operator key. With `metrics_public` it needs none, and a client without one sees sums over all
tenants. Counters start at 0 with their process, so use `rate()`. Units are in the names. A series without data is
absent. [Monitoring](../how-to/monitoring.md) has a dashboard with useful queries, alerts and scrape settings.

Some families are similar. These are the ones to show: **time to first token** is
`warmpath_time_to_first_token_seconds`, **time between tokens** is `warmpath_inter_token_latency_seconds`, and **time of
an answer** is `warmpath_e2e_request_latency_seconds`. All are the clients' waiting times, measured in the ingress. The
replica's part of the first is `warmpath_request_queue_time_seconds` + `warmpath_request_prefill_time_seconds`.
`warmpath_tenant_*` count tokens by tenant, as reported to clients. `warmpath_prompt_tokens_*` and
`warmpath_prefix_cache_*` count the replicas' tokens, resent requests included.

With `engine: simulated` no model runs, and all times are simulated.
"""

_VLLM = """\
## vLLM's names

With `vllm_metrics: true`, `/metrics` also has these metrics under vLLM's names, for boards and scrapers made for vLLM.
They mean the same, summed over tenants; the bounds of buckets are ours. `engine` is a replica's id; `finished_reason`
is `abort` for `cancelled` and `timeout`. Metrics of vLLM without a row have no equal here. `promtool check metrics`
objects to the colon in these names, as it does in vLLM.
"""

LABELS = {
    "ingress": "an ingress' replica id",
    "replica": "a replica's id; its series end when the replica leaves",
    "engine": "`torch`, `vllm`, `simulated` or `remote`",
    "tenant": "a configured name, `NAME~2` if it was another tenant's before; `default` if none are configured; `none` "
    "without a valid key; `(public)`: blocks of registered public prompts; `other`: a replica's tenants beyond 100",
    "version": "a release of warmpath",
    "endpoint": "the route's name: `chat`, `completions`, `models`, `metrics`, ...",
    "status": "an HTTP status; 499: the client left",
    "after_first_token": "`true` or `false`",
    "loop": "the function of such work in the code",
    "finished_reason": "`stop`, `length`, `cancelled`, `timeout`, `error`",
    "result": "`right` or `wrong`",
    "pid": "a process id",
    "node": "a machine's name",
    "gpu": "numbers of GPUs, as Ray gives them, or none",
    "capability": "a name of `required_capabilities`",
    "state": "for blocks `used`, `cached`, `free`; for adapters `loaded`, `slots`, `running`; for sessions "
    "`running`, `paused`, `waiting`, `left`",
    "outcome": "one of a few words; the family's text explains unclear ones",
    "tier": "`host`, `disk` or `object`",
    "reason": "one of a few words. For decisions, `cached`: the replica holds the longest prefix; `in_flight`: it is "
    "computing the same prefix; `cold`: no replica holds any; `load_spill`: the holder is too busy; `only_replica`: "
    "no other replica is available; others name the policy's rule. For misses: see "
    "[misses](../how-to/misses.md#reasons)",
    "place": "`port`, `ingress`, `router`, `session`, `engine`",
    "limit": "a setting's name, or `event_streams`",
    "prompt": "NAME@VERSION of a registered prompt",
    "kind": "`save`, `public`, `prefix`",
    "policy": "a policy's name",
    "shadow": "a policy's name",
    "choice": "`acting` or `shadow`",
    "cause": "`not_selected`, `evicted`, `unused`; of a fallback `down`, `asleep`, `full`",
    "model": "on every series of one of several `models`, its name",
    "fallback": "a model's name",
}
"""The values of each label. All sets are bounded: no value holds text of a client or of an error."""


def metrics_page() -> str:
    """Return the page: every family by section, and every label."""
    lines = [_INTRODUCTION]
    for title, (note, families) in SECTIONS.items():
        lines += [f"## {title}", "", note, "", "| name | kind | labels | meaning |", "|---|---|---|---|"]
        for name, kind, labels, meaning in families:
            lines.append(f"| `{name}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {meaning} |")
        lines.append("")
    lines += [_VLLM, "| vLLM's metric | ours | labels of vLLM's |", "|---|---|---|"]
    for name, family in VLLM_FAMILIES.items():
        shown = ", ".join(f"`{label}`" for label in family.labels)
        part = ": `used` / all" if family.kind == "gauge" and OURS[name].endswith("_blocks") else ""
        lines.append(f"| `{name}` | `{OURS[name]}`{part} | {shown} |")
    lines += ["", "## Labels", "", "All values are from bounded sets.", "", "| label | values |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{label}` | {values} |" for label, values in LABELS.items()), ""])


if __name__ == "__main__":
    sys.stdout.write(metrics_page())
