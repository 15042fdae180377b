"""The fields of OpenAI's and vLLM's bodies that say which tokens may be chosen, and what an answer must look like.

Owns their bounds. What an answer must look like is a ``Grammar`` from here on; whether it is valid is found later.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PlainValidator

from serve_app.api.json_body import Flag, JsonBody, Must, Refused, Whole, refused
from serve_app.errors import InvalidRequest
from serve_app.structured.grammar import Grammar

MAX_TOKENS = 2**31 - 1
MAX_LOGPROBS = 20
MAX_BIASES = 1024
"""Source: vLLM's ``MAX_NUM_LOGIT_BIAS_TOKENS``."""
MAX_STOP_TOKENS = 128
"""Source: vLLM's ``MAX_NUM_STOP_TOKEN_IDS``."""
MAX_BAD_WORDS = 128
"""Source: vLLM's ``MAX_NUM_BAD_WORDS``."""
MAX_BAD_WORD_CHARS = 256

REFUSED: Refused = {
    "prompt_logprobs": (),
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


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise ValueError
    for token, bias in value.items():
        if not (token.isascii() and token.isdigit() and len(token) <= 10) or isinstance(bias, bool):
            raise ValueError
        if not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ValueError
    return tuple(sorted({int(token): float(bias) for token, bias in value.items()}.items()))


def _token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_STOP_TOKENS:
        raise ValueError
    if not all(type(token) is int and 0 <= token <= MAX_TOKENS for token in value):
        raise ValueError
    return tuple(dict.fromkeys(value))


def _words(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MAX_BAD_WORDS:
        raise ValueError
    if not all(isinstance(word, str) and word.strip() and len(word) <= MAX_BAD_WORD_CHARS for word in value):
        raise ValueError
    return tuple(dict.fromkeys(value))


_Penalty = Annotated[float, Field(ge=-2, le=2), Must("a number from -2 to 2")]


class SamplingBody(JsonBody):
    """What chat completions and completions say of the choice of tokens beyond temperature, top-p and top-k."""

    presence_penalty: _Penalty = Field(0.0, description="taken from logits of tokens that the answer has")
    frequency_penalty: _Penalty = Field(0.0, description="the same, times how often the answer has them")
    repetition_penalty: Annotated[
        float, Field(ge=0.01, le=100), Must("a number from 0.01 to 100")
    ] = Field(1.0, description="divides logits of tokens that prompt or answer have; 1: off")  # fmt: skip
    logit_bias: Annotated[
        tuple[tuple[int, float], ...],
        PlainValidator(_biases, json_schema_input_type=dict[str, float]),
        Must(f"an object with at most {MAX_BIASES} token ids as names and numbers from -100 to 100"),
    ] = Field((), description="added to logits, by token id")
    min_p: Annotated[
        float, Field(ge=0, le=1), Must("a number from 0 to 1")
    ] = Field(0.0, description="no tokens less likely than this part of the likeliest; 0: off")  # fmt: skip
    min_tokens: Annotated[
        int, Field(ge=0, le=MAX_TOKENS), Whole, Must(f"a whole number from 0 to {MAX_TOKENS}")
    ] = Field(0, description="before the answer has as many it does not end, but at max_tokens")  # fmt: skip
    stop_token_ids: Annotated[
        tuple[int, ...],
        PlainValidator(_token_ids, json_schema_input_type=list[int]),
        Must(f"a list of at most {MAX_STOP_TOKENS} token ids"),
    ] = Field((), description="tokens that end the answer and are no part of it")
    bad_words: Annotated[
        tuple[str, ...],
        PlainValidator(_words, json_schema_input_type=list[str]),
        Must(f"a list of at most {MAX_BAD_WORDS} strings, each of 1 to {MAX_BAD_WORD_CHARS} characters"),
    ] = Field((), description="words whose tokens never stand in the answer")
    include_stop_str_in_output: Flag = Field(False, description="what ended the answer is its last part")
    response_format: Annotated[
        dict[str, Any] | None, Must(f"an object whose type is {_FORMATS}")
    ] = Field(None, description="text, any JSON object, or JSON by a schema")  # fmt: skip
    structured_outputs: Annotated[
        dict[str, Any] | None, Must(f"an object with one of {', '.join(_KINDS)}")
    ] = Field(None, description="vLLM's: what the answer must match")  # fmt: skip

    @property
    def grammar(self) -> Grammar | None:
        """What the answer must match; None: anything. Raises InvalidRequest."""
        asked = _of_response_format(self.response_format)
        other = _of_structured_outputs(self.structured_outputs)
        if asked is not None and other is not None:
            raise InvalidRequest("structured_outputs does not go with response_format.", param="structured_outputs")
        return asked or other


def _of_response_format(asked: dict[str, Any] | None) -> Grammar | None:
    match (asked or {"type": "text"}).get("type"):
        case "text":
            return None
        case "json_object":
            return Grammar.json_object("response_format")
        case "json_schema":
            assert asked is not None
            field = "response_format.json_schema"
            named = asked.get("json_schema")
            schema = named.get("schema") if isinstance(named, dict) else None
            if not isinstance(schema, dict):
                raise InvalidRequest(f"{field} must be an object whose schema is an object.", param=field)
            return Grammar.json_schema(schema, f"{field}.schema")
    raise InvalidRequest(f"response_format.type must be {_FORMATS}.", param="response_format.type")


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
