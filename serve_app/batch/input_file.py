"""TensorRT Edge-LLM's batch file -> chat requests.

Owns its fields and their defaults; what is inside a message, and the bounds of values, is what the chat API says.
Source: Edge-LLM's INPUT_FORMAT.md and its examples' llm_inference.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from pydantic import Field

from serve_app.api.json_body import Flag, JsonBody, Must, Whole
from serve_app.api.openai.request import ChatBody
from serve_app.api.request import ChatRequest
from serve_app.errors import InvalidRequest

DEFAULT_MAX_GENERATE_LENGTH = 256
MAX_BATCH_SIZE = 4096

_REQUEST_FIELDS = frozenset({"messages", "lora_name", "save_system_prompt_kv_cache", "disable_spec_decode", "stop"})
_OUR_NAME = re.compile(r"\bmax_tokens\b")


class _File(JsonBody):
    """The outermost object. Its sampling values are checked with each request, as the chat API checks them."""

    requests: Annotated[list[Any], Field(min_length=1), Must("a list of at least one request")]
    batch_size: Annotated[
        int, Field(ge=1, le=MAX_BATCH_SIZE), Whole, Must(f"a whole number from 1 to {MAX_BATCH_SIZE}")
    ] = 1
    temperature: Any = 1.0
    top_p: Any = 0.8
    top_k: Any = 50
    max_generate_length: Any = None
    apply_chat_template: Flag = True
    add_generation_prompt: Flag = True
    enable_thinking: Flag = False
    available_lora_weights: Annotated[
        dict[str, Annotated[str, Field(min_length=1)]], Must("an object of adapters' names and paths")
    ] = Field({})


@dataclass(frozen=True, slots=True)
class BatchFile:
    """What a file asks for. ``adapters``: paths by name, relative ones from where the file lies.

    ``unread``: names of fields that nothing reads, for a warning.
    """

    batch_size: int
    adapters: Mapping[str, Path]
    requests: tuple[Any, ...]
    unread: tuple[str, ...]
    _file: _File

    def request(self, index: int, model: str) -> ChatRequest:
        """Return one request, checked. Raises InvalidRequest, whose ``param`` is the field in the file.

        Its seed is its index, so that a file gives the same answers again.
        """
        fields = self.requests[index]
        if not isinstance(fields, dict):
            raise InvalidRequest("A request must be an object with messages.")
        file = self._file
        body = {name: value for name, value in fields.items() if name in _REQUEST_FIELDS and value is not None}
        if body.get("lora_name") == "":
            del body["lora_name"]
        sampling = {
            "temperature": file.temperature,
            "top_p": file.top_p,
            "top_k": file.top_k,
            "max_tokens": file.max_generate_length,
        }
        try:
            return ChatBody.checked(
                {
                    "model": model,
                    "seed": index,
                    "apply_chat_template": file.apply_chat_template,
                    "add_generation_prompt": file.add_generation_prompt,
                    "chat_template_kwargs": {"enable_thinking": file.enable_thinking},
                    **{name: value for name, value in sampling.items() if value is not None},
                    **body,
                }
            ).request()
        except InvalidRequest as error:
            raise in_the_files_words(error) from error


def in_the_files_words(error: InvalidRequest) -> InvalidRequest:
    """Return an error of the chat API with the batch file's name of the field."""
    param = None if error.param is None else _OUR_NAME.sub("max_generate_length", error.param)
    return InvalidRequest(_OUR_NAME.sub("max_generate_length", error.message), param=param)


def read_batch_file(path: Path) -> BatchFile:
    """Read a file. Raises InvalidRequest where its outermost object is wrong, OSError where it cannot be read."""
    try:
        fields = msgspec.json.decode(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"It is not valid JSON in UTF-8 ({str(error)[:120]}).") from error
    if not isinstance(fields, dict):
        raise InvalidRequest('It must be a JSON object with "requests".')
    file = _File.checked({name: value for name, value in fields.items() if value is not None})
    folder = path.absolute().parent
    adapters = {name: folder / Path(at).expanduser() for name, at in file.available_lora_weights.items()}
    objects = [request for request in file.requests if isinstance(request, dict)]
    inner = dict.fromkeys(f"requests[].{name}" for one in objects for name in one if name not in _REQUEST_FIELDS)
    return BatchFile(
        batch_size=file.batch_size,
        adapters=adapters,
        requests=tuple(file.requests),
        unread=(*(file.model_extra or ()), *inner),
        _file=file,
    )
