"""GET /v1/cache/events: live events of the caches (docs/reference/api.md)."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from serve_app.errors import InvalidRequest, ModelNotFound, WarmpathError
from serve_app.ingress.address import Address
from serve_app.ingress.http import json_response
from serve_app.ingress.routes.event_stream import LiveEventStream
from serve_app.ingress.routes.handler import guarded

router = APIRouter(tags=["operations"])


@router.get("/v1/cache/events")
@guarded("cache_events")
async def events(request: Request, address: Address) -> Response:
    """Live server-sent events: replicas, prefixes, decisions and figures, without the text of prompts.

    Query: `once` (true: only the snapshot, as JSON). Each event has an `id`, an `event` (its type) and `data`: one JSON
    object on one line, with `type` and `at_s` (seconds since 1970). The first event is a `snapshot`; changes follow. A
    stream that reconnects starts with a new snapshot. After each second without an event, the server sends a comment.
    Ignore unknown types and fields. A file with the `data` lines is a recording, which the page at `/` can play.

    **Access.** An operator sees everything. Without configured keys, so does everybody. A tenant sees its own prefixes,
    decisions, totals and figures; the public prompts that it used, with its own counts; and each replica's `replica`,
    `number`, `state`, `engine` and `simulated`. Entries marked *op* are for operators only, and absent for tenants.

    **Limits.** One ingress serves 4 streams per tenant and 16 for operators; another one gets a 429. A stream has at
    most 20 decisions and 20 refusals per second, and the 256 most recently used prefixes. The limit of prefixes per
    tenant and ingress is 256 divided by the number of tenants, but at least 16. A slow reader loses the oldest events;
    `dropped` and a snapshot follow. The key is checked every 2 s. With several ingresses, events of others come about 1
    s later.

    | type | when | fields |
    |---|---|---|
    | `snapshot` | first | see below |
    | `replica` | a replica joined or changed | a REPLICA |
    | `replica_left` | a replica is gone | `replica`, `number`, `lost` (it died, or its network); *op*: `report_age_s` |
    | `prefixes` | prefixes are new, were used, or changed holders | `nodes`: NODEs; each replaces the one of its `id` |
    | `prefixes_gone` | prefixes were not used for a long time | `ids` |
    | `decision` | the first token of a generation arrived | a DECISION |
    | `miss` | the first of a session that its client can avoid | a MISS |
    | `totals` | once a second while requests arrive | `totals`: TOTALs; `figures`: changed FIGUREs; `minute` |
    | `refusal` | a limit refused a request | a REFUSED |
    | `evictions` *op* | blocks were evicted to make room | `replica`, `blocks`, `seconds` (the period) |
    | `pulls` *op* | KV was pulled | `replica` (the receiver), `pulls` (by outcome), `tokens`, `seconds` |
    | `move` *op* | a replica copied KV before it joined, or handed KV over before it left | a MOVE |
    | `reset` *op* | the caches were reset | `complete` (true: every replica did so) |
    | `scale` *op* | the autoscaler decided | `from`, `target`, `needed`, `reason`, `why` |
    | `configuration` *op* | a `user_config` was refused, or the problem is fixed | `configuration`: all REFUSALs |
    | `ingresses_heard` *op* | an ingress stopped answering, or answers again | `ingresses_heard` |
    | `skipped` | there were too many of these to send | `decisions`, `refusals`, `misses` (their numbers) |
    | `dropped` | this reader was too slow | `events` (the number lost) |
    | `end` | the stream ends | `reason`: `key` (no longer valid) or `stopping` |

    - **Snapshot**: `viewer` (operator, tenant), `tenant`, `model`, `engine`, `simulated` (times come from a cost
      model), `policy`, `block_size`, `ingresses`, `links` (paths that need no key: docs, metrics), `keys` (requests
      need a tenant's), `from_zero` (without requests, the model has no replica), `replicas`, `prefixes`, `totals`,
      `figures`, `minute` (a FIGURE of the last minute), `rates` (names in a FIGURE that the page shows by second, each
      with a label), `decisions`, `refusals` and `misses` (the last 50 of each, with a watcher), `incidents` (the last
      32 `joined`, `replica_left` and, *op*, `reset`); *op*: `moves` (the last 16), `scale` (or null), `configuration`,
      `ingresses_heard` (how many answer; null: the others do not).
    - **MISS**: `request`, `tenant`, `reason` and `lost_tokens` (as in usage), `part` and `line`, `advice`.
    - **REPLICA**: `replica` (its id), `number` (in order of joining), `state`, `engine`, `simulated`; *op*: `node`,
      `gpu`, `blocks_total` = `blocks_used` (by running sequences) + `blocks_reusable` (cached) + `blocks_free`;
      `blocks_by_owner` (of the 12 tenants that hold most, `(public)` prompts as one), `blocks_pinned`, `running`,
      `waiting`, `queued_tokens`, `full`, `prefill_tokens_per_s`, `tier_blocks`, `report_age_s` (null: no report yet;
      sent again when it exceeds 3 s), `without` (names of `required_capabilities` that its version of vLLM does not
      allow). `state`: `joining` (no report yet), `serving`, `leaving` (it gets no new request), `lost` (it was leaving
      and is silent). Fields without a reported value are absent.
    - **NODE**: `id`, `parent` (null: at the root), `kind` (public, system, conversation), `tenant` (null: public),
      `label` (a registered prompt's NAME@VERSION), `prefix_tokens` (up to its end), `tokens` (its own part), `pinned`,
      `requests`, `hits` (requests that read all of it from the cache), `last_used_at_s`, `holders` (its cached tokens
      by replica).
    - **TOTAL**, since the start: `tenant`, `requests`, `prompt_tokens`, `cached_tokens`.
    - **FIGURE**, of ten seconds, kept for 15 minutes even without watchers: `at_s` (its start), `requests` (answered),
      `refused` (429), `refused_by` (those with a `reason`, by place and limit), `failed` (5xx, or an error in a
      stream), `tokens` (generated), `prompt_tokens`, `cached_tokens`, `ttft_p50_s`, `ttft_p95_s`, `e2e_p50_s`,
      `e2e_p95_s` (to the first token and to the end of an answer, as clients see it; error at most 7 %), all from the
      counters of `/metrics`. Periods without a request are absent.
    - **DECISION**: `request` (the answer's id without its prefix, and a choice; of a response, the first half of that
      id's SHA-256), `tenant`, `ingress`, `replica`, `reason` (as in `/v1/cache/explain`), `node` (the deepest
      node that the prompt starts with, or null), `prompt_tokens`, `best_cached_tokens` (the most on any replica),
      `selected_cached_tokens` (on the chosen one), `cached_tokens` (reused), `pull_from`, `pull_tokens`, `ttft_s`;
      *op*: `estimated_ttft_s`, `queued_tokens`, `cold_ttft_s` (the estimate without a cache).
    - **REFUSED**: `tenant`, `ingress`, `place`, `limit`, `used`, `most` (as in the error's `reason`), `remedy` (for the
      operator).
    - **MOVE**: `kind` (prewarm, handover), `replica`, `state`, `peers`, `blocks`, `bytes`, `seconds`, `prefixes`,
      `saves`, `skipped_blocks` (by reason).
    - **REFUSAL**: `accepted`, `why`, `processes` (the number that reports it), `at_s`.
    """
    address.drain.refuse()
    viewer = address.guard.viewer(request)
    if viewer is not None:
        address.guard.tenant(request)  # stored for the counters
        if address.several and not address.cards(request):
            raise ModelNotFound("This key has no models here (GET /v1/models).", param="model")
    live = address.of_query(request).live
    once = request.query_params.get("once", "false")
    if once not in ("true", "false"):
        raise InvalidRequest("once must be true or false.", param="once")
    if once == "true":
        return json_response(await live.snapshot(viewer))

    def allowed() -> bool:
        try:
            return address.guard.viewer(request) == viewer
        except WarmpathError:
            return False

    return LiveEventStream(live, viewer, await live.watch(viewer), allowed)
