"""Print the metrics as Markdown tables, for `make docs`."""

import sys

from serve_app.ingress.observe.families import SECTIONS

_INTRODUCTION = """\
# Metrics

Made from `serve_app/ingress/observe/families.py` by `make docs`.

`GET /metrics` of any ingress returns the whole app in Prometheus' text format: every ingress (label `ingress`) and
every replica (label `replica`; its figures arrive through the feed and are up to a second old). With tenants
configured it needs an operator key. With `metrics_public` it needs none, and a client without one sees sums over all
tenants. Counters start at 0 with their process, so use `rate()`. Units are in the names. A series without data is
absent. [Monitoring](../how-to/monitoring.md) has a dashboard with useful queries, alerts and scrape settings.

Some families are similar. These are the ones to show: **time to first token** is
`warmpath_time_to_first_token_seconds`, and **time between tokens** is `warmpath_inter_token_latency_seconds`. Both are
the clients' waiting times, measured in the ingress. The replica's part of the former is
`warmpath_request_queue_time_seconds` + `warmpath_request_prefill_time_seconds`. `warmpath_tenant_*` count tokens by
tenant, as reported to clients. `warmpath_prompt_tokens_*` and `warmpath_prefix_cache_*` count the replicas' tokens,
resent requests included.

With `engine: simulated` no model runs, and all times are simulated.
"""

LABELS = {
    "ingress": "an ingress' replica id",
    "replica": "a replica's id; its series end when the replica leaves",
    "engine": "`torch`, `vllm` or `simulated`",
    "tenant": "a configured name; `default` if none are configured; `none` without a valid key; `(public)`: blocks "
    "of registered public prompts; `other`: a replica's tenants beyond 100",
    "endpoint": "the route's name: `chat`, `completions`, `models`, `metrics`, ...",
    "status": "an HTTP status; 499: the client left",
    "after_first_token": "`true` or `false`",
    "finished_reason": "`stop`, `length`, `cancelled`, `timeout`, `error`",
    "pid": "a process id",
    "node": "a machine's name",
    "gpu": "numbers of GPUs, as Ray gives them, or none",
    "state": "for blocks `used`, `cached`, `free`; for adapters `loaded`, `slots`, `running`; for sessions "
    "`running`, `paused`, `waiting`, `left`",
    "outcome": "one of a few words; the family's text explains unclear ones",
    "tier": "`host` or `disk`",
    "reason": "one of a few words. For decisions, `cached`: the replica holds the longest prefix; `in_flight`: it is "
    "computing the same prefix; `cold`: no replica holds any; `load_spill`: the holder is too busy; `only_replica`: "
    "no other replica is available; others name the policy's rule. For misses: see "
    "[misses](../how-to/misses.md#reasons)",
    "place": "`port`, `ingress`, `router`, `session`, `engine`",
    "limit": "a setting's name, or `event_streams`",
    "prompt": "NAME@VERSION of a registered prompt",
    "kind": "`save`, `public`, `prefix`",
    "policy": "a policy's name",
    "cause": "`not_selected`, `evicted`, `unused`",
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
    lines += ["## Labels", "", "All values are from bounded sets.", "", "| label | values |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{label}` | {values} |" for label, values in LABELS.items()), ""])


if __name__ == "__main__":
    sys.stdout.write(metrics_page())
