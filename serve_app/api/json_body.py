"""Parse a JSON body into a pydantic model, or raise a 400 that names the field and the value it needs.

A null field counts as absent, except for ``nullable`` fields. Unknown fields have no effect; ``unknown`` lists them.

``kinds`` of parts, blocks, items, tools and tool choices are read, shown as text, or refused. One that is in no list,
because it is newer, is shown as text too, and named in a warning.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Annotated, Any, ClassVar, NamedTuple, Self, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from typing_extensions import is_typeddict

from serve_app.api.request import MAX_TOLD, UnknownField, unknown_fields
from serve_app.errors import InvalidRequest


class Kinds(NamedTuple):
    """The types of one place in a body, without dates at their ends. ``dropped``: left out, with a warning."""

    read: tuple[str, ...]
    as_text: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


CHAT_PARTS = Kinds(
    ("text", "refusal", "input_text", "output_text", "thinking"),
    refused=("image_url", "input_audio", "file", "video_url", "audio_url"),
)
CHAT_CALLS = Kinds(("function", "custom"))
CHAT_TOOLS = Kinds(("function",), refused=("custom",))
CHAT_CHOICES = Kinds(("function", "allowed_tools"), refused=("custom",))

RESPONSE_ITEMS = Kinds(
    (
        "message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
        "item_reference",
    ),
    as_text=(
        "web_search_call", "file_search_call", "computer_call", "computer_call_output", "code_interpreter_call",
        "image_generation_call", "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output",
        "apply_patch_call", "apply_patch_call_output", "mcp_list_tools", "mcp_approval_request",
        "mcp_approval_response", "mcp_call", "tool_search_call", "tool_search_output", "additional_tools", "program",
        "program_output",
    ),
    dropped=("compaction",),
    refused=("compaction_trigger", "configuration_update"),
)  # fmt: skip
RESPONSE_PARTS = Kinds(
    ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"),
    refused=("input_image", "input_file", "input_audio", "computer_screenshot"),
)
RESPONSE_TOOLS = Kinds(
    ("function", "namespace"),
    dropped=("web_search", "web_search_preview"),
    refused=(
        "custom", "file_search", "computer", "computer_use_preview", "code_interpreter", "image_generation",
        "local_shell", "shell", "apply_patch", "mcp", "tool_search", "programmatic_tool_calling",
    ),
)  # fmt: skip
RESPONSE_CHOICES = Kinds(
    ("function", "allowed_tools"),
    refused=(
        "custom", "file_search", "web_search_preview", "computer", "computer_use",
        "computer_use_preview", "code_interpreter", "image_generation", "shell", "apply_patch", "mcp",
        "programmatic_tool_calling",
    ),
)  # fmt: skip

MESSAGE_BLOCKS = Kinds(
    ("text", "thinking", "tool_use", "tool_result"),
    as_text=(
        "search_result", "document", "tool_reference", "server_tool_use", "web_search_tool_result",
        "web_fetch_tool_result", "code_execution_tool_result", "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result", "tool_search_tool_result", "advisor_tool_result", "mcp_tool_use",
        "mcp_tool_result", "mcp_tool_listing", "container_upload", "compaction", "browser_state", "tool_addition",
        "tool_removal",
    ),
    dropped=("redacted_thinking", "fallback"),
    refused=("image",),
)  # fmt: skip
DOCUMENT_SOURCES = Kinds(("text", "content"), refused=("base64", "url", "file"))
MESSAGE_TOOLS = Kinds(
    ("custom",),
    refused=(
        "advisor", "bash", "browser_toolset", "code_execution", "computer", "computer_toolset", "mcp_toolset", "memory",
        "text_editor", "tool_search_tool_bm25", "tool_search_tool_regex", "web_fetch", "web_search",
    ),
)  # fmt: skip
MESSAGE_CHOICES = Kinds(("auto", "any", "tool", "none"))

KINDS: dict[str, Kinds] = {
    "chat: parts of messages": CHAT_PARTS,
    "chat: tool calls": CHAT_CALLS,
    "chat: tools": CHAT_TOOLS,
    "chat: tool choices": CHAT_CHOICES,
    "responses: items": RESPONSE_ITEMS,
    "responses: parts of items": RESPONSE_PARTS,
    "responses: tools": RESPONSE_TOOLS,
    "responses: tool choices": RESPONSE_CHOICES,
    "messages: blocks": MESSAGE_BLOCKS,
    "messages: sources of documents": DOCUMENT_SOURCES,
    "messages: tools": MESSAGE_TOOLS,
    "messages: tool choices": MESSAGE_CHOICES,
}
"""All of them, for the reference page."""


MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_ID_CHARS = 1024

_LARGE_BYTES = 64 << 10
_MOST_FIELDS = 1 << 14
"""Of a body itself. Their names are decoded in one call of a library, in which all other threads wait."""
_MOST_VALUES = 1 << 14
"""In a field that is not ``bounded`` otherwise."""
_NULL = msgspec.Raw(b"null")
_skim = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode

Refused = Mapping[str, tuple[Any, ...]]
"""Field -> the values of it that are harmless to ignore."""


@dataclass(frozen=True, slots=True)
class Must:
    """The wording of a field's error: ``NAME must be DEMAND.``; bounds and flags do not need it."""

    demand: str


def refused(path: str, instead: str = "") -> InvalidRequest:
    """Return the error for an unsupported field that would change the answer; ``instead`` names a replacement."""
    remedy = f"use {instead}" if instead else "leave it out"
    return InvalidRequest(f"{path} is not supported by this version; {remedy}.", param=path)


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = BeforeValidator(_whole)
"""Accept 3.0 as a whole number."""
Text64 = Annotated[str | None, Field(min_length=1, max_length=64)]
Text128 = Annotated[str | None, Field(min_length=1, max_length=128)]
Text256 = Annotated[str | None, Field(min_length=1, max_length=256)]
Text1024 = Annotated[str | None, Field(min_length=1, max_length=1024)]

ModelName = Annotated[
    str,
    Field(min_length=1, max_length=256, description="the served model or a LoRA adapter"),
    Must("the name of a model in 1 to 256 characters, see GET /v1/models"),
]
StoreKV = Annotated[
    bool | None, Field(description="false: read the cache, but store nothing in it; default: the tenant's setting")
]
Once = AfterValidator(lambda values: tuple(dict.fromkeys(values)))
"""Drop repeated values from a tuple."""
Stops = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)], ...],
    Field(max_length=MAX_STOPS, strict=False, description="strings that end the answer and are not part of it"),
    Once,
    Must(f"a list of at most {MAX_STOPS} strings, each of 1 to {MAX_STOP_CHARS} characters"),
]
Stop = Annotated[
    Stops,
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value, json_schema_input_type=str | Stops),
    Must(f"a string or at most {MAX_STOPS} strings, each of 1 to {MAX_STOP_CHARS} characters"),
]


class JsonBody(BaseModel):
    """The JSON object of a request's body, or an object inside it.

    ``refused``: unsupported fields of the outermost object that would change the answer.
    ``instead``: the supported replacement of a refused field.
    ``bounded``: the highest number of values, nested ones included, in fields that may hold many; others hold fewer.
    ``nullable``: fields in which null has a meaning; absent fields are not in ``model_fields_set``.
    ``without_effect``: known fields that are accepted and change nothing; the reference page lists them.
    """

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    refused: ClassVar[Refused] = {}
    instead: ClassVar[Mapping[str, str]] = {}
    bounded: ClassVar[Mapping[str, int]] = {}
    nullable: ClassVar[frozenset[str]] = frozenset()
    without_effect: ClassVar[frozenset[str]] = frozenset()

    def unknown(self, inner: Iterable[str] = (), known: Iterable[str] = ()) -> tuple[UnknownField, ...]:
        """Return the first ``MAX_TOLD`` unread fields; ``inner``: unread nested fields, ``known``: supported ones."""
        fields = type(self).model_fields
        harmless = {*self.refused, *self.without_effect}
        ignored = (name for name in self.model_extra or () if name not in harmless)
        return unknown_fields(chain(ignored, inner), chain(fields, known))

    def unread_inside(self, path: str = "") -> list[str]:
        """Return the paths of unread fields of the objects in this one, which is at ``path``."""
        paths: set[str] = set()
        for name in self.model_fields_set:
            value = getattr(self, name)
            if isinstance(value, JsonBody):
                value._add_unread(f"{path}{name}", paths)
            elif isinstance(value, list) and value and isinstance(value[0], JsonBody):
                for each in value:
                    each._add_unread(f"{path}{name}[]", paths)
        return sorted(paths)

    def _add_unread(self, path: str, paths: set[str]) -> None:
        for name, value in (self.model_extra or {}).items():
            if value is not None and name not in self.without_effect:
                paths.add(f"{path}.{name}")
        paths.update(self.unread_inside(f"{path}."))

    @classmethod
    def parse(cls, raw: bytes, model: str = "") -> Self:
        """Parse a body. Raises InvalidRequest unless it is a JSON object with valid fields. ``model``: see ``read``."""
        return cls.checked(cls.read(raw, model))

    @classmethod
    def read(cls, raw: bytes, model: str = "") -> dict[str, Any]:
        """Return a body's fields that are present. Raises InvalidRequest for a non-object or a refused field.

        ``model``: that of a body without one, "" for none.
        """
        try:
            value = cls._decode(raw)
        except (ValueError, RecursionError) as error:  # also: invalid UTF-8, lone surrogates, numbers out of range
            said = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:120]
            raise InvalidRequest(f"The body is not valid JSON in UTF-8 ({said}); send one JSON object.") from error
        if not isinstance(value, dict):
            raise InvalidRequest('The body must be a JSON object, with fields like "model".')
        fields = {name: field for name, field in value.items() if field is not None or name in cls.nullable}
        for name, field in fields.items():
            if name in cls.refused and not any(field == harmless for harmless in cls.refused[name]):
                raise refused(name, cls.instead.get(name, ""))
        return {"model": model, **fields} if model else fields

    @classmethod
    def checked(cls, fields: dict[str, Any]) -> Self:
        """Validate fields and return the body. Raises InvalidRequest for an invalid field."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise _refusal(cls, error.errors(include_url=False, include_input=False)[0]) from None

    @classmethod
    def _decode(cls, raw: bytes) -> Any:
        """Return the decoded body; of a large object, decode only the known fields, after checking their sizes.

        Millions of values in one body would need a gigabyte and block the interpreter for a second.
        """
        if len(raw) <= _LARGE_BYTES or raw[:256].lstrip()[:1] != b"{":
            return msgspec.json.decode(raw)
        if raw.count(b":") > _MOST_FIELDS and _count_fields(raw) > _MOST_FIELDS:
            raise InvalidRequest(f"The body holds over {_MOST_FIELDS} fields; send fewer.")
        fields = _skim(raw)
        read = {*cls.model_fields, *cls.refused}
        for name, field in fields.items():
            most, text = cls.bounded.get(name, _MOST_VALUES), memoryview(field)
            if name in read and len(text) > most and _count_values(bytes(text)) > most:
                raise InvalidRequest(f"{name} holds over {most} values; send fewer, in several requests.", param=name)
        values = {n: msgspec.json.decode(raw) for n, raw in fields.items() if n in read}
        ignored = (n for n, raw in fields.items() if n not in values and n not in cls.without_effect and raw != _NULL)
        return values | dict.fromkeys(islice(ignored, MAX_TOLD), 0)


CALL_PREFIX = "toolu_"
"""The beginning of Anthropic's ids of calls; the same conversation by another API has it too, or not."""


def call_id(value: Any, path: str) -> str:
    """Return the id in a tool call or its result, the same for every API. Raises InvalidRequest."""
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_ID_CHARS:
        raise InvalidRequest(f"{path} must be a string of 1 to {MAX_ID_CHARS} characters.", param=path)
    return value.removeprefix(CALL_PREFIX)


def _count_values(raw: bytes) -> int:
    """Return an upper bound of the number of values: one plus the commas and opening brackets outside strings."""
    text, in_string = _text(raw)
    between = (text == ord(",")) | ((text | 0x20) == ord("{"))  # "[" differs from "{" in that bit
    return 1 + int(np.count_nonzero(between > in_string))


def _count_fields(raw: bytes) -> int:
    """Return the number of fields of an object itself: the colons outside strings and outside its values."""
    text, in_string = _text(raw)
    opened, closed = (((text | 0x20) == ord(bracket)) > in_string for bracket in "{}")  # brackets of both kinds
    depth = np.cumsum(opened.view(np.int8) - closed.view(np.int8), dtype=np.int32)
    return int(np.count_nonzero(((text == ord(":")) > in_string) & (depth == 1)))


def _text(raw: bytes) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Return a JSON text without escaped quotes, and whether each of its bytes is in a string: 0 or 1."""
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")
    text = np.frombuffer(raw, np.uint8)
    return text, np.cumsum(text == ord('"'), dtype=np.uint8) & 1  # odd after an opening quote; wraps, and stays so


def _refusal(model: type[JsonBody], error: ErrorDetails) -> InvalidRequest:
    """Return one of pydantic's errors as a sentence."""
    path = ""
    annotation: Any = model  # the annotation at the path
    for step in error["loc"]:
        if isinstance(step, int):
            if not _must(item := _item(annotation)):
                break  # the list's own demand covers its items
            path, annotation = f"{path}[{step}]", item
        elif step in (fields := _fields(annotation)):
            path, annotation = f"{path}.{step}" if path else step, fields[step]
        else:
            break  # a step into a member of a union
    demand = error["msg"] if error["type"] == "must_be" else _demand(annotation)
    if error["type"] == "missing":
        return InvalidRequest(f"{path} is missing; it must be {demand}.", param=path)
    return InvalidRequest(f"{path} must be {demand}.", param=path)


def _parts(annotation: Any) -> Iterator[Any]:
    """Yield an annotation and its parts, outer parts first."""
    yield annotation
    for part in get_args(annotation):
        yield from _parts(part)


def _fields(annotation: Any) -> dict[str, Any]:
    for part in _parts(annotation):
        if isinstance(part, type) and issubclass(part, JsonBody):
            hints = get_type_hints(part, include_extras=True)
            return {name: Annotated[hints[name], field] for name, field in part.model_fields.items()}
        if is_typeddict(part):
            return get_type_hints(part, include_extras=True)
    return {}


def _item(annotation: Any) -> Any:
    return next(get_args(part)[0] for part in _parts(annotation) if get_origin(part) in (list, tuple))


def _must(annotation: Any) -> str:
    """Return the demand of an annotation's ``Must``, "" if there is none."""
    metadata = (known for part in _parts(annotation) for known in reversed(getattr(part, "__metadata__", ())))
    return next((known.demand for known in metadata if isinstance(known, Must)), "")


def _demand(annotation: Any) -> str:
    """Return the demand of an annotation; without a ``Must``, derive it from the type and its bounds."""
    if demand := _must(annotation):
        return demand
    parts = list(_parts(annotation))
    fields = [known for part in parts for known in getattr(part, "__metadata__", ()) if isinstance(known, FieldInfo)]
    names = ("ge", "gt", "le", "min_length", "max_length")
    said = {name: getattr(it, name) for field in fields for it in field.metadata for name in names if hasattr(it, name)}
    if "max_length" in said:
        return f"a string of {said.get('min_length', 0)} to {said['max_length']} characters"
    if "le" in said:
        kind = "a whole number" if int in parts else "a number"
        least = f"from {said['ge']} to" if "ge" in said else f"above {said['gt']} and at most"
        return f"{kind} {least} {said['le']}"
    kinds = ((bool, "true or false"), (str, "a string"), (int, "a whole number"), (float, "a number"))
    return next((words for kind, words in kinds if kind in parts), "an object")
