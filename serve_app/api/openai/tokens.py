"""vLLM's bodies of ``POST /tokenize`` and ``/detokenize``, and OpenAI's of ``/v1/responses/input_tokens``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field

from serve_app.api.json_body import JsonBody, ModelName, Must
from serve_app.api.openai.messages import ignored_in
from serve_app.api.openai.request import MAX_TOKENS, ChatBody, reference_refused
from serve_app.api.openai.responses.request import ResponsesBody
from serve_app.api.request import CompletionRequest, GenerateRequest

MAX_IDS = 1 << 20
"""Token ids in one request for their text."""

_Strings = Annotated[bool | None, Field(description="return each token's entry in the vocabulary, too")]


class TokenizeChatBody(ChatBody):
    """The body of ``POST /tokenize`` for a chat: all of a chat's fields that form the prompt."""

    return_token_strs: _Strings = False


class TokenizeBody(JsonBody):
    """The body of ``POST /tokenize`` for a text."""

    model: ModelName
    prompt: Annotated[str, Must("a string")]
    add_special_tokens: bool = Field(True, description="begin with the tokenizer's special tokens")
    return_token_strs: _Strings = False


class DetokenizeBody(JsonBody):
    """The body of ``POST /detokenize``."""

    bounded: ClassVar[Mapping[str, int]] = {"tokens": MAX_IDS}

    model: ModelName
    tokens: Annotated[
        list[Annotated[int, Field(ge=0, le=MAX_TOKENS)]], Field(max_length=MAX_IDS), Must("a list of token ids")
    ]


class InputTokensBody(ResponsesBody):
    """The body of ``POST /v1/responses/input_tokens``: all fields of a response that form the prompt."""

    without_effect: ClassVar[frozenset[str]] = ResponsesBody.without_effect | {"personality"}

    input: Annotated[str | list[Any], Must("a string or a list of items")] = Field([])


@dataclass(frozen=True, slots=True)
class Tokenize:
    """What to tokenize, and whether to name the tokens."""

    request: GenerateRequest
    names: bool


def parse_tokenize(body: bytes, model: str) -> Tokenize:
    """Parse the body of ``POST /tokenize``; ``model``: that of a body without one. Raises InvalidRequest."""
    fields = TokenizeBody.read(body, model)
    if "prompt" not in fields:
        fields = TokenizeChatBody.read(body, model)
        chat = TokenizeChatBody.checked(fields)
        if chat.prompt_ref is not None:
            raise reference_refused("A list of tokens", "prompt_ref")
        return Tokenize(chat.request(ignored_in(fields["messages"])), chat.return_token_strs is True)
    text = TokenizeBody.checked(fields)
    request = CompletionRequest(
        model=text.model,
        prompts=(text.prompt,),
        add_special_tokens=text.add_special_tokens,
        unknown=text.unknown(),
    )
    return Tokenize(request, text.return_token_strs is True)


def parse_detokenize(body: bytes, model: str) -> DetokenizeBody:
    """Parse the body of ``POST /detokenize``; ``model``: that of a body without one. Raises InvalidRequest."""
    return DetokenizeBody.checked(DetokenizeBody.read(body, model))


def parse_input_tokens(body: bytes, model: str) -> InputTokensBody:
    """Parse the body of ``POST /v1/responses/input_tokens``; ``model``: that of a body without one.

    Raises InvalidRequest.
    """
    return InputTokensBody.checked(InputTokensBody.read(body, model))


def tokens_body(ids: Sequence[int], max_model_len: int, names: Sequence[str] | None) -> dict[str, Any]:
    """Return the answer to ``POST /tokenize``."""
    return {"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": names}
