"""Recorded loops of clients, turn by turn: the tokens that an earlier prompt has, and those that a cache delivered."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from router.protocol.block_hash import TokenArray, common_tokens
from serve_app.api.agent_rules import by_rules
from serve_app.api.anthropic.request import parse_messages
from serve_app.api.openai.request import parse_chat
from serve_app.api.openai.responses.request import parse_response_request
from serve_app.api.request import ChatRequest
from serve_app.checkpoints.adapter_registry import AdapterRegistry
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.generation.prepare import Limits, Preparer
from serve_app.tenants import Tenants
from serve_app.tokenization.tokenizer import PromptTokenizer
from tests.clients.shapes import requests_of

RECORDED = Path(__file__).parent / "requests"
CLIENTS = ("claude_code_2.1.332", "codex_0.171.0", "qwen_code_0.24.4", "opencode_1.18.33", "openai_agents_0.24.0")
BLOCK = 16
_SECRET = b"s" * 32
_PARSERS = {"/v1/messages": parse_messages, "/v1/responses": parse_response_request, "/v1/chat/completions": parse_chat}


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request as its client sent it."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]

    def parsed(self) -> ChatRequest:
        """Return it as the server reads it, by its rules."""
        return by_rules(_PARSERS[self.path](json.dumps(self.body).encode()))


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens of a prompt; ``known``: in whole blocks that an earlier prompt begins with, ``cached``: not computed."""

    number: int
    prompt: int
    known: int
    cached: int


def recorded(client: str) -> Iterator[RecordedRequest]:
    """Yield a client's requests in their order."""
    for headers, body in requests_of(RECORDED / f"{client}.json"):
        messages = "anthropic-version" in headers
        path = "/v1/messages" if messages else "/v1/responses" if "input" in body else "/v1/chat/completions"
        yield RecordedRequest(path, headers, body)


def preparer_of(model: Path) -> Preparer:
    """Return what makes prompts for a checkpoint, whatever their length."""
    info, tokenizer = load_checkpoint_info(model), PromptTokenizer(model)
    return Preparer(info, tokenizer, Tenants([], _SECRET), _SECRET, AdapterRegistry("demo"), Limits(1 << 20, 64))


class Loop:
    """The turns of one client."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._prompts: list[TokenArray] = []

    def add(self, ids: TokenArray, cached: int) -> None:
        """Add a turn with the tokens of its prompt, and the number of those that came from a cache."""
        common = max((common_tokens(ids, one) for one in self._prompts), default=0)
        # The last token is always computed: the first of the answer follows from it.
        known = min(common, len(ids) - 1) // BLOCK * BLOCK
        self.turns.append(Turn(len(self.turns), len(ids), known, cached))
        self._prompts.append(ids)

    def share(self) -> float:
        """Return the delivered part of what was known; what is cached beyond that, by chance, counts for none."""
        known = sum(turn.known for turn in self.turns)
        return sum(min(turn.known, turn.cached) for turn in self.turns) / known

    def short(self) -> list[Turn]:
        """Return the turns that got less than was known."""
        return [turn for turn in self.turns if turn.cached < turn.known]
