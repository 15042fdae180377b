"""The forms of recorded requests that are imported and written; commands name them before they load anything."""

from enum import StrEnum


class SourceForm(StrEnum):
    """What a file of requests may be."""

    auto = "auto"
    openai = "openai"
    anthropic = "anthropic"
    batch = "batch"
    mooncake = "mooncake"
    weka = "weka"
    aiperf = "aiperf"
    vllm = "vllm"


class TargetForm(StrEnum):
    """Forms that can be written."""

    mooncake = "mooncake"
    aiperf = "aiperf"
