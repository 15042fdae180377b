"""A document for operators: each policy's decision about one request, and its inputs. Pure functions."""

from collections.abc import Mapping
from typing import Any

from router.observe.state import replica_load_state
from router.policy.candidates import Candidate, RoutingView
from router.policy.costs import Estimate, estimate

_BECAUSE = {
    "only_replica": "it is the only replica that can accept the request",
    "round_robin": "it is its turn",
    "power_of_two": "of two replicas drawn at random it has fewer requests",
    "placement": "it comes first in the rendezvous order of the prompt's placement key and is within its load bound",
    "fallback": "it has the least queued work",
    "bounded_hash load_spill": "the replicas before it in the placement key's rendezvous order are over their bound",
}


def explain(
    view: RoutingView, rankings: Mapping[str, list[Candidate]], tiers: Mapping[str, Mapping[str, int]]
) -> dict[str, Any]:
    """Return the replicas in the order of the first ranking, and each policy's winner. ``tiers``: of the matches."""
    loads, adapter_s = view.loads, view.adapter_s
    estimates = {replica_id: estimate(view, replica_id) for replica_id in loads.replica_ids}
    places = {
        policy: {
            candidate.replica_id: {"rank": rank, "score": candidate.score, "reason": candidate.reason}
            for rank, candidate in enumerate(ranked, 1)
        }
        for policy, ranked in rankings.items()
    }
    order = list(next(iter(places.values())))
    order += [replica_id for replica_id in loads.replica_ids if replica_id not in order]
    return {
        "prompt_tokens": view.request.prompt_tokens,
        "best_cached_tokens": view.best_tokens,
        "winners": {policy: _winner(policy, ranked, estimates, view) for policy, ranked in rankings.items()},
        "replicas": [
            {
                "replica_id": replica_id,
                **estimates[replica_id]._asdict(),
                "pull_from": estimates[replica_id].pull_from or None,
                "cached_tokens_by_tier": dict(tiers.get(replica_id, {})),
                "in_flight_tokens": view.pending.get(replica_id, 0),
                "adapter_load_s": 0.0 if adapter_s is None else float(adapter_s[loads.replicas[replica_id].row]),
                "blocked": replica_id in view.blocked,
                **replica_load_state(replica_id, loads, view.now_s),
                "policies": {policy: places[policy].get(replica_id) for policy in rankings},
            }
            for replica_id in order
        ],
    }


def _winner(
    policy: str, ranked: list[Candidate], estimates: Mapping[str, Estimate], view: RoutingView
) -> dict[str, Any]:
    if not ranked:
        why = "every replica is full or blocked: the request would wait" if estimates else "there are no replicas"
        return {"replica_id": None, "reason": None, "because": f"No replica: {why}."}
    first = ranked[0]
    because = _BECAUSE.get(first.reason) or _BECAUSE.get(f"{policy} {first.reason}")
    because = because or _because(ranked, estimates, view)
    expected = estimates[first.replica_id]
    return {
        "replica_id": first.replica_id,
        "reason": first.reason,
        "because": f"{first.replica_id} would get the request, because {because}; "
        f"the work until its first token is estimated at {_seconds(expected.estimated_ttft_s)}.",
    }


def _because(ranked: list[Candidate], estimates: Mapping[str, Estimate], view: RoutingView) -> str:
    """Return the reason for the first place of a ranking by score."""
    match, loads = view.match, view.loads
    first, estimated = ranked[0], estimates[ranked[0].replica_id]
    held, best = estimated.cached_tokens, view.best_tokens
    if first.reason == "cached":
        holders = sum(tokens == best for tokens in match.values())
        among = "the most" if holders == 1 else f"as {holders} replicas do, and of these it scores best"
        return f"it holds {held} of {view.request.prompt_tokens} prompt tokens, {among}"
    if first.reason == "in_flight":
        return (
            f"it is computing a prompt of the same beginning, and will hold all but {estimated.uncached_tokens} tokens"
        )
    if first.reason == "cold":
        return "no replica holds any of the prompt, and it scores best; equal scores go by rendezvous order"
    holder = min((name for name in match if match[name] == best), key=lambda name: estimates[name].estimated_ttft_s)
    place = next((candidate for candidate in ranked if candidate.replica_id == holder), None)
    if place is None:
        why = "is full" if loads.is_full(holder) else "cannot accept it"
        return f"{holder}, which holds {best} tokens, {why}, and of the others it scores best"
    if place.score < first.score:
        return "the prefix has its maximum of holders, and this one scores best of the replicas that may hold it"
    return (
        f"it scores {first.score:.6g} (lower wins) against {place.score:.6g} at {holder}, which holds {best} tokens "
        f"where it holds {held} but has {loads.queue_ahead(holder)} prefill tokens queued"
    )


def _seconds(value: float) -> str:
    return f"{1000 * value:.1f} ms" if value < 1.0 else f"{value:.2f} s"
