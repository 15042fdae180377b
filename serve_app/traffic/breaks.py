"""Where the prompts of recorded traffic leave those before them: what `prompts lint` can tell without their text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from serve_app.request_files import TraceError, numbered_lines
from serve_app.traffic.workload import Workload, shared_tokens

MOST_BREAKS = 20


@dataclass(frozen=True, slots=True)
class PromptBreak:
    """Prompts of one model and tenant that leave all earlier ones after ``tokens``; ``lost_tokens``: those behind."""

    model: str
    tenant: str
    tokens: int
    prompts: int
    lost_tokens: int


def is_recording(path: Path) -> bool:
    """Return whether a file begins as recorded traffic does."""
    try:
        _, line = next(numbered_lines(path), (0, b""))
    except TraceError:
        return False
    return b'"warmpath_traffic"' in line


def prompt_breaks(workload: Workload) -> list[PromptBreak]:
    """Return the places where two or more prompts of a model and tenant break off, most lost tokens first."""
    known = shared_tokens(workload.paths, workload.path_start, workload.sizes, workload.block_tokens)
    width = len(workload.tenants)
    parties = workload.model.astype(np.int64) * width + workload.tenant
    places, which, prompts = np.unique(np.stack((parties, known)), axis=1, return_inverse=True, return_counts=True)
    lost = np.bincount(which.reshape(-1), workload.prompt_tokens - known)
    order = [place for place in np.argsort(-lost, kind="stable").tolist() if prompts[place] > 1][:MOST_BREAKS]
    return [
        PromptBreak(
            workload.models[places[0, place] // width],
            workload.tenants[places[0, place] % width],
            int(places[1, place]),
            int(prompts[place]),
            int(lost[place]),
        )
        for place in order
    ]
