"""The metrics as Markdown tables: `make docs`."""

import sys

from serve_app.ingress.observe.families import SECTIONS

_INTRODUCTION = """\
# Metrics

Made from `serve_app/ingress/observe/families.py` by `make docs`.

`GET /metrics` of any ingress shows the whole app in Prometheus' text format: every ingress (label `ingress`) and every
replica (label `replica`; its figures come through the feed and are up to a second old). With tenants configured it
needs an operator key; with `metrics_public` nobody needs one, and who has none sees sums over all tenants. Counters
start at 0 with their process, so use `rate()`; units are in the names. A series that has nothing to say is absent.
A dashboard, whose panels hold the queries to begin with, alerts and scrape settings are ready to use:
[monitoring](../how-to/monitoring.md).

Several families are near each other, and these are the ones to show: **time to first token** is
`warmpath_time_to_first_token_seconds`, **time between tokens** `warmpath_inter_token_latency_seconds`: what clients
wait, measured in the ingress. The replica's part of the former is
`warmpath_request_queue_time_seconds` + `warmpath_request_prefill_time_seconds`. Tokens by tenant as clients were told
are `warmpath_tenant_*`; what replicas computed, resent requests included, are `warmpath_prompt_tokens_*` and
`warmpath_prefix_cache_*`.

With `engine: simulated` no model runs and all times are simulated ones.
"""

LABELS = {
    "ingress": "an ingress' replica id",
    "replica": "a replica's id; its series end when it leaves",
    "engine": "`torch`, `vllm` or `simulated`",
    "tenant": "a configured name; `default` where none are configured; `none` without a valid key; `(public)`: blocks "
    "of registered public prompts; of a replica's beyond 100 `other`",
    "endpoint": "the route's name: `chat`, `completions`, `models`, `metrics`, ...",
    "status": "an HTTP status; 499: the client left",
    "after_first_token": "`true` or `false`",
    "finished_reason": "`stop`, `length`, `cancelled`, `timeout`, `error`",
    "pid": "a process id",
    "node": "a machine's name",
    "gpu": "numbers of GPUs, as Ray gives them, or none",
    "state": "of blocks `used`, `cached`, `free`; of adapters `loaded`, `slots`, `running`; of sessions "
    "`running`, `paused`, `waiting`, `left`",
    "outcome": "one of a few words, named where they are not plain",
    "tier": "`host` or `disk`",
    "reason": "one of a few words. Of decisions `cached`: it holds the most; `in_flight`: it is computing the same "
    "beginning; `cold`: nobody holds any; `load_spill`: a holder is too busy; `hot_prefix`: one more holder is needed; "
    "`only_replica`: no other can take it; the others say how the policy works. Of misses: see "
    "[misses](../how-to/misses.md#reasons)",
    "prompt": "NAME@VERSION of a registered prompt",
    "kind": "`save`, `public`, `prefix`",
    "policy": "a policy's name",
    "cause": "`not_selected`, `evicted`, `unused`",
}
"""What the values of each label are. All are from bounded sets: no text of a client or of an error is a value."""


def metrics_page() -> str:
    """Return the page: every family by section, every label."""
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
