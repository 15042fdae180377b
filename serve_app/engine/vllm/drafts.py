"""vLLM's ``speculative_config``: what is refused, by its fields and the drafter's config.json, and what is added.

Pure, and without vllm.
"""

from collections.abc import Mapping
from typing import Any

from serve_app.config.engine import WITHOUT_KV
from serve_app.engine.vllm.settings import WHOLE_HITS

_INTERNAL = "target_model_config target_parallel_config draft_model_config draft_parallel_config"


def refused_drafts(drafting: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each field that would break a promise. ``drafting``: see ``AppConfig.drafting``."""
    method, model = drafting.get("method"), drafting.get("model")
    parts = model.split(".") if method is None and isinstance(model, str) else []
    custom = len(parts) > 1 and all(map(str.isidentifier, parts))
    reasons = {
        "method": "a class of yours would see the tokens of all tenants; name one of vLLM's methods"
        if method == "custom_class" or custom
        else "it drafts nothing, and writes what the model computes into files; leave it out"
        if method == "extract_hidden_states"
        else "",
        "suffix_decoding_max_cached_requests": "drafts would come from other tenants' answers; leave it out, and they "
        "come from the request's own text"
        if drafting.get("suffix_decoding_max_cached_requests")
        else "",
        "rejection_sample_method": "answers would hold tokens that the model did not choose; leave it out"
        if drafting.get("rejection_sample_method") == "synthetic"
        else "",
        WHOLE_HITS: "every hit would lose its last block; leave it out" if drafting.get(WHOLE_HITS) is False else "",
        **{name: "vLLM derives it; leave it out" for name in _INTERNAL.split() if name in drafting},
    }
    return [f"speculative_config.{name}: {why}" for name, why in reasons.items() if why]


def refused_drafter(drafting: Mapping[str, Any], model: Mapping[str, Any], drafter: Mapping[str, Any]) -> list[str]:
    """Return the reasons why a drafter cannot draft for a model; both by their config.json."""
    text, own = model.get("text_config") or model, decoder_fields(drafter)
    where, method = "speculative_config.model: the drafter", drafting.get("method")
    theirs, ours = own.get("vocab_size"), text.get("vocab_size")
    if method not in WITHOUT_KV and not drafting.get("use_heterogeneous_vocab") and (theirs or ours) != ours:
        return [
            f"{where} has a vocabulary of {theirs} tokens and the model one of {ours}; use a drafter for this model"
        ]
    read = drafter.get("target_hidden_size") or own.get("hidden_size")
    if method in ("eagle", "eagle3") and read and read != text.get("hidden_size"):
        hidden = text.get("hidden_size")
        return [f"{where} reads states of {read} numbers and the model's have {hidden}; use one made for this model"]
    return []


def decoder_fields(drafter: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a drafter's decoder, which some formats nest."""
    fields: Mapping[str, Any] = drafter.get("transformer_layer_config") or drafter.get("text_config") or drafter
    return fields


def draft_layers(drafting: Mapping[str, Any], model: Mapping[str, Any], drafter: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config fields that size a drafter's KV; without layers if it has none.

    ``drafter``: empty if the model's own last layers draft.
    """
    if not drafting or drafting.get("method") in WITHOUT_KV:
        return {}
    if drafter:
        return dict(decoder_fields(drafter))
    text = model.get("text_config") or model
    layers = next((text[name] for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers") if text.get(name)), 1)
    return {**text, "num_hidden_layers": layers, "layer_types": None, "layers_block_type": None}


def with_whole_hits(drafting: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields for vLLM, with drafts from no other request, and hits up to their last block.

    vLLM drops a hit's last block for a drafter that reads the next token: the drafter's KV of the block's last position
    is of the token that followed then. Another token makes a draft a little worse, and no answer. Public blocks end
    before that position (``draft_lookahead_tokens``).
    """
    more: dict[str, Any] = {}
    if drafting.get("method") == "suffix":
        more["suffix_decoding_max_cached_requests"] = 0
    elif drafting.get("method") not in ("ngram", "ngram_gpu"):
        more[WHOLE_HITS] = True
    return {**drafting, **more} if drafting else {}
