"""What clients say of their sessions in a body: Dynamo's ``nvext``, and OpenAI's ``metadata``.

A hint concerns its tenant alone. One of another type is ignored, because other servers ignore it too.
"""

from dataclasses import dataclass
from typing import Any

_PRIORITIES = 2**31 - 1

NVEXT = "Dynamo's: agent_context (session_id, parent_session_id, session_final), agent_hints (osl, priority)"
USER = "who asks: while a prompt is cut over in part, one user always gets the same version"
METADATA = "session_id, parent_session_id and session_final are hints; otherwise without effect"


@dataclass(frozen=True, slots=True)
class Hints:
    """``session`` and its ``parent``: the client's names, "" for none; ``final``: it ends with this answer.

    ``output_tokens``: expected in the answer, 0 if unknown; ``priority``: the lowest first, 0 for none. ``unread``: the
    paths of the hints that have no effect.
    """

    session: str = ""
    parent: str = ""
    final: bool = False
    output_tokens: int = 0
    priority: int = 0
    unread: tuple[str, ...] = ()

    @classmethod
    def of(cls, nvext: Any, metadata: Any) -> "Hints":
        """Read a body's fields. ``nvext`` goes before ``metadata``."""
        outer = nvext if isinstance(nvext, dict) else {}
        parts = {name: _object(outer.get(name)) for name in ("agent_context", "agent_hints")}
        context, hints = parts["agent_context"], parts["agent_hints"]
        meant = _object(metadata)
        read = {"agent_context": _CONTEXT, "agent_hints": {"osl", "priority"}}
        return cls(
            session=_word(context.get("session_id")) or _word(meant.get("session_id")),
            parent=_word(context.get("parent_session_id")) or _word(meant.get("parent_session_id")),
            final=is_true(context.get("session_final")) or is_true(meant.get("session_final")),
            output_tokens=max(0, _whole(hints.get("osl"))),
            priority=max(-_PRIORITIES, min(_PRIORITIES, -_whole(hints.get("priority")))),
            unread=(
                *(f"nvext.{name}" for name in outer if name not in parts),
                *(f"nvext.{name}.{inner}" for name, part in parts.items() for inner in part if inner not in read[name]),
            ),
        )


NO_HINTS = Hints()

_CONTEXT = {"session_id", "parent_session_id", "session_final"}


def is_true(value: Any) -> bool:
    """Return whether a value says yes, as JSON or in words."""
    return value is True or (isinstance(value, str) and value.strip().lower() in ("true", "1"))


MOST_WORD_CHARS = 256


def _word(value: Any) -> str:
    return value if isinstance(value, str) and len(value) <= MOST_WORD_CHARS else ""


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def user_of(*values: Any) -> str:
    """Return the first of some fields that is a client's word for the end user, "" for none."""
    return next(filter(None, map(_word, values)), "")


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
