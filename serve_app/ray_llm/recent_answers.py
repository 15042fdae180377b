"""A replica's latest answers, for the cache application beside Ray's."""

from collections import deque
from hashlib import sha256

RecentAnswer = tuple[str, str, bytes, int, int, float]
"""Request id, tenant, the hashes of the prompt's whole blocks, prompt tokens, cached tokens, TTFT in seconds."""

KEPT = 256


class RecentAnswers:
    """The last ``KEPT`` requests that had their first token, numbered from 1. Used from one event loop."""

    def __init__(self) -> None:
        self.number = 0
        self._kept: deque[RecentAnswer] = deque(maxlen=KEPT)

    def add(self, answer: RecentAnswer) -> None:
        """Keep an answer. The id of a response, which may open its text, is replaced by a digest."""
        if answer[0].startswith("resp_"):
            answer = (sha256(answer[0].encode()).hexdigest()[:32], *answer[1:])
        self.number += 1
        self._kept.append(answer)

    def since(self, number: int) -> list[RecentAnswer]:
        """Return the kept answers after the one with this number, the oldest first."""
        new = min(self.number - number, len(self._kept))
        return list(self._kept)[len(self._kept) - new :] if new > 0 else []
