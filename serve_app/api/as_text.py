"""Parts of a conversation that are no plain text: shown to the model as text, or refused if they hold none."""

from collections.abc import Mapping
from typing import Any

import msgspec

from serve_app.api.json_body import DOCUMENT_SOURCES, Kinds
from serve_app.api.openai.tools import MAX_ARGUMENT_DEPTH, too_deep
from serve_app.errors import InvalidRequest

MEDIA = frozenset(
    {
        "image", "image_url", "input_image", "image_file", "computer_screenshot", "input_audio", "audio", "audio_url",
        "output_audio", "video", "video_url", "input_video", "file", "input_file",
    }
)  # fmt: skip
"""Types that hold no text, in any API."""

_UNSAID = frozenset(
    {
        "id", "call_id", "tool_use_id", "item_id", "signature", "caller", "fingerprint", "cache_control",
        "prompt_cache_breakpoint",
    }
)  # fmt: skip
"""Fields that say nothing to a model."""
_READ = {
    "search_result": frozenset({"type", "title", "source", "content"}),
    "document": frozenset({"type", "title", "context", "source"}),
}
"""The fields that are read of types with a text of their own."""
_SAYS_NOTHING: tuple[Any, ...] = (None, [], {"enabled": False})
_SEALED = "encrypted_"
"""The start of the names of fields that only the server that wrote them can read."""
_encode = msgspec.json.Encoder(order="sorted").encode


def as_text(block: Mapping[str, Any], path: str, where: str, kinds: Kinds, ignored: set[str]) -> str:
    """Return lines that say what a part says. Equal parts give equal lines, so that the cached prefix stays the same.

    ``ignored`` gets ``where`` with the name of an unknown type, and of what is left out: images, and what is encrypted
    for another server. Raises InvalidRequest for a part that holds no text.
    """
    kind = block.get("type")
    if not isinstance(kind, str) or kind in MEDIA or kind in kinds.refused:
        raise InvalidRequest(f"{path} has the type {str(kind)[:64]!r}, which is not read here; send text.", param=path)
    if too_deep(block):
        raise InvalidRequest(f"{path} must be nested at most {MAX_ARGUMENT_DEPTH} deep.", param=path)
    if kind in _READ:
        unread = (name for name in block.keys() - _READ[kind] - _UNSAID if block[name] not in _SAYS_NOTHING)
        ignored.update(f"{where}.{name}" for name in unread)
    if kind == "search_result":
        return _lines(block.get("title"), block.get("source"), *_texts(block.get("content"), f"{path}.content"))
    if kind == "compaction" and isinstance(block.get("content"), str):
        return _lines(block["content"])  # a summary of what came before
    if kind == "document":
        return _document(block, f"{path}.source")
    said = _said(block, where, ignored)
    sealed = said.keys() <= {"type", "role"} and any(name.startswith(_SEALED) for name in block)
    if sealed or kind not in kinds.as_text:
        ignored.add(f"{where}.{kind}")
    return "" if sealed else _lines(_encode(said).decode())


def _document(block: Mapping[str, Any], path: str) -> str:
    source = block.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    if not isinstance(source, Mapping) or kind not in DOCUMENT_SOURCES.read:
        raise InvalidRequest(f"{path} has the type {str(kind)[:64]!r}, which is not read here; send text.", param=path)
    field = "data" if kind == "text" else "content"
    return _lines(block.get("title"), block.get("context"), *_texts(source.get(field), f"{path}.{field}"))


def _texts(content: Any, path: str) -> list[str]:
    """Return the texts of a string or of text blocks."""
    blocks = content if isinstance(content, list) else [{"text": content}]
    texts: list[str] = []
    for block in blocks:
        text = block.get("text") if isinstance(block, dict) else None
        if not isinstance(text, str):
            kind = str(block.get("type"))[:64] if isinstance(block, dict) else ""
            said = f"{path} must be text, or blocks of text; {kind!r} is not read here."
            raise InvalidRequest(said, param=path)
        texts.append(text)
    return texts


def _lines(*texts: Any) -> str:
    return "".join(f"\n{text}" for text in texts if isinstance(text, str) and text) + "\n"


def _said(value: Any, where: str, ignored: set[str]) -> Any:
    """Return what a value says, without ids, nulls, and the content of images and files."""
    if isinstance(value, list):
        return [_said(one, where, ignored) for one in value]
    if not isinstance(value, dict):
        return value
    kind, said = value.get("type"), {}
    for name, inner in value.items():
        if name in _UNSAID or name.startswith(_SEALED) or inner is None:
            continue
        if name != "type" and (str(kind) in MEDIA or _is_data(kind, name, inner)):
            ignored.add(f"{where}.{name}")
        else:
            said[name] = _said(inner, where, ignored)
    return said


def _is_data(kind: Any, name: str, value: Any) -> bool:
    """Whether a field holds an image or a file in base64."""
    coded = (kind, name) in (("image_generation_call", "result"), ("base64", "data"))
    return coded or (isinstance(value, str) and value[:5] == "data:" and ";base64," in value[:128])
