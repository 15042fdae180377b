"""The fields of OpenAI's and vLLM's bodies for sampling and for the form of an answer."""

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from serve_app.api.json_body import JsonBody, Must, Once, Refused, Whole, refused
from serve_app.errors import InvalidRequest
from serve_app.structured.grammar import Grammar

MAX_TOKENS = 2**31 - 1
MAX_LOGPROBS = 20
MAX_LOGPROB_TOKENS = 128
"""Source: vLLM's ``MAX_LOGPROB_TOKEN_IDS``."""
MAX_BIASES = 1024
MAX_ALLOWED_TOKENS = 1024
"""Source: vLLM's ``MAX_NUM_LOGIT_BIAS_TOKENS``."""
MAX_STOP_TOKENS = 128
"""Source: vLLM's ``MAX_NUM_STOP_TOKEN_IDS``."""
MAX_BAD_WORDS = 128
"""Source: vLLM's ``MAX_NUM_BAD_WORDS``."""
MAX_BAD_WORD_CHARS = 256

REFUSED: Refused = {
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}
INSTEAD = {f"guided_{kind}": f"structured_outputs.{kind}" for kind in ("json", "regex", "choice", "grammar")}

_FORMATS = "text, json_object or json_schema"
_KINDS = ("json", "regex", "choice", "grammar", "json_object")

_Penalty = Annotated[float, Field(ge=-2, le=2)]


_ID = r"^[0-9]{1,10}$"
_BIASES = f"an object with at most {MAX_BIASES} token ids as names and numbers from -100 to 100"


def _biases(value: Any) -> Any:
    """Name the first entry that is wrong."""
    for name, bias in value.items() if isinstance(value, dict) else ():
        shown = {"name": repr(name[:32]), "bias": repr(bias)[:32]}
        if re.fullmatch(_ID, name, re.ASCII) is None:
            raise PydanticCustomError("must_be", f"{_BIASES}; {{name}} is not a token id", shown)
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise PydanticCustomError("must_be", f"{_BIASES}, and that of {{name}} is {{bias}}", shown)
    return value


class SamplingBody(JsonBody):
    """The sampling fields of chat completions and completions, except temperature, top-p and top-k."""

    presence_penalty: _Penalty = Field(0.0, description="subtracted from logits of tokens that the answer holds")
    frequency_penalty: _Penalty = Field(0.0, description="subtracted from a token's logit for each time it was used")
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = Field(
        1.0, description="divides logits of tokens that the prompt or the answer holds; 1: off"
    )
    logit_bias: Annotated[
        dict[Annotated[str, Field(pattern=_ID)], Annotated[float, Field(ge=-100, le=100)]],
        Field(max_length=MAX_BIASES),
        BeforeValidator(_biases),
        Must(_BIASES),
    ] = Field({}, description="added to logits, by token id")
    min_p: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="least probability of a token, as a fraction of the likeliest token's; 0: off"
    )
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS), Whole] = Field(
        0, description="the answer does not end before this many tokens, except at max_tokens"
    )
    stop_token_ids: Annotated[
        tuple[Annotated[int, Field(ge=0, le=MAX_TOKENS)], ...],
        Field(max_length=MAX_STOP_TOKENS, strict=False),
        Once,
        Must(f"a list of at most {MAX_STOP_TOKENS} token ids"),
    ] = Field((), description="tokens that end the answer and are not part of it")
    logprob_token_ids: Annotated[
        tuple[Annotated[int, Field(ge=0, le=MAX_TOKENS)], ...],
        Field(max_length=MAX_LOGPROB_TOKENS, strict=False),
        Once,
        Must(f"a list of at most {MAX_LOGPROB_TOKENS} token ids"),
    ] = Field((), description="with logprobs: report these tokens at each place of the answer, not the likeliest")
    bad_words: Annotated[
        tuple[Annotated[str, Field(pattern=r"[^\s\x1c-\x1f]", max_length=MAX_BAD_WORD_CHARS)], ...],
        Field(max_length=MAX_BAD_WORDS, strict=False),
        Once,
        Must(f"a list of at most {MAX_BAD_WORDS} strings, each of 1 to {MAX_BAD_WORD_CHARS} characters"),
    ] = Field((), description="words that the answer never contains")
    allowed_token_ids: Annotated[
        tuple[Annotated[int, Field(ge=0, le=MAX_TOKENS)], ...],
        Field(max_length=MAX_ALLOWED_TOKENS, strict=False),
        Once,
        Must(f"a list of at most {MAX_ALLOWED_TOKENS} token ids"),
    ] = Field((), description="the only tokens of the answer; empty: all")
    include_stop_str_in_output: bool = Field(False, description="true: the stop string is the answer's last part")
    response_format: Annotated[
        dict[str, Any] | None, Must(f"an object with the type {_FORMATS}")
    ] = Field(None, description="text, any JSON object, or JSON by a schema")  # fmt: skip
    structured_outputs: Annotated[
        dict[str, Any] | None, Must(f"an object with one of {', '.join(_KINDS)}")
    ] = Field(None, description="vLLM's field for the grammar of the answer")  # fmt: skip

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of the answer; None: any text. Raises InvalidRequest."""
        asked = of_format(self.response_format, "response_format", "json_schema")
        other = _of_structured_outputs(self.structured_outputs)
        if asked is not None and other is not None:
            raise InvalidRequest("structured_outputs does not go with response_format.", param="structured_outputs")
        return asked or other


def of_format(asked: Mapping[str, Any] | None, field: str, inner: str = "") -> Grammar | None:
    """Return the grammar of a format (text, any JSON, or JSON by a schema), None for text.

    ``inner``: its field that holds the schema, "" if the format itself does. Raises InvalidRequest.
    """
    match (asked or {"type": "text"}).get("type"):
        case "text":
            return None
        case "json_object":
            return Grammar.json_object(field)
        case "json_schema":
            assert asked is not None
            named = asked.get(inner) if inner else asked
            schema = named.get("schema") if isinstance(named, dict) else None
            path = f"{field}.{inner}" if inner else f"{field}.schema"
            if not isinstance(schema, dict):
                detail = " with a schema, an object" if inner else ""
                raise InvalidRequest(f"{path} must be an object{detail}.", param=path)
            strict = isinstance(named, dict) and named.get("strict") is True
            return Grammar.json_schema(schema, f"{path}.schema" if inner else path, strict=strict)
    raise InvalidRequest(f"{field}.type must be {_FORMATS}.", param=f"{field}.type")


def _of_structured_outputs(asked: dict[str, Any] | None) -> Grammar | None:
    given = {name: value for name, value in (asked or {}).items() if value not in (None, False)}
    if not given:
        return None
    for name in given:
        if name not in _KINDS:
            raise refused(f"structured_outputs.{name}")
    if len(given) > 1:
        raise InvalidRequest(f"structured_outputs must have one of {', '.join(_KINDS)}.", param="structured_outputs")
    ((kind, value),) = given.items()
    field = f"structured_outputs.{kind}"
    match kind, value:
        case "json", dict():
            return Grammar.json_schema(value, field)
        case "json", str():
            return Grammar.json_text(value, field)
        case "json_object", True:
            return Grammar.json_object(field)
        case "regex", str():
            return Grammar.regex(value, field)
        case "choice", list():
            return Grammar.choice(value, field)
        case "grammar", str():
            return Grammar.context_free(value, field)
    wanted = {"json": "a schema, as an object or as text", "choice": "a list of strings", "json_object": "true"}
    raise InvalidRequest(f"{field} must be {wanted.get(kind, 'a string')}.", param=field)
