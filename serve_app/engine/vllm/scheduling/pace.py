"""How long vLLM's steps take, and how many prompt tokens of a flood fit in one beside answers. Imports no vllm."""

import math

from router.protocol.samples import Mean, Rate
from serve_app.engine.scheduling.fair_queue import LEAST_STEP_TOKENS, QUANTUM_TOKENS

ANSWERS_PART = 0.5
"""Prompts of a flood make a step beside others' answers longer by this part. Whoever waits for one such step before its
own ones then has an answer of three tokens or more in at most twice the time."""

GENTLEST_TOKENS = 16
"""So few tokens hardly make any step longer, as it reads all weights."""

_MEMORY_TOKENS = 8192.0
_ANSWERS_WEIGHT = 0.25
_TOLD_EACH = 16
"""Of so many steps beside answers, one has the fewest tokens, to tell the time of the answers alone."""


class StepClock:
    """The duration of a step that vLLM began before the previous one's end: from that end, or the request's arrival.

    vLLM's own figure is then the time that it still waited for the step.
    """

    def __init__(self) -> None:
        self._idle, self._from_s = True, 0.0

    def arrived(self, now_s: float) -> None:
        """Note a request."""
        if self._idle:
            self._idle, self._from_s = False, now_s

    def step_s(self, now_s: float, requests: int) -> float:
        """Return the seconds of the step that ends now; ``requests``: those that run or wait after it."""
        duration_s, self._from_s, self._idle = now_s - self._from_s, now_s, not requests
        return duration_s


class Pace:
    """The time of a step in two parts: of all answers, told by steps with few prompt tokens, and of prompt tokens."""

    def __init__(self) -> None:
        self._prefill = Rate()
        self._answers_s = Mean(_ANSWERS_WEIGHT)
        self._untold = _TOLD_EACH

    @property
    def gentle_tokens(self) -> int:
        """Prompt tokens that take ``ANSWERS_PART`` of the time of a step of answers, from 16 to 512."""
        if self._untold >= _TOLD_EACH:
            return GENTLEST_TOKENS
        if not self._prefill.amount:
            return QUANTUM_TOKENS  # which tells their rate
        if self._prefill.seconds <= 0.0:
            return LEAST_STEP_TOKENS  # they take no time beside the answers
        fits = ANSWERS_PART * self._answers_s.value * self._prefill.per_s
        return int(min(LEAST_STEP_TOKENS, max(GENTLEST_TOKENS, fits)))

    def stepped(self, prompt_tokens: int, duration_s: float, *, answers: bool) -> None:
        """Note a step of so many prompt tokens; ``answers``: whether it also computed tokens of answers."""
        if prompt_tokens <= GENTLEST_TOKENS and answers:
            prefill_s = prompt_tokens / self._prefill.per_s if self._prefill.seconds > 0.0 else 0.0
            self._answers_s.observe(max(0.0, duration_s - prefill_s))
            self._untold = 0
        elif prompt_tokens >= QUANTUM_TOKENS or (answers and prompt_tokens > GENTLEST_TOKENS):
            prefill_s = duration_s - (self._answers_s.value if answers else 0.0)
            self._prefill = self._prefill.then(prompt_tokens, prefill_s, math.exp(-prompt_tokens / _MEMORY_TOKENS))
            self._untold += answers
