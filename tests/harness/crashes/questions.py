"""Random requests with every option of the exact-resume contract, and the parts of their answers that must be equal.

Knows HTTP bodies, but no server. A reply leaves out everything that differs between any two runs: ids, times, the
split of text into events, the interleaving of several choices' events, and the number of cached prompt tokens.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from serve_app.config.prompts import PublicPromptConfig

ADAPTERS = ("adapter-0", "adapter-1")
PROMPT = PublicPromptConfig(name="clerk", version="1", text="You are a careful clerk. Name clause and date. " * 12)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

MOST_TOKENS = 32
"""The limit of one choice."""

_WORDS = "harbour ledger clause storm copper winter anchor letter bridge market captain signal garden river".split()


_GRAMMARS: list[dict[str, Any]] = [
    {"json": {"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}}},
    {"json_object": True},
    {"regex": r"[a-z]{3,9}( [0-9]{1,3}){2,8}"},
    {"choice": ["copper harbour", "copper storm", "déjà 木"]},
]


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer: (text, finish reason) of each choice, in order, and the usage."""

    choices: tuple[tuple[str, str], ...]
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Broken:
    """An error in place of an answer."""

    message: str


@dataclass(frozen=True, slots=True)
class Question:
    """One request."""

    path: str
    body: Mapping[str, Any]


class Questions:
    """Draws questions. ``has_logits``: a real model answers, so rules and grammars can change its choice of tokens."""

    def __init__(self, rng: random.Random, *, has_logits: bool = False) -> None:
        self._random = rng
        self._has_logits = has_logits

    def draw(self) -> Question:
        """Return a question; the time for its answer is proportional to its ``max_tokens``."""
        rng = self._random
        path = rng.choice([CHAT, COMPLETIONS])
        body: dict[str, Any] = {
            "model": "demo",
            "n": rng.choice([1, 1, 1, 2, 3]),
            "max_tokens": rng.choice([1, 2, 8, 15, 16, 17, MOST_TOKENS, MOST_TOKENS]),
            "stream": rng.random() < 0.7,
        }
        if path == CHAT:
            system = [{"role": "system", "content": f"Rules of the {rng.choice(_WORDS[:3])}: " + "be brief. " * 60}]
            body["messages"] = [*(system if rng.random() < 0.5 else ()), {"role": "user", "content": self._text()}]
        else:
            prompts: list[Any] = [self._text(), [rng.randrange(300, 3000) for _ in range(rng.randrange(1, 40))]]
            body["prompt"] = rng.choice([prompts[0], prompts[1], [self._text(), self._text()]])
        self._sampling(body)
        if body["stream"] and rng.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
        if rng.random() < 0.3:
            body["lora_name"] = rng.choice(ADAPTERS)
        if rng.random() < 0.3 and (path == CHAT or isinstance(body["prompt"], str)):
            body["prompt_ref"] = PROMPT.ref
        if path == CHAT and rng.random() < 0.2:
            body["save_system_prompt_kv_cache"] = True
        if rng.random() < 0.2:
            body["cache_salt"] = rng.choice(_WORDS)
        if rng.random() < 0.3:
            body["disable_spec_decode"] = True
        return Question(path, body)

    def with_stops(self, question: Question, reply: Reply) -> Question:
        """Return the question with stop strings: one from its answer, and others that match its answer only in part."""
        text = self._random.choice(reply.choices)[0]
        if len(text) < 4:
            return question
        start = self._random.randrange(len(text) - 3)
        found = text[start : start + self._random.randrange(1, 4)]
        begun = text[: self._random.randrange(1, min(len(text), 12))] + "\x01"
        stops = [found, begun] if self._random.random() < 0.7 else [begun, text[start:] + "\x02"]
        return replace(question, body={**question.body, "stop": stops})

    def _text(self) -> str:
        rng = self._random
        words = " ".join(rng.choice(_WORDS) for _ in range(rng.choice([1, 5, 20, 150])))
        return f"{rng.randrange(1000)} {words} déjà 木 🌍" if rng.random() < 0.3 else words

    def _sampling(self, body: dict[str, Any]) -> None:
        rng = self._random
        greedy = rng.random() < 0.4
        body["temperature"] = 0 if greedy else rng.choice([0.3, 0.7, 1.0, 1.5])
        if not greedy:
            body["seed"] = rng.choice([0, 1, -7, 2**62 + 3, rng.randrange(1 << 31)])
        if not greedy and rng.random() < 0.4:
            body |= {"top_p": rng.choice([0.5, 0.95]), "top_k": rng.choice([0, 5, 100])}
        if rng.random() < 0.3:
            body["ignore_eos"] = True
        if rng.random() < 0.2:
            body["min_tokens"] = rng.randrange(body["max_tokens"] + 1)
            body |= {"stop_token_ids": rng.sample(range(300, 3000), 100), "include_stop_str_in_output": True}
        if self._has_logits and rng.random() < 0.4:
            self._rules(body)

    def _rules(self, body: dict[str, Any]) -> None:
        rng = self._random
        if rng.random() < 0.6:
            body |= {"presence_penalty": rng.choice([-0.5, 1.5]), "frequency_penalty": rng.choice([0, 0.7])}
            body |= {"repetition_penalty": rng.choice([0.9, 1.3]), "bad_words": rng.sample(_WORDS, 3)}
            body |= {"logit_bias": {str(rng.randrange(3000)): rng.choice([-100, 4])}, "min_p": rng.choice([0, 0.05])}
        if rng.random() < 0.6:
            body["structured_outputs"] = rng.choice(_GRAMMARS)
