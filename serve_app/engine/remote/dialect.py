"""What differs between kinds of servers: their names, paths, metrics and KV events, a request's body, its answer.

Only documented fields of public APIs are used, so other versions of a server are as good.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from serve_app.engine.protocol import EngineRequest, TokenRules
from serve_app.engine.remote.answers import Part


class Dialect(ABC):
    """One kind of servers. A class in a file of `dialects/` is all the code that a further kind needs."""

    owner: ClassVar[str]
    """What /v1/models calls the owner of a model."""
    product: ClassVar[str]
    answers_at: ClassVar[str]
    """The path of completions."""
    body_schema: ClassVar[str]
    """The name of their body in /openapi.json."""
    describes_at: ClassVar[Sequence[str]] = ("/version",)
    """Paths of what a server says of itself: the first that tells anything counts."""
    adapters_at: ClassVar[str] = "/v1"
    """The path under which adapters are loaded."""
    running_metric: ClassVar[str] = "vllm:num_requests_running"
    waiting_metric: ClassVar[str] = "vllm:num_requests_waiting"
    repeats_tokens: ClassVar[bool] = False
    """Whether each event of an answer may have all of its tokens so far again."""
    takes_priority: ClassVar[bool] = False
    """Whether a body may have a ``priority``; a server may still refuse it."""
    blind: ClassVar[str] = ""
    """Why its KV events cannot be followed, "" if they can."""
    cached_tokens_option: ClassVar[str] = ""
    """The option with which its answers tell cached tokens, "" if they need none."""

    def pool_of(self, metrics: str) -> Mapping[str, str]:
        """Return ``block_size`` and ``num_gpu_blocks`` from the text of /metrics, as far as it has them."""
        return {}

    def takes_salt(self, facts: "WorkerFacts") -> bool:
        """Return whether a body may have a ``cache_salt``."""
        return "cache_salt" in facts.fields

    @abstractmethod
    def body(self, request: EngineRequest, facts: "WorkerFacts", salt: str, bad_words: list[str]) -> dict[str, Any]:
        """Return a request's body. ``bad_words``: those of several tokens, as text.

        Raises ValueError for a rule that the server does not have.
        """

    @abstractmethod
    def part(self, event: bytes, request: EngineRequest, had: int) -> Part:
        """Read one event of an answer after ``had`` tokens. Raises one of ``LIES``."""

    def whole(self, request: EngineRequest, body: bytes) -> Part:
        """Read an answer in one piece, as requests for the log-probabilities of a prompt get. Raises one of ``LIES``.

        Only for servers whose ``body`` refuses no such request.
        """
        raise NotImplementedError(f"{self.product} answers in events alone")


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a server says about itself, 0 or empty where it says nothing.

    ``model``: its name in requests; ``root``: the path or hub id that the server was started with; ``models``: all
    names, adapters' too. ``fields``: of a request's body.
    """

    dialect: Dialect
    version: str
    model: str
    root: str
    models: frozenset[str]
    max_model_len: int
    block_size: int
    num_blocks: int
    fields: frozenset[str]

    @property
    def called(self) -> str:
        """The server's product and version."""
        return f"{self.dialect.product} {self.version}".strip()

    def takes(self, field: str) -> bool:
        """Return whether a body may have a field, as far as the server says."""
        return not self.fields or field in self.fields


def sampling_fields(request: EngineRequest, rules: TokenRules, most: str) -> dict[str, Any]:
    """Return the fields of sampling that all kinds call alike. ``most``: their name for the most tokens."""
    sampling = request.sampling
    biases = dict(rules.logit_bias) | {word[0]: -100.0 for word in rules.bad_words if len(word) == 1}
    return {
        most: max(sampling.max_tokens, 1),
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "presence_penalty": rules.presence_penalty,
        "frequency_penalty": rules.frequency_penalty,
        "repetition_penalty": rules.repetition_penalty,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
        **({"logit_bias": {str(token): value for token, value in biases.items()}} if biases else {}),
    }


def seed_of(request: EngineRequest) -> int | None:
    """Return the seed to send, None for none: its lowest 63 bits, since servers take no negative or larger ones."""
    sampling = request.sampling
    return sampling.seed & ((1 << 63) - 1) if sampling.seeded or request.grammar else None


def grammar_of(request: EngineRequest) -> tuple[Any, str | None]:
    """Return a request's JSON Schema, None without one, and else its grammar in Lark's form."""
    (grammar,) = msgspec.json.decode(request.grammar)["grammars"]
    return grammar.get("json_schema"), grammar.get("lark_grammar")
