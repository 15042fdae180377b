"""The lines of a file of recorded traffic: JSON, one header, then one line a request, in no strict order.

A line of a request has the names of Mooncake's traces (``timestamp``, ``input_length``, ``output_length``,
``hash_ids``) and more. Other lines tell when a model's replicas changed. No line has text, keys or names of tenants.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct, field

VERSION = 1
"""Of the form. A reader refuses a later one."""

Count = Annotated[int, Meta(ge=0)]


class RecordedModel(Struct, omit_defaults=True, frozen=True):
    """What a model's replicas were when the recording began; 0 or "" where it is not known.

    ``pool_tokens``: of one replica's KV pool; ``prefill_tokens_per_s``: of one replica; ``decode_step_s``: of a step
    with one sequence, and ``decode_each_s`` more for each further one; ``pull_tokens_per_s``: KV copied from another
    replica; ``settings``: what ``replay`` simulates with, by their names in a settings file.
    """

    engine: str = ""
    policy: str = ""
    replicas: Count = 0
    pool_tokens: Count = 0
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    decode_each_s: float = 0.0
    max_num_seqs: Count = 0
    pull_tokens_per_s: float = 0.0
    settings: dict[str, Any] = {}


class Header(Struct, omit_defaults=True, frozen=True):
    """The first line. ``started_s``: the Unix time that timestamps count from; ``block_tokens``: of one id.

    ``recording``: files with the same one share ids, and those of others do not; ``writer``: tells the ingresses of one
    recording apart; ``source``: where the file comes from, if it was imported.
    """

    warmpath_traffic: int
    recording: str
    started_s: float
    block_tokens: Annotated[int, Meta(ge=1)]
    writer: str = ""
    source: str = ""
    models: dict[str, RecordedModel] = {}


class TrafficRequest(Struct, omit_defaults=True, kw_only=True):
    """A request. ``timestamp``: ms since ``started_s``, of its arrival.

    ``hash_ids``: an id for each block of the prompt; a last one may stand for a partial block. Equal ids mean equal
    prefixes within one model, adapter and tenant. ``output_length``: tokens of all its answers, of which there are
    ``choices``. ``parent``: the ``id`` of the earlier request that it continues. ``predicted_tokens``,
    ``cached_tokens``: of the prompt, by the router and by the replica. ``ttft_ms``, ``duration_ms``: since its arrival,
    0 without a first token. ``end``: why the answer ended, or the reason of a refusal. ``retries``: further replicas
    asked. ``shadow``: what ``shadow_policy`` would have done.
    """

    timestamp: float
    input_length: Count
    output_length: Count = 0
    hash_ids: list[int] = field(default_factory=list)
    id: str = ""
    tenant: str = ""
    model: str = ""
    adapter: str = ""
    session: str = ""
    parent: str = ""
    choices: int = 1
    predicted_tokens: Count = 0
    cached_tokens: Count = 0
    ttft_ms: float = 0.0
    duration_ms: float = 0.0
    status: int = 200
    end: str = ""
    replica: str = ""
    retries: Count = 0
    shadow: ShadowChoice | None = None


class ShadowChoice(Struct, omit_defaults=True, frozen=True):
    """What another policy would have chosen. ``same``: the replica that was chosen."""

    policy: str
    same: bool
    predicted_tokens: Count = 0
    estimated_ttft_ms: float = 0.0


class ReplicaChange(Struct, omit_defaults=True, kw_only=True):
    """The replicas of a model that take requests from ``timestamp`` (ms since ``started_s``) on.

    ``pool_tokens``, ``prefill_tokens_per_s``: of one, as in ``RecordedModel``, and as known then.
    """

    timestamp: float
    replicas: list[str]
    model: str = ""
    prefill_tokens_per_s: float = 0.0
    pool_tokens: Count = 0
