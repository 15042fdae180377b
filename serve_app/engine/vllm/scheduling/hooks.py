"""The capabilities that rest on vLLM's internals, none of which is public, and a check of each: by what vLLM does.

A capability whose check fails is off, and vLLM goes its own way there. Only isolation by salt is never given up.
"""

import inspect
import logging
from collections.abc import Callable, Collection
from functools import partial
from importlib import import_module
from typing import Any

import vllm

from serve_app.config.engine import CAPABILITIES, Capability
from serve_app.engine.vllm.settings import IN_CORE

_log = logging.getLogger(__name__)

_PROBE = "serve_app.engine.vllm.scheduling.probe"


def isolation() -> None:
    """Raise an error unless the hashes of equal tokens differ, in all blocks, under another salt or adapter."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(2, sha256)
    adapter = LoRARequest(lora_name="adapter", lora_int_id=1, lora_path="adapter")
    same, again, *others = (
        Request("r", [1] * 6, SamplingParams(), None, cache_salt=salt, lora_request=lora, block_hasher=hasher)
        for salt, lora in (("a", None), ("a", None), ("b", None), ("a", adapter))
    )
    different = {block for request in (same, *others) for block in request.block_hashes}
    if same.block_hashes != again.block_hashes or len(different) != 9:
        raise RuntimeError("equal tokens have equal hashes under another salt or adapter")


def connector() -> None:
    """Raise an error unless ours has what vLLM asks of connectors, and takes what vLLM's takes."""
    from serve_app.engine.vllm.transfer.connector import WarmpathConnector as Ours

    if inspect.isabstract(Ours):
        raise TypeError(f"its connectors need {', '.join(sorted(Ours.__abstractmethods__))}")
    for name, method in vars(Ours).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            theirs = next((vars(base)[name] for base in Ours.__mro__[1:] if name in vars(base)), None)
            if (
                theirs is None
                or inspect.signature(theirs).parameters.keys() != inspect.signature(method).parameters.keys()
            ):
                raise TypeError(f"its connectors have another {name}")


def _saves() -> None:
    connector()
    _probed("pins")


def _copies() -> None:
    connector()
    _probed("moved")
    if "rank" not in inspect.signature(import_module("vllm.config").ParallelConfig).parameters:
        raise TypeError("its workers have no rank")


def _tiers() -> None:
    _copies()
    _probed("predictions")


def exact_resume() -> None:
    """Raise an error unless vLLM's samplers take what ours take."""
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler

    for function, parameters in (
        (Sampler.sample, "self logits sampling_metadata logprobs_mode_override"),
        (Sampler.gather_logprobs, "logprobs num_logprobs token_ids"),
        (Sampler.gather_specific_token_logprobs, "self logprobs logprob_token_ids sampled"),
        (RejectionSampler.forward, "self metadata draft_probs logits sampling_metadata"),
        (RejectionSampler.__init__, "self sampler spec_config device"),
    ):
        if list(inspect.signature(function).parameters) != parameters.split():
            raise TypeError(f"{function.__qualname__} has other parameters")


def _resume() -> None:
    fields = import_module("vllm.v1.worker.gpu_input_batch").CachedRequestState.__dataclass_fields__
    if missing := {"prompt_token_ids", "output_token_ids", "generator", "sampling_params"} - fields.keys():
        raise TypeError(f"its runner's requests have no {', '.join(sorted(missing))}")
    _probed("resume")


def _probed(name: str) -> None:
    getattr(import_module(_PROBE), name)()


CHECKS: dict[Capability, Callable[[], None]] = {
    **{name: partial(_probed, name) for name in sorted(IN_CORE)},
    "host_memory": partial(_probed, "host_memory"),
    "saves": _saves,
    "copies": _copies,
    "tiers": _tiers,
    "exact_resume": exact_resume,
    "resume": _resume,
    "grammars": partial(_probed, "grammars"),
    "draft_hits": partial(_probed, "draft_hits"),
}
"""Each raises an error, with what is different, if this vLLM does not do what the capability needs."""


def switched_off() -> dict[Capability, str]:
    """Return the capabilities whose checks fail, with what is different."""
    quiet = logging.root.manager.disable
    logging.disable(logging.WARNING)  # vLLM's advice on the small pools that are tried
    try:
        return {name: said for name, check in CHECKS.items() if (said := failure(check))}
    finally:
        logging.disable(quiet)


def start(required: Collection[Capability]) -> dict[Capability, str]:
    """Return ``switched_off``, and log it once. Raises ValueError without isolation or a ``required`` capability."""
    off = switched_off()
    if said := failure(isolation):
        raise ValueError(f"vLLM {vllm.__version__} does not keep tenants' caches apart: {said}")
    if missing := [_sentence(name, off[name]) for name in off if name in required]:
        raise ValueError(f"required_capabilities: vLLM {vllm.__version__} has no {'; no '.join(missing)}")
    if off:
        sentences = "; ".join(_sentence(name, why) for name, why in off.items())
        _log.warning("with vLLM %s these capabilities are off: %s", vllm.__version__, sentences)
    return off


def found() -> dict[str, Any]:
    """Return what `warmpath doctor` says of this vLLM: its ``version``, what is ``off``, and what is ``wrong``."""
    off = switched_off()
    sentences = [_sentence(name, why) for name, why in off.items()]
    return {
        "version": vllm.__version__,
        "off": sentences,
        "wrong": failure(isolation),
        "on": sorted(CHECKS.keys() - off),
    }


def _sentence(name: Capability, why: str) -> str:
    return f"{name}: {CAPABILITIES[name].without} ({why})"


def failure(check: Callable[[], None]) -> str:
    """Return what a check says if it fails, else ""."""
    try:
        check()
    except Exception as error:
        return str(error) or type(error).__name__
    return ""
