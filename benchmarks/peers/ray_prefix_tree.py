"""The prefix tree of Ray's PrefixCacheAffinityRouter alone: a match, then an insertion for the chosen replica.

Its router calls it in an actor, twice per request. A token counts as four characters, a block as 64.
"""

import time

from benchmarks.routing.workload import RoutingWorkload, figures, resident_bytes, serve


def measure(workload: RoutingWorkload) -> dict[str, float]:
    """Insert every prompt for its holders, then match and insert every query."""
    from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree

    before = resident_bytes()
    tree = PrefixTree()
    names = workload.names()
    tree.add_tenants(names, 0.0)
    spent_s, now_s = 0.0, 1.0
    for chain, holders in workload.prompts():
        text = text_of(chain)
        started = time.perf_counter()
        for name in holders:
            tree.insert(text, name, now_s)
        spent_s += time.perf_counter() - started
        now_s += 1.0
    grown = resident_bytes() - before
    taken_s, matches = [], 0
    for chain, _ in workload.queries():
        text = text_of(chain)
        started = time.perf_counter()
        matched, holders = tree.prefix_match(text, names)
        tree.insert(text, (holders or names)[0], now_s)
        taken_s.append(time.perf_counter() - started)
        matches += len(matched) >= 64
        now_s += 1.0
    return {**figures(workload, taken_s, spent_s, grown), "found_share": matches / len(taken_s)}


def text_of(chain: bytes) -> str:
    """Return 64 characters for each block; different blocks have different characters."""
    letters = chain.hex()
    return "".join(2 * letters[start : start + 32] for start in range(0, len(letters), 32))


if __name__ == "__main__":
    serve(measure)
