"""A one-layer model that is trained here to answer as vLLM's server tests expect: reasoning, calls, texts that end.

Those tests check a server; so the model's skill is not in question, and its answers follow marks in the prompt.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clients.model import pieces, trained
from tests.serve_app.tokenization.variants import variant_of

TEMPLATE = """\
{%- if tools %}<|im_start|>system
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == "tool" %}<tool_response>{% endif %}{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}{% set said = call.function %}
{{- '<tool_call>\n{"name": "' ~ said.name ~ '", "arguments": ' ~ (said.arguments | tojson) ~ '}\n</tool_call>' }}
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
GREETING = "Hello! All is well here, and I wish you a good day with much sun, wind and tea."
TOOL_RESULT, ANY = "<tool_response>", "<|im_start|>"


@dataclass(frozen=True, slots=True)
class Talk:
    """Answers after marks, each with the same thought before."""

    marks: list[str]
    texts: tuple[str, ...]

    @property
    def answers(self) -> list[list[str]]:
        """The answers, split into pieces; a tag of reasoning is a piece."""
        return [["<think>", "\nIt is easy", " to say.\n", "</think>", "\n\n", *_parts(text)] for text in self.texts]


def _parts(text: str) -> list[str]:
    """Split a text; a called name is a piece, as it is in a prompt's tools, where it is a mark."""
    found = re.fullmatch(r'(<tool_call>)(\n\{"name": ")(\w+)(.*)', text, re.DOTALL)
    return pieces(text) if found is None else [*found.groups()[:3], *pieces(found[4])]


def call(name: str, **arguments: Any) -> str:
    """Return a call in Hermes' format."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


WEATHER = {"city": "Dallas", "state": "TX", "country": "Germany", "location": "New York", "unit": "fahrenheit"}
TALKS = [
    Talk([ANY, mark, TOOL_RESULT], (GREETING, answer, GREETING))
    for mark, answer in {
        "get_current_weather": call("get_current_weather", **WEATHER),
        "get_weather": call("get_weather", location="Paris"),
        "get_current_time": call("get_current_time"),
        "13 * 24": "It is 312. QED.",
        "Multiply": "It is 30. QED.",
        "name is John": "John",
    }.items()
]
TALKS.append(Talk([ANY, "name is John", "name is Mark"], (GREETING, "John", "Mark")))


def talker(source: Path, folder: Path) -> Path:
    """Train the model in ``folder``, with the tokenizer of ``source``."""
    variant_of(source, folder / "source")
    (folder / "source/chat_template.jinja").write_text(TEMPLATE)
    return trained(TALKS, folder / "source", folder / "talker")
