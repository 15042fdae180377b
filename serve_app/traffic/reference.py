"""The form of a file of recorded traffic as Markdown, for `make docs`: each line's fields, and an example."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import msgspec
from msgspec import Struct
from msgspec.inspect import (
    BoolType,
    DictType,
    FloatType,
    IntType,
    ListType,
    NoneType,
    StrType,
    StructType,
    Type,
    UnionType,
    type_info,
)  # fmt: skip

from serve_app.traffic.record import VERSION, Header, RecordedModel, ReplicaChange, ShadowChoice, TrafficRequest

_INTRODUCTION = f"""\
# Recorded traffic

Made from `serve_app/traffic/record.py` by `make docs`. Version {VERSION}.

A file that `traffic_log` ([settings](settings.md)) writes is JSON lines: a header, then a line for each request when it
ends, so in no strict order of time, and a line whenever a model's replicas change. Defaults are left out. Readers
ignore fields that they do not know, and refuse a later version. Mooncake's traces have the same names (`timestamp`,
`input_length`, `output_length`, `hash_ids`): their lines are read without a header, in blocks of 512 tokens.
`warmpath traffic import` makes this form from others.

No line has text, keys or names of tenants. Ids and pseudonyms are made with a key that is kept nowhere.

```json
"""

_STRUCTS: dict[type[Struct], tuple[str, dict[str, str]]] = {
    Header: (
        "Header",
        {
            "warmpath_traffic": "The version of the form.",
            "recording": "Files with the same one share ids and pseudonyms; those of others share none.",
            "started_s": "The Unix time that timestamps count from.",
            "block_tokens": "Tokens of one id.",
            "writer": "Tells the ingresses of one recording apart.",
            "source": "Where the file comes from, if it was imported.",
            "models": "Facts about each model, by its name.",
        },
    ),
    RecordedModel: (
        "A model in the header",
        {
            "engine": "What computes its answers.",
            "policy": "The routing policy.",
            "replicas": "Their number when the file began.",
            "pool_tokens": "Of one replica's KV pool.",
            "prefill_tokens_per_s": "Of one replica.",
            "decode_step_s": "A step with one sequence.",
            "decode_each_s": "What each further sequence adds to a step.",
            "max_num_seqs": "The most sequences of a step.",
            "pull_tokens_per_s": "Of KV copied from another replica; 0: none is.",
            "settings": "What `replay` simulates with, by names of settings.",
        },
    ),
    TrafficRequest: (
        "A request",
        {
            "timestamp": "Its arrival, in ms since `started_s`.",
            "input_length": "Tokens of the prompt.",
            "output_length": "Tokens of all its answers.",
            "hash_ids": "An id for each block of the prompt; a last one may stand for a partial block. Equal ids mean "
            "equal beginnings up to there. None: unknown.",
            "id": "The request's own pseudonym.",
            "tenant": "The tenant's pseudonym.",
            "model": "The model's name.",
            "adapter": "The adapter's pseudonym.",
            "session": "The conversation's pseudonym.",
            "parent": "The `id` of the earlier request whose prompt this one continues.",
            "choices": "The number of answers.",
            "predicted_tokens": "Of the prompt, those that the router expected in the replica's cache.",
            "cached_tokens": "Of the prompt, those that the replica found in its cache.",
            "ttft_ms": "From arrival to the first token; 0: there was none.",
            "duration_ms": "From arrival to the end of the answer.",
            "status": "Of HTTP.",
            "end": "Why the answer ended, or the reason of a refusal.",
            "replica": "The pseudonym of the replica that answered.",
            "retries": "Further replicas that were asked.",
            "shadow": "What `shadow_policy` would have done.",
        },
    ),
    ShadowChoice: (
        "The choice of a shadow policy",
        {
            "policy": "Its name.",
            "same": "Whether it chose the same replica.",
            "predicted_tokens": "Of the prompt, those that it expected in its replica's cache.",
            "estimated_ttft_ms": "Its estimate of the time to first token.",
        },
    ),
    ReplicaChange: (
        "A change of replicas",
        {
            "timestamp": "In ms since `started_s`.",
            "replicas": "The pseudonyms of all replicas that take requests from then on.",
            "model": "The model's name.",
            "prefill_tokens_per_s": "Of one replica, as known then.",
            "pool_tokens": "Of one replica, as known then.",
        },
    ),
}

EXAMPLE = (
    Header(VERSION, "5f0c9a1e", 1780000000.0, 16, models={"qwen": RecordedModel("vllm", "estimated_ttft", 2)}),
    ReplicaChange(timestamp=0.0, replicas=["r7c1", "r02e"], model="qwen"),
    TrafficRequest(
        timestamp=1250.5,
        input_length=37,
        output_length=12,
        hash_ids=[5120771283, 8803112745],
        id="q81f",
        tenant="t3aa",
        model="qwen",
        predicted_tokens=16,
        cached_tokens=16,
        ttft_ms=41.2,
        duration_ms=310.7,
        end="stop",
        replica="r7c1",
    ),
)


def traffic_page() -> str:
    """Return the page. Raises KeyError for a field without a meaning."""
    encoder = msgspec.json.Encoder()
    lines = [_INTRODUCTION + "\n".join(encoder.encode(each).decode() for each in EXAMPLE), "```", ""]
    for struct, (title, meanings) in _STRUCTS.items():
        lines += [f"## {title}", "", "| field | type | default | meaning |", "|---|---|---|---|"]
        lines += [*_rows(struct, meanings), ""]
    return "\n".join(lines)


def _rows(struct: type[Struct], meanings: dict[str, str]) -> Iterator[str]:
    told = type_info(struct)
    assert isinstance(told, StructType)
    for field in told.fields:
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        shown = "required" if field.required else f"`{msgspec.json.encode(default).decode()}`"
        yield f"| `{field.name}` | {_kind(field.type)} | {shown} | {meanings[field.name]} |"


def _kind(told: Type) -> str:
    match told:
        case ListType(item_type=item):
            return f"list of {_kind(item)}"
        case DictType() | StructType():
            return "object"
        case UnionType(types=types):
            return " or ".join(map(_kind, types))
        case IntType():
            return "whole number"
        case FloatType():
            return "number"
        case BoolType():
            return "true or false"
        case NoneType():
            return "null"
        case StrType():
            return "text"
    return "anything"


if __name__ == "__main__":
    sys.stdout.write(traffic_page())
