"""The command: recordings or a live engine in, a report out. Exit status 0: every law holds; 1: not; 2: no stream."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import zmq

from tests.conformance.kv_events.laws import LAWS, Checker
from tests.conformance.kv_events.live import NoAnswer, check_live, listen
from tests.conformance.kv_events.recording import NoRecording, check_recording, write_recording

_SHOWN = 3


def report(checker: Checker) -> str:
    """Return what a checker found, a line a law."""
    totals = checker.totals
    kinds = ", ".join(f"{count} {name}" for name, count in totals.events.items()) or "no events"
    lines = [
        f"{totals.batches} batches, {kinds}",
        f"{totals.blocks_stored} blocks stored ({totals.duplicates} copies), {totals.blocks_removed} removed; "
        f"{totals.tokens} tokens, {totals.payload_bytes / max(1, totals.tokens):.1f} bytes a token",
    ]
    for law, sentence in LAWS.items():
        broken = [violation for violation in checker.violations if violation.law == law]
        checks = checker.checks[law]
        state = f"BROKEN {len(broken)} of {checks}" if broken else f"holds ({checks})" if checks else "not checked"
        lines.append(f"  {law:<11} {state:<20} {sentence}")
        lines += [f"      batch {violation.batch}: {violation.sentence}" for violation in broken[:_SHOWN]]
    if totals.not_judged:
        lines.append(f"not judged, as it needs what came before the first batch here: {totals.not_judged}")
    lines.append(f"warmpath would refuse it: {checker.refusal}" if checker.refusal else "warmpath can route by it")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Check what the arguments name; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance.kv_events",
        description="Check an engine's KV events, as vLLM publishes them, against the laws that routers rely on.",
        epilog="The format of a recording is described in tests/conformance/kv_events/recording.py. A live engine is "
        "best started with --replay and asked from its first request on: blocks of before are not judged.",
    )
    parser.add_argument("recordings", nargs="*", type=Path, help="files of recorded batches")
    parser.add_argument("--endpoint", help="where a live engine publishes: ipc:///run/engine/events, tcp://host:5557")
    parser.add_argument("--replay", help="where it sends batches again")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long to listen (default: 30)")
    parser.add_argument("--num-blocks", type=int, help="blocks of the engine's pool, for the law of room")
    parser.add_argument("--record", type=Path, help="write what the live engine sent to this file")
    options = parser.parse_args(arguments)
    if bool(options.recordings) == bool(options.endpoint):
        parser.error("name recordings, or --endpoint")
    checkers: dict[str, Checker] = {}
    try:
        for path in options.recordings:
            checkers[str(path)] = check_recording(path, options.num_blocks)
        if options.endpoint:
            checker = checkers[options.endpoint] = Checker(options.num_blocks)
            batches = check_live(checker, *listen(options.endpoint, options.replay, options.seconds))
            if options.record:
                write_recording(options.record, options.endpoint, options.num_blocks, batches)
    except (NoRecording, NoAnswer, OSError, zmq.ZMQError) as error:
        print(error, file=sys.stderr)
        return 2
    for name, checker in checkers.items():
        print(f"{name}\n{report(checker)}")
    if not all(checker.totals.batches for checker in checkers.values()):
        print("no batch came: nothing was checked", file=sys.stderr)
        return 2
    return int(any(checker.violations for checker in checkers.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
