"""GET /v1/cache/events: what happens now, as server-sent events (docs/reference/api.md)."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from serve_app.errors import InvalidRequest, WarmpathError
from serve_app.ingress.http import json_response
from serve_app.ingress.routes.event_stream import EventStream
from serve_app.ingress.routes.handler import Front, guarded

router = APIRouter(tags=["operations"])


@router.get("/v1/cache/events")
@guarded("cache_events")
async def events(request: Request, services: Front) -> Response:
    """What happens now, as server-sent events: replicas, prefixes, decisions, figures. Text of prompts is never in it.

    In the query: `once` (true: the snapshot alone, as JSON). Each event has an `id`, an `event` (its type) and `data`,
    one JSON object on one line with `type` and `at_s` (seconds since 1970) again. First comes a `snapshot`, then
    changes; a stream that is begun again begins with a snapshot. After a second of silence a comment comes. Pass over
    types and fields that you do not know. A file of the `data` lines is a recording, which the page at `/` plays.

    **Who sees what.** An operator, or anybody where there are no keys, sees all. A tenant sees its own prefixes,
    decisions, totals and figures, public prompts that it used with its own counts, and of replicas `replica`, `number`,
    `state`, `engine` and `simulated`. What only operators see is marked *op*; it is absent for others.

    **Bounds.** 4 streams of a tenant and 16 of operators at one ingress, then 429. 20 decisions a second to a stream;
    256 prefixes, those used last; of each tenant an ingress tells 256 divided by the number of tenants, and at least
    16. A slow reader loses the oldest events, is told `dropped`, and gets a snapshot. The key is checked every 2 s.
    With several ingresses a stream hangs on one, and has what happens at the others about a second later.

    | type | when | fields |
    |---|---|---|
    | `snapshot` | first | see below |
    | `replica` | it joined or changed | a REPLICA |
    | `replica_left` | it is gone | `replica`, `number`, `lost` (it died, or its network did); *op*: `report_age_s` |
    | `prefixes` | new, used, or held elsewhere | `nodes`: NODEs, each in the place of the one of its `id` |
    | `prefixes_gone` | not used for long | `ids` |
    | `decision` | a generation's first token came | a DECISION |
    | `totals` | once a second while requests come | `totals`: TOTALs; `figures`: FIGUREs that changed; `minute` |
    | `evictions` *op* | blocks gave room to others | `replica`, `blocks`, `seconds` (over how long) |
    | `pulls` *op* | KV was copied | `replica` (that copied), `pulls` (by outcome), `tokens`, `seconds` |
    | `move` *op* | a replica copied before it joined, or handed over | a MOVE |
    | `reset` *op* | the caches were told to forget everything | `complete` (whether all did) |
    | `scale` *op* | the autoscaler decided | `from`, `target`, `needed`, `reason`, `why` |
    | `configuration` *op* | a `user_config` was refused, or is mended | `configuration`: REFUSALs, all |
    | `ingresses_heard` *op* | an ingress is gone, or back | `ingresses_heard` |
    | `skipped` | decisions were too many to send | `decisions` |
    | `dropped` | this reader was too slow | `events` |
    | `end` | the stream ends | `reason`: `key` (it is valid no more), `stopping` |

    - **Snapshot** `viewer` (operator, tenant), `tenant`, `model`, `engine`, `simulated` (times are a cost model's),
      `policy`, `block_size`, `ingresses`, `links` (paths that need no key: docs, metrics), `replicas`, `prefixes`,
      `totals`, `figures`, `minute` (as a FIGURE, of the last minute), `decisions` (the last 50 that were seen while
      somebody watched), `incidents` (the last 32 `joined`, `replica_left` and, *op*, `reset`); *op*: `moves` (the
      last 16), `scale` (or null), `configuration`, `ingresses_heard` (how many answer; null: the others do not).
    - **REPLICA** `replica` (its id), `number` (by order of joining), `state`, `engine`, `simulated`; *op*: `node`,
      `gpu`, `blocks_total` = `blocks_used` (by running sequences) + `blocks_reusable` (cached) + `blocks_free`;
      `blocks_pinned`, `running`, `waiting`, `queued_tokens`, `full`, `prefill_tokens_per_s`, `tier_blocks`,
      `report_age_s` (null: no report yet; told anew when it passes 3 s). `state`: `joining` (no report yet),
      `serving`, `leaving` (it gets no request), `lost` (it was to leave, and says nothing). What a replica has not
      told is absent.
    - **NODE** `id`, `parent` (null: at the root), `kind` (public, system, conversation), `tenant` (null: public),
      `label` (a registered prompt's NAME@VERSION), `prefix_tokens` (to its end), `tokens` (its own part), `pinned`,
      `requests`, `hits` (those that read all of it from the cache), `last_used_at_s`, `holders` (its tokens by
      replica).
    - **TOTAL** since the start: `tenant`, `requests`, `prompt_tokens`, `cached_tokens`.
    - **FIGURE** of ten seconds, kept for 15 minutes whether somebody watches or not: `at_s` (its beginning),
      `requests` (answered), `refused` (429), `failed` (5xx), `ttft_p50_s`, `ttft_p95_s` (as clients wait; 7 % off
      at most). Ten seconds without a request are absent.
    - **DECISION** `request`, `tenant`, `ingress`, `replica`, `reason` (as in `/v1/cache/explain`), `node` (the
      deepest that the prompt begins with, or null), `prompt_tokens`, `best_cached_tokens` (the most that any replica
      held), `selected_cached_tokens` (the chosen one), `cached_tokens` (reused), `pull_from`, `pull_tokens`,
      `ttft_s`; *op*: `estimated_ttft_s`, `queued_tokens`, `cold_ttft_s` (had nothing been cached).
    - **MOVE** `kind` (prewarm, handover), `replica`, `state`, `peers`, `blocks`, `bytes`, `seconds`, `prefixes`,
      `saves`, `skipped_blocks` (by reason).
    - **REFUSAL** `accepted`, `why`, `processes` (how many say so), `at_s`.
    """
    services.drain.refuse()
    viewer = services.guard.viewer(request)
    if viewer is not None:
        services.guard.tenant(request)  # whose request it is, for the counters
    once = request.query_params.get("once", "false")
    if once not in ("true", "false"):
        raise InvalidRequest("once must be true or false.", param="once")
    if once == "true":
        return json_response(await services.live.snapshot(viewer))

    def allowed() -> bool:
        try:
            return services.guard.viewer(request) == viewer
        except WarmpathError:
            return False

    return EventStream(services.live, viewer, await services.live.watch(viewer), allowed)
