"""vLLM's names for metrics that mean the same, so that its boards and scrapers work: the setting ``vllm_metrics``.

A metric of vLLM's is absent here if ours differs in meaning. ``engine`` is the replica's id, and ``ingress`` marks what
the ingress measures; tenants are summed, since vLLM's boards know none.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from router.protocol.samples import Labels, Sample

_SAME = (
    *("num_requests_running", "num_requests_waiting", "num_preemptions_total"),
    *("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_prefill_time_seconds"),
)
USAGE, _BLOCKS = "vllm:kv_cache_usage_perc", "warmpath_kv_cache_blocks"
OURS = {
    "vllm:request_success_total": "warmpath_requests_finished_total",
    USAGE: _BLOCKS,
    **{f"vllm:{name}": f"warmpath_{name}" for name in _SAME},
}
"""Our family for each of vLLM's."""

_REASONS = {"cancelled": "abort", "timeout": "abort"}
"""vLLM's word for our reason of an end, where they differ."""


LABELS = {"replica": "engine", "ingress": "ingress", "finished_reason": "finished_reason"}
"""The name of each of our labels there, besides ``model_name``."""
_THEIRS = {
    f"{ours}{end}": f"{theirs}{end}"
    for theirs, ours in OURS.items()
    for end in (("_bucket", "_sum", "_count") if theirs.endswith("_seconds") else ("",))
}


def vllm_samples(samples: Iterable[Sample], model: str) -> Iterator[Sample]:
    """Yield vLLM's metrics from the samples of an app. ``model``: the name where a sample has no label ``model``."""
    sums: defaultdict[tuple[str, Labels], float] = defaultdict(float)
    pools: defaultdict[Labels, float] = defaultdict(float)
    for name, pairs, value in samples:
        theirs = _THEIRS.get(name)
        if theirs is None:
            continue
        labels = dict(pairs)
        kept = [("model_name", labels.get("model", model))]
        if "replica" in labels:
            kept.append(("engine", labels["replica"]))
        if "finished_reason" in labels:
            reason = labels["finished_reason"]
            kept.append(("finished_reason", _REASONS.get(reason, reason)))
        kept += [(label, labels[label]) for label in ("ingress", "le") if label in labels]
        if theirs == USAGE:
            pools[tuple(kept)] += value
            value *= labels.get("state") == "used"
        sums[theirs, tuple(kept)] += value
    for (theirs, shown), value in sums.items():
        yield theirs, shown, value / max(1.0, pools[shown]) if theirs == USAGE else value
