"""Requests of every door by a grammar: valid ones with odd parts, and what is nearly JSON, a form or a header."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import quote_from_bytes

from hypothesis import strategies as st

from tests.serve_app.ingress.laboratory.doors import Body, Door, places, samples
from tests.serve_app.ingress.laboratory.house import KEY, OPERATOR, Headers
from tests.serve_app.ingress.laboratory.shapes import texts


class Asked(NamedTuple):
    """A request as sent."""

    door: Door
    target: bytes
    headers: Headers
    parts: tuple[bytes, ...]

    def __repr__(self) -> str:
        """Return the beginning of each part: Hypothesis warns of whole large bodies."""
        sizes = [part if len(part) < 2_000 else (part[:2_000], len(part)) for part in self.parts]
        return f"Asked({self.door.path!r}, {self.target[:2_000]!r}, {self.headers!r:.4000}, {sizes!r})"


RAW = (
    b"null",
    b"true",
    b"0",
    b"-0",
    b"1e999",
    b"-1e999",
    b"1E400",
    b"1" * 400,
    b"-" + b"9" * 30,
    b"0.1e-400",
    b"1.0",
    b"2.5",
    b"9223372036854775807",
    b"9223372036854775808",
    b"-9223372036854775809",
    b"18446744073709551616",
    b"NaN",
    b"Infinity",
    b'""',
    b'"\\u0000"',
    b'"\\ud800"',
    b'"\\udc00\\ud800"',
    b'"\xff"',
    b'"\xed\xa0\x80"',
    b'"\\x"',
    b'"\\u12"',
    b'"\n"',
    b'"\\u0000\\n\\r\\u2028"',
    b"[]",
    b"{}",
    b"[[]]",
    b"[{}]",
    b"[null]",
    b'{"": ""}',
    b'{"a": 1, "a": {}}',
    b"[" * 600 + b"]" * 600,
    b'{"a":' * 600 + b"1" + b"}" * 600,
    b"[" * 20_000,
    b'"',
    b"{",
    b"tru",
    b"01",
    b"+1",
    b".5",
    b"1,",
    b"'a'",
    b"/**/1",
    b"",
    b'{"$ref": "#"}',
    b'{"type": []}',
    b'{"type": {"a": 1}}',
    b'{"type": "text"}',
    b'{"type": "object", "properties": 5}',
    b'{"type": "function", "function": null}',
    b'{"type": "image_url", "image_url": 5}',
    b'[1, "a", null, {}, []]',
)
"""JSON that is odd, and what is none."""
WORDS = (
    "",
    " ",
    "\0",
    "\x7f",
    "a",
    "\ud800",
    "é",
    "\u202e",
    "../..",
    "%",
    "%00",
    "demo",
    "acme",
    "default",
    "none",
    "null",
    "(public)",
    "file-1",
    "resp_1",
    "-1",
    "1e9",
    "9" * 40,
    "٣",
    "²",
    "text",
    "json_object",
    "ephemeral",
    "24h",
    "5m",
    "function",
    "auto",
    "required",
    "user",
    "assistant",
    "system",
    "tool",
    "developer",
    "<think>",
    "{{ x }}",
    "{% raw %}",
    "root ::= ",
    "start: ",
    "(?P<a",
    "[",
    "(?i)a",
    "\\",
    "^$",
    "a{1000000}",
    "#/$defs/a",
    "2030-01-01",
    "2030-13-99T99:99",
    "a" * 5000,
    "\U0001f469\u200d",
    "<|im_start|>",
    "<tool_call>",
    "Git snapshot at conversation start.\n",
)
ODD_HEADERS = (
    b"",
    b" ",
    b"\xff\xfe",
    b"\x00",
    b"\t",
    b"a\x00b",
    b"Bearer",
    b"Bearer ",
    b"Bearer \xff",
    b"Basic YTpi",
    b"bearer x y",
    b"[",
    b"[::1",
    b"]",
    b"[::1]:x",
    b"a:b:c",
    b"@",
    b"127.0.0.1:99999999",
    b"x" * 3000,
    b"null",
    b"http://[",
    b"://",
    b"0",
    b"-1",
    b"1e9",
    b"9" * 5000,
    b"\xd9\xa3",
    b"\xb2",
    b"gzip",
    b"br, gzip",
    b"multipart/form-data",
    b"multipart/form-data; boundary=",
    b'multipart/form-data; boundary="',
    b"multipart/form-data; boundary=\xff",
    b"multipart/form-data; boundary*=utf-8''%ff",
    b"text/html; charset=utf-16",
    b"application/json; charset=x",
    b"application/x-www-form-urlencoded",
    b"a/b/c;;;=",
    b"*/*",
    b"true",
    b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01",
    b"00-" + b"g" * 32 + b"-1-1",
    b'W/"x"',
    b"bytes=0-",
    b"2023-06-01",
    b"chunked",
)

_json = st.recursive(
    st.sampled_from(RAW)
    | st.sampled_from(WORDS).map(lambda word: json.dumps(word).encode())
    | st.integers().map(lambda number: b"%d" % number)
    | st.text(max_size=8).map(lambda text: json.dumps(text).encode()),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: b"[" + b",".join(items) + b"]")
        | st.lists(st.tuples(st.sampled_from(WORDS), inner), max_size=3).map(
            lambda pairs: b"{" + b",".join(json.dumps(name).encode() + b":" + value for name, value in pairs) + b"}"
        )
    ),
    max_leaves=4,
)


@st.composite
def _bodies(draw: st.DrawFn, known: Sequence[Body]) -> bytes:
    """Draw a valid body in which a few places hold something else, twice the same name, or nothing."""
    body: Any = draw(st.sampled_from(known))
    paths = list(places(body))
    chosen = draw(st.lists(st.sampled_from(paths), max_size=3, unique=True)) if paths else []
    holes: dict[bytes, bytes] = {}
    for number, path in enumerate(chosen):
        body = _marked(body, path, f"\0{number}", draw(st.sampled_from(("put", "put", "put", "drop", "twice", "more"))))
        holes[b'"\\u0000%d"' % number] = draw(_json)
    raw = json.dumps(body).encode()
    for hole, value in holes.items():
        raw = raw.replace(hole, value)
    match draw(st.integers(0, 30)):
        case 0:
            return raw[: draw(st.integers(0, len(raw)))]
        case 1:
            return draw(st.sampled_from((b"\xef\xbb\xbf", b" ", b"\n\n", b"\0", b"[", b"\xff"))) + raw
        case 2:
            return raw + draw(st.sampled_from((b" ", b"\0", b"{}", b",", b"}", raw)))
        case 3:
            return raw.decode("utf-8", "replace").encode(draw(st.sampled_from(("utf-16", "utf-32", "utf-16-le"))))
        case 4:
            return draw(_json)
        case 5:
            return raw[:-1] + b', "padding": "' + b"x" * 70_000 + b'"}'  # a large body is read in another way
    return raw


def _marked(value: Any, path: tuple[str | int, ...], mark: str, how: str) -> Any:
    if not path or not isinstance(value, dict | list):
        return value
    step, rest = path[0], path[1:]
    if isinstance(value, list):
        if not isinstance(step, int) or step >= len(value):
            return value
        if rest:
            return [_marked(one, rest, mark, how) if at == step else one for at, one in enumerate(value)]
        return [*value[:step], *{"drop": [], "twice": [value[step], mark]}.get(how, [mark]), *value[step + 1 :]]
    if step not in value:
        return value
    if rest:
        return {**value, step: _marked(value[step], rest, mark, how)}
    if how == "drop":
        return {name: one for name, one in value.items() if name != step}
    return {**value, f"{step}x": mark} if how == "more" else {**value, step: mark}


@st.composite
def _forms(draw: st.DrawFn) -> tuple[bytes, tuple[bytes, ...]]:
    """Draw the content type and the body of a form with a file, and what is nearly one."""
    boundary = draw(st.sampled_from((b"b", b"-", b"--b", b"b" * 70, b"a b", b"\xff", b"'b", b"\r\n")))
    said = draw(st.sampled_from((b"multipart/form-data; boundary=%b", b'multipart/form-data; boundary="%b"')))
    names = st.sampled_from(
        (b"file", b"purpose", b"expires_after[seconds]", b"expires_after[anchor]", b"", b"\xff", b"x" * 99)
    )
    values = st.sampled_from(
        (b"batch", b"user_data", b"3600", b"-1", b"created_at", b"9" * 5000, b"\xff", b"", b"\xd9\xa3", b"\n" * 50)
    )
    files = st.sampled_from(
        (
            b"a.jsonl",
            b"",
            b"../../etc/passwd",
            b"\xff",
            b"a\x00b",
            b"a" * 3000,
            b'"',
            b"\\",
            b"=?utf-8?q?=ff?=",
            b"a\tb",
            "\u202e".encode(),
            b"a;filename=b",
            b"%00",
        )
    )
    parts = []
    for _ in range(draw(st.integers(0, 4))):
        name, file = draw(names), draw(st.none() | files)
        head = b'Content-Disposition: form-data; name="%b"' % name
        if file is not None:
            head += (
                draw(
                    st.sampled_from(
                        (
                            b'; filename="%b"',
                            b"; filename=%b",
                            b"; filename*=utf-8''%b",
                            b"; filename*=%b",
                            b"; filename*0=%b",
                        )
                    )
                )
                % file
            )
        head += draw(
            st.sampled_from(
                (
                    b"",
                    b"\r\nContent-Type: x",
                    b"\r\nContent-Transfer-Encoding: base64",
                    b"\r\n x",
                    b"\r\n:",
                    b"\r\n\xff: \xff",
                )
            )
        )
        if draw(st.integers(0, 9)) == 0:
            head = draw(
                st.sampled_from(
                    (
                        b"",
                        b"x",
                        b"Content-Disposition",
                        b"Content-Disposition: ;;;",
                        b"Content-Disposition: form-data; name*=x''%ff",
                    )
                )
            )
        parts.append(b"--%b\r\n%b\r\n\r\n%b\r\n" % (boundary, head, draw(values)))
    raw = b"".join(parts) + draw(st.sampled_from((b"--%b--\r\n", b"--%b--", b"--%b", b"--%b\r\n", b""))).replace(
        b"%b", boundary
    )
    cut = draw(st.integers(1, 60))
    return said % boundary, tuple(raw[at : at + cut] for at in range(0, len(raw), cut)) or (b"",)


@st.composite
def requests(draw: st.DrawFn, doors: Sequence[Door], headers: Sequence[str], query: Sequence[str]) -> Asked:
    """Draw a request of one of some doors. ``headers``, ``query``: the names that the application reads."""
    door = draw(st.sampled_from(doors))
    words = st.sampled_from(WORDS).map(lambda word: word.encode("utf-8", "surrogatepass")) | st.binary(max_size=6)
    quoted = words.map(lambda word: quote_from_bytes(word, safe="/:@"))
    target = door.target(**{name: draw(quoted) or "x" for name in door.parameters})
    if draw(st.integers(0, 3)) == 0:
        pairs = draw(st.lists(st.tuples(st.sampled_from([*query, "x", ""]), quoted), max_size=3))
        target += b"?" + "&".join(f"{name}={value}" for name, value in pairs).encode()
        target += draw(st.sampled_from((b"", b"", b"&", b"%", b"&=", b"%ff", b"\xff", b";", b"&&&")))
    sent: list[tuple[bytes, bytes]] = []
    if draw(st.integers(0, 2)) == 0:
        some = st.tuples(st.sampled_from([*headers, "x-any"]), st.sampled_from(ODD_HEADERS) | st.binary(max_size=6))
        sent = [(name.encode(), value) for name, value in draw(st.lists(some, max_size=4))]
    if not {name for name, _ in sent} & {b"authorization", b"x-api-key"}:
        key = OPERATOR if door.of_operators else KEY
        sent.append((b"authorization", b"Bearer " + key.encode()))
    if "form" in door.bodies:
        kind, parts = draw(_forms())
        return Asked(door, target, [*sent, (b"content-type", kind)], parts)
    if door.bodies:
        return Asked(door, target, sent, (draw(_bodies(samples()[draw(st.sampled_from(door.bodies))])),))
    return Asked(door, target, sent, (draw(st.sampled_from((b"", b"{}", b"\xff"))),))


def spoken() -> st.SearchStrategy[str]:
    """Draw what a model says, at least a token."""
    units = st.sampled_from([*texts().values(), *(word for word in WORDS if word != "\ud800")])
    return st.lists(units, max_size=8).map("".join).filter(bool)
