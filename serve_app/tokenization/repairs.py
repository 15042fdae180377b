"""Conversations in a form that a chat template takes and that loses nothing.

Templates refuse, or leave out without an error, what their model was not trained on. Each template is probed once, at
its load, with small conversations of marked texts; a repair is used only where a probe shows the need, and then always,
so that a conversation's prefix stays the same when it grows. See ``REPAIRS`` and ``PROBES``.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import combinations, groupby, takewhile
from operator import itemgetter
from typing import Any, NamedTuple

from serve_app.errors import InvalidRequest

TemplateMessage = Mapping[str, Any]
Render = Callable[[Sequence[TemplateMessage], Sequence[Mapping[str, Any]]], str]
"""Renders messages and tools. Raises InvalidRequest."""

_BETWEEN = "\n\n"
_ID_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_ID_CHARS = 9
_WORD = re.compile(r"[A-Za-z0-9]{4,}")
_SEEN_CHARS = 256
_SEARCHES = 8
"""Searches through a whole prompt, for words that are not where they should be."""


class Chat(NamedTuple):
    """A conversation's messages and tools."""

    messages: Sequence[TemplateMessage]
    tools: Sequence[Mapping[str, Any]] = ()


class Repair(NamedTuple):
    """Another form of messages, of a ``tool``, or of both. ``said``: what the template does, and what is done."""

    said: str
    mend: Callable[[Sequence[TemplateMessage]], Sequence[TemplateMessage]] = lambda messages: messages
    tool: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda tool: tool
    whole: Callable[[Chat], Chat] = lambda chat: chat


class Probe(NamedTuple):
    """A conversation that a template should show whole. ``tried``: repairs, the mildest first.

    ``wrong``: texts that had better not be in the prompt; ``at_last``: a repair for want of any other.
    """

    what: str
    chat: Chat
    tried: Sequence[Sequence[str]] = ()
    wrong: Sequence[str] = ()
    at_last: str = ""


class Repairs:
    """What one template needs. ``unable``: what it cannot take at all. ``probes``: none: all is shown as it is.

    ``shows_tools``: whether its prompts have tools; ``tells_tools``: for it leaves them out, and they are told in a
    message. ``shows_names``: whether its prompts have the names of users.
    """

    def __init__(self, render: Render, probes: Sequence[Probe]) -> None:
        self._render = render
        self._names: frozenset[str] = frozenset()
        shown = self._show_tools()
        if not shown and probes:
            self._names = frozenset({"tools_as_text"})
        self.unable: list[str] = []
        for probe in probes:
            found = next((names for names, wrong in self._ways(probe) if self._holds(probe, names, wrong)), None)
            if found is None:
                self.unable.append(probe.what)
            else:
                self._names = found
        self.shows_tools = self._show_tools()
        self.tells_tools = self.shows_tools and not shown
        self.shows_names = self._holds(_NAMED, self._names)

    def _show_tools(self) -> bool:
        return all(self._holds(probe, self._names) for probe in TOOLS_SHOWN)

    @property
    def calls_at_once(self) -> int:
        """How many calls the template writes in one turn, in a form of its own: 0, 1, or 2 for any number."""
        return 0 if "calls_as_text" in self._names else 1 if "calls_one_by_one" in self._names else 2

    @property
    def said(self) -> list[str]:
        """What an operator may want to know: a sentence for each repair, and for what is refused."""
        made = [repair.said for name, repair in REPAIRS.items() if name in self._names]
        return made + [f"it cannot show {what}: such a request gets status 400" for what in self.unable]

    def mended(self, chat: Chat) -> Chat:
        """Return a conversation in the form that this template takes."""
        return _mended(chat, self._names) if self._names else chat

    def _ways(self, probe: Probe) -> Iterator[tuple[frozenset[str], Sequence[str]]]:
        tried = [self._names.union(names) for names in ((), *probe.tried)]
        yield from ((names, probe.wrong) for names in tried)
        if probe.wrong:
            yield from ((names, ()) for names in tried)
        if probe.at_last:
            yield self._names | {probe.at_last}, ()

    def _holds(self, probe: Probe, names: frozenset[str], wrong: Sequence[str] = ()) -> bool:
        try:
            text = self._render(*_mended(probe.chat, names))
        except InvalidRequest:
            return False
        return all(mark in text for mark in _marks(probe.chat)) and not any(word in text for word in wrong)


def _mended(chat: Chat, names: frozenset[str]) -> Chat:
    messages, tools = chat
    for name, repair in REPAIRS.items():
        if name in names:
            messages, tools = repair.whole(Chat(repair.mend(messages), [*map(repair.tool, tools)]))
    return Chat(messages, tools)


def left_out(messages: Sequence[TemplateMessage], text: str) -> int | None:
    """Return the number of the first message of which a prompt shows nothing, None if there is none.

    A guard for what no probe foresees: it looks for a longer word of each message, and each call's name.
    """
    at, searched = 0, 0
    for index, message in enumerate(messages):
        content = message.get("content") or ""
        # Templates cut the reasoning out of what an assistant said.
        cut = message["role"] == "assistant" and "</" in content
        said = None if cut else _WORD.search(content, 0, _SEEN_CHARS)
        for word in (
            *((said[0],) if said else ()),
            *(call["function"]["name"] for call in message.get("tool_calls") or ()),
        ):
            position = text.find(word, at)
            if position < 0:
                searched += (position := text.find(word)) + len(text) - at
                if position < 0:
                    return index
                if searched > _SEARCHES * len(text):
                    return None  # a template that writes in another order; each further word could cost as much
            at = max(at, position)
    return None


def _joined(*neighbours: TemplateMessage) -> TemplateMessage:
    """Return one message of neighbours."""
    parts = [part for one in neighbours if (part := one.get("content"))]
    calls = [call for one in neighbours for call in one.get("tool_calls") or ()]
    fields: dict[str, Any] = {}
    for one in reversed(neighbours):
        fields.update(one)
    return {**fields, "content": _BETWEEN.join(parts), **({"tool_calls": calls} if calls else {})}


def _join_neighbours(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    mended: list[TemplateMessage] = []
    for role, group in groupby(messages, itemgetter("role")):
        neighbours = [*group]
        mended += [_joined(*neighbours)] if role in ("user", "assistant") and neighbours[1:] else neighbours
    return mended


def _leading(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    return [*takewhile(lambda message: message["role"] == "system", messages)]


def _join_systems(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    leading = _leading(messages)
    if len(leading) < 2:
        return [*messages]
    text = _BETWEEN.join(message["content"] for message in leading if message["content"])
    return [{**leading[0], "content": text}, *messages[len(leading) :]]


def _later_systems_to_users(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    leading = len(_leading(messages))
    later = ({**one, "role": "user"} if one["role"] == "system" else one for one in messages[leading:])
    return [*messages[:leading], *later]


def _with_a_user(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """Put an empty user message after the leading system messages, if no user's follows them."""
    leading = _leading(messages)
    rest = messages[len(leading) :]
    begun = [] if rest and rest[0]["role"] == "user" else [{"role": "user", "content": ""}]
    return [*leading, *begun, *rest]


def _systems_to_user(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """Put the leading system messages before the first user message, in one message with it."""
    leading = _leading(messages)
    if not leading:
        return [*messages]
    text = _BETWEEN.join(message["content"] for message in leading if message["content"])
    rest = messages[len(leading) :]
    system = {"role": "user", "content": text}
    if rest and rest[0]["role"] == "user":
        return [_joined(system, rest[0]), *rest[1:]]
    return [system, *rest]


def _bridged(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """Put empty messages between, so that users and assistants alternate, a user first; calls do not count."""
    mended: list[TemplateMessage] = []
    before = "assistant"
    for message in messages:
        role = message["role"]
        if role in ("user", "assistant") and not message.get("tool_calls"):
            if role == before:
                mended.append({"role": "user" if role == "assistant" else "assistant", "content": ""})
            before = role
        mended.append(message)
    return mended


def _calls_one_by_one(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """Give each call a message of its own, with its results behind it."""
    mended: list[TemplateMessage] = []
    index = 0
    while index < len(messages):
        message = messages[index]
        calls = message.get("tool_calls") or ()
        index += 1
        if len(calls) < 2:
            mended.append(message)
            continue
        results: list[TemplateMessage] = []
        while index < len(messages) and messages[index]["role"] == "tool":
            results.append(messages[index])
            index += 1
        by_id: dict[Any, list[TemplateMessage]] = {}
        for result in results:
            by_id.setdefault(result.get("tool_call_id"), []).append(result)
        ids = {call.get("id") for call in calls}
        for number, call in enumerate(calls):
            said = message if not number else {"role": "assistant", "content": ""}
            mended.append({**said, "tool_calls": [call]})
            mended += by_id.pop(call.get("id"), ())
        mended += (result for result in results if result.get("tool_call_id") not in ids)
    return mended


def _text_before_calls(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    mended: list[TemplateMessage] = []
    for message in messages:
        if message.get("tool_calls") and message.get("content"):
            mended.append({name: value for name, value in message.items() if name != "tool_calls"})
            message = {"role": "assistant", "content": "", "tool_calls": message["tool_calls"]}
        mended.append(message)
    return mended


def _names_of_calls(messages: Sequence[TemplateMessage]) -> Iterator[tuple[TemplateMessage, str]]:
    """Yield each message, with the name of the function whose result it is."""
    names: dict[Any, str] = {}
    last = ""
    for message in messages:
        for call in message.get("tool_calls") or ():
            last = names[call.get("id")] = call["function"]["name"]
        yield message, names.get(message.get("tool_call_id"), last) if message["role"] == "tool" else ""


def _name_results(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    return [{"name": name, **message} if name else message for message, name in _names_of_calls(messages)]


def _calls_to_text(messages: Sequence[TemplateMessage], form: str = "{}") -> list[TemplateMessage]:
    mended: list[TemplateMessage] = []
    for message, name in _names_of_calls(messages):
        if message["role"] == "tool":
            mended.append({"role": "user", "content": f"{name or 'A tool'} returned:\n{message['content']}"})
        elif message.get("tool_calls"):
            calls = (form.format(json.dumps(call["function"], ensure_ascii=False)) for call in message["tool_calls"])
            content = "\n".join(filter(None, (message.get("content"), *calls)))
            mended.append({**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content})
        else:
            mended.append(message)
    return mended


_CALL_FORM = "<tool_call>\n{}\n</tool_call>"
"""A call in Hermes' format, which many models know."""
_TOOLS_SAID = """\
You may call functions. Each line describes one, with the JSON Schema of its arguments:
{tools}

To call one, write its name and its arguments in this form; its result is the next message:
{call}"""


def _tools_to_text(chat: Chat) -> Chat:
    """Tell the tools in a system message behind the leading ones, and write calls as that message wants them."""
    if not chat.tools:
        return chat
    messages = _calls_to_text(chat.messages, _CALL_FORM)
    tools = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in chat.tools)
    example = _CALL_FORM.format('{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}')
    instruction = {"role": "system", "content": _TOOLS_SAID.format(tools=tools, call=example)}
    leading = len(_leading(messages))
    return Chat([*messages[:leading], instruction, *messages[leading:]])


def _arguments_to_text(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    def change(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    return [
        {**message, "tool_calls": [*map(change, message["tool_calls"])]} if message.get("tool_calls") else message
        for message in messages
    ]


def _short_id(call_id: str) -> str:
    """Return an id of nine letters and digits, always the same for the same id."""
    if len(call_id) == _ID_CHARS and call_id.isascii() and call_id.isalnum():
        return call_id
    number = int.from_bytes(blake2b(call_id.encode(errors="surrogatepass"), digest_size=8).digest(), "big")
    return "".join(_ID_LETTERS[number // 62**index % 62] for index in range(_ID_CHARS))


def _shorten_ids(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """Give calls and results ids of nine letters and digits; a result without an id gets the next call's."""
    mended: list[TemplateMessage] = []
    unanswered: OrderedDict[str, None] = OrderedDict()
    for number, message in enumerate(messages):
        if message.get("tool_calls"):
            ids = [call.get("id") or f"{number} {index}" for index, call in enumerate(message["tool_calls"])]
            calls = [{**call, "id": _short_id(own)} for call, own in zip(message["tool_calls"], ids, strict=True)]
            unanswered, message = OrderedDict.fromkeys(ids), {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            given = message.get("tool_call_id") or next(iter(unanswered), "")
            unanswered.pop(given, None)
            message = {**message, "tool_call_id": _short_id(given)}
        mended.append(message)
    return mended


def _name_ids(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """Make ids of functions' names and a call's number; results get their call's."""
    mended, ids, number = list[TemplateMessage](), dict[Any, str](), 0
    for message in messages:
        if message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                name, given = call["function"]["name"], call.get("id")
                own = given if str(given).startswith(f"functions.{name}:") else f"functions.{name}:{number}"
                ids[given], number = own, number + 1
                calls.append({**call, "id": own})
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool" and message.get("tool_call_id") in ids:
            message = {**message, "tool_call_id": ids[message["tool_call_id"]]}
        mended.append(message)
    return mended


def _contents_to_parts(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    return [{**message, "content": [{"type": "text", "text": message.get("content") or ""}]} for message in messages]


def _filled(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    empty = {"description": "", "parameters": {"type": "object", "properties": {}}}
    return {**tool, "function": {**empty, **tool["function"]}}


REPAIRS: Mapping[str, Repair] = {
    "tools_as_text": Repair(
        "it leaves out tools: they are told in a system message, and calls beside them are in Hermes' form",
        whole=_tools_to_text,
    ),
    "tools_filled": Repair(
        "it needs a description and parameters of every tool: empty ones are put where a tool has none", tool=_filled
    ),
    "short_ids": Repair(
        "it takes only ids of nine letters and digits: other ids of calls are mapped to such", _shorten_ids
    ),
    "named_ids": Repair("it shows ids of calls in place of names: ids are made of the names", _name_ids),
    "named_results": Repair("it needs the function's name with a result: the call's is taken", _name_results),
    "arguments_as_text": Repair("it takes the arguments of calls as JSON text: they are given so", _arguments_to_text),
    "calls_one_by_one": Repair(
        "it takes one call in a message: parallel ones are put behind each other, with their results",
        _calls_one_by_one,
    ),
    "calls_as_text": Repair("it takes no calls and results: they are put into texts", _calls_to_text),
    "later_systems_to_users": Repair(
        "it takes system messages only at the start: later ones become the user's", _later_systems_to_users
    ),
    "joined_systems": Repair("it takes one system message: leading ones are joined", _join_systems),
    "user_needed": Repair("it needs a user's message: an empty one is put where no user begins", _with_a_user),
    "systems_to_user": Repair("it takes no system message: it is put before the user's first", _systems_to_user),
    "joined_neighbours": Repair(
        "it takes no two messages of one role in a row: they are joined", _join_neighbours
    ),
    "text_before_calls": Repair("it leaves out the text beside a call: it is put before the call", _text_before_calls),
    "bridged": Repair(
        "it wants users and assistants in turns: empty messages are put between where they are not", _bridged
    ),
    "parts": Repair("it takes contents only as lists of parts: they are given so", _contents_to_parts),
}  # fmt: skip
"""All repairs, in the order in which they are made."""


def _message(role: str, mark: str, **more: Any) -> TemplateMessage:
    return {"role": role, "content": mark, **more}


def _call(number: int = 1) -> Mapping[str, Any]:
    arguments = {f"qzkey{number}": f"qzvalue{number}", "flag": True}
    function = {"name": f"qzname{number}", "arguments": arguments}
    return {"id": f"call_9f8e7d6c5b4a{number}", "type": "function", "function": function}


def _result(number: int = 1) -> TemplateMessage:
    return _message("tool", f"qzresult{number}", tool_call_id=_call(number)["id"])


_S, _T, _X = (_message("system", f"qzsystem{number}") for number in range(3))
_U, _V, _W = (_message("user", f"qzuser{number}") for number in range(3))
_A, _B = (_message("assistant", f"qzanswer{number}") for number in range(2))
_NOTHING, _SILENCE = _message("user", ""), _message("assistant", "")
_C, _D = (_message("assistant", "", tool_calls=[_call(number)]) for number in (1, 2))
_BOTH = _message("assistant", "", tool_calls=[_call(1), _call(2)])
_TEXT_AND_CALL = _message("assistant", "qzanswer9", tool_calls=[_call()])
_TEXT_AND_SECOND = _message("assistant", "qzanswer8", tool_calls=[_call(2)])
_THOUGHT = {**_TEXT_AND_CALL, "reasoning": "thought", "reasoning_content": "thought"}
_R, _Q = _result(), _result(2)
_PARAMETERS = {"type": "object", "properties": {"qzparameter": {"type": "string"}}, "required": ["qzparameter"]}
_TOOL = {
    "type": "function",
    "function": {"name": "qztool", "description": "qzdescription", "parameters": _PARAMETERS},
}
_BARE = {"type": "function", "function": {"name": "qztool"}}
_AS_PYTHON = ("'qzvalue1'", '\\"qzvalue1')
"""Arguments that a template wrote as Python, or as JSON in JSON."""
_MARK = re.compile(r"qz[a-z]+\d*")


def _marks(chat: Chat) -> set[str]:
    return {*_MARK.findall(json.dumps(chat))}


def _some_of(*names: str) -> list[Sequence[str]]:
    """Return every choice of some names, the smallest ones first."""
    return [some for size in range(1, len(names) + 1) for some in combinations(names, size)]


_TURNS = _some_of("joined_neighbours", "text_before_calls", "bridged")
_CALLS = _some_of("short_ids", "named_ids", "named_results", "arguments_as_text")
_SYSTEM = _some_of("systems_to_user", "joined_neighbours")
_LATER = (["joined_systems"], ["later_systems_to_users"], ["later_systems_to_users", "joined_neighbours"])
_NAMED = Probe("a user's name", Chat([{**_U, "name": "qznamed0"}]))
TOOLS_SHOWN = (Probe("tools", Chat([_U], [_TOOL])), Probe("tools after an answer", Chat([_U, _A], [_TOOL])))
PROBES = (
    Probe("a user's message", Chat([_U]), [["parts"]]),
    Probe("a conversation", Chat([_U, _A, _V])),
    Probe("two messages of a user in a row", Chat([_U, _V]), _TURNS),
    Probe("two messages of an assistant in a row", Chat([_U, _A, _B, _V]), _TURNS),
    Probe("an assistant's message at the start", Chat([_A, _V]), _TURNS),
    Probe("an assistant's message at the end", Chat([_U, _A]), _TURNS),
    Probe("an empty message of a user", Chat([_NOTHING, _A, _V]), _TURNS),
    Probe("an empty message of an assistant", Chat([_U, _SILENCE, _V]), _TURNS),
    Probe("a system message", Chat([_S, _U, _A, _V]), _SYSTEM),
    Probe("two system messages", Chat([_S, _T, _U]), [["joined_systems"]]),
    Probe("a system message alone", Chat([_S]), _some_of("user_needed", "systems_to_user")),
    Probe("an assistant's message after the system's", Chat([_S, _A, _V]), _TURNS),
    Probe("a system message later", Chat([_S, _U, _A, _X, _V]), _LATER),
    Probe("a system message later, without one before", Chat([_U, _A, _X, _V]), _LATER),
    Probe("a system message at the end", Chat([_S, _U, _X]), _LATER),
    Probe("a call", Chat([_U, _C, _R, _A, _V]), _CALLS, _AS_PYTHON, "calls_as_text"),
    Probe("a result at the end", Chat([_U, _C, _R]), _CALLS, _AS_PYTHON, "calls_as_text"),
    Probe("a call without a user's message", Chat([_C, _R]), [["user_needed"], *_TURNS]),
    Probe("a system message before a result at the end", Chat([_S, _U, _C, _R]), _SYSTEM),
    Probe("a call and tools", Chat([_S, _U, _C, _R, _A, _V], [_TOOL]), _CALLS, _AS_PYTHON, "calls_as_text"),
    Probe("parallel calls", Chat([_U, _BOTH, _R, _Q, _A, _V]), [["calls_one_by_one"]], _AS_PYTHON),
    Probe("two calls behind each other", Chat([_U, _C, _R, _D, _Q, _A, _V]), _TURNS, _AS_PYTHON),
    Probe("a text beside a call", Chat([_U, _TEXT_AND_CALL, _R, _A, _V]), _TURNS),
    Probe("a text beside a second call", Chat([_U, _C, _R, _TEXT_AND_SECOND, _Q, _A, _V]), _TURNS),
    Probe("a reasoning and a text beside a call", Chat([_U, _THOUGHT, _R]), _TURNS),
    Probe("a text before a call", Chat([_U, _B, _C, _R, _A, _V]), _TURNS),
    Probe("a text after a call", Chat([_U, _C, _B, _R, _A, _V]), _TURNS),
    Probe("a user's message after a result", Chat([_U, _C, _R, _V]), _TURNS),
    Probe("a tool without description and parameters", Chat([_U], [_BARE]), [["tools_filled"]]),
    Probe("tools and an assistant's message at the start", Chat([_A, _V], [_TOOL]), _some_of("user_needed", "bridged")),
    Probe("tools and a call at the start", Chat([_C, _R, _V], [_TOOL]), _some_of("user_needed", "bridged")),
    Probe("tools and a system message", Chat([_S, _U, _A, _V], [_TOOL]), _SYSTEM),
)  # fmt: skip
