"""Turns of calls as chat templates of model families write them, in tiny templates of this project's own."""

from collections.abc import Mapping

_TURNS = """{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% if message.tool_calls %}CALLS{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_EACH = "{% for call in message.tool_calls %}{% set f = call.function %}CALL{% endfor %}"
_PAIRS = "{% for key, value in f.arguments.items() %}PAIR{% endfor %}"
_COMMA = "{% if not loop.last %}, {% endif %}"
_JSON, _SHOWN = "{{ f.arguments | tojson }}", "{{ value if value is string else value | tojson }}"


def _template(call: str, opens: str = "", closes: str = "") -> str:
    tools = "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    return tools + _TURNS.replace("CALLS", opens + _EACH.replace("CALL", call) + closes)


def _keys(call: str, pair: str, opens: str = "", closes: str = "") -> str:
    return _template(call.replace("PAIRS", _PAIRS.replace("PAIR", pair)), opens, closes)


WRITTEN: Mapping[str, str] = {
    "hermes": _template('\n<tool_call>\n{"name": "{{ f.name }}", "arguments": ' + _JSON + "}\n</tool_call>"),
    "mistral": _template(
        '{"name": "{{ f.name }}", "arguments": ' + _JSON + ', "id": "{{ call.id }}"}' + _COMMA,
        "[TOOL_CALLS] [", "]",
    ),
    "llama3_json": _template('{"name": "{{ f.name }}", "parameters": ' + _JSON + "}"),
    "qwen3_coder": _keys(
        "\n<tool_call>\n<function={{ f.name }}>\nPAIRS</function>\n</tool_call>",
        "<parameter={{ key }}>\n" + _SHOWN + "\n</parameter>\n",
    ),
    "glm45": _keys(
        "\n<tool_call>{{ f.name }}\nPAIRS</tool_call>",
        "<arg_key>{{ key }}</arg_key>\n<arg_value>" + _SHOWN + "</arg_value>\n",
    ),
    "kimi_k2": _template(
        "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>" + _JSON + "<|tool_call_end|>",
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
    ),
    "deepseek_v3": _template(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n" + _JSON + "\n```<｜tool▁call▁end｜>\n",
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": _template(
        "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>" + _JSON + "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    ),
    "minimax_m2": _keys(
        '<invoke name="{{ f.name }}">\nPAIRS</invoke>\n', '<parameter name="{{ key }}">' + _SHOWN + "</parameter>\n",
        "\n<minimax:tool_call>\n", "</minimax:tool_call>",
    ),
    "seed_oss": _keys(
        "<seed:tool_call>\n<function={{ f.name }}>\nPAIRS</function>\n</seed:tool_call>\n",
        "<parameter={{ key }}>" + _SHOWN + "</parameter>\n",
    ),
    "minicpm5": _keys(
        '<function name="{{ f.name }}">PAIRS</function>\n',
        '<param name="{{ key }}">{% if value is string and "<" in value %}<![CDATA[{{ value }}]]>{% else %}{{ value }}'
        "{% endif %}</param>",
    ),
    "granite": _template(
        '{"name": "{{ f.name }}", "arguments": ' + _JSON + "}" + _COMMA, "<|tool_call|>[", "]"
    ),
}  # fmt: skip
"""A template for each family of ``FORMATS``, by its name; phi4_mini_json is read as granite is."""
SPECIAL = {
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
    "kimi_k2": [
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
        "<|tool_call_argument_begin|>",
    ],
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ],
    "granite": ["<|tool_call|>"],
}  # fmt: skip
"""Marks that are special tokens of a family's tokenizers."""
SPECIAL["deepseek_v31"] = SPECIAL["deepseek_v3"]
UNREAD = {
    "an unknown mark": _template("<<call>> {{ f.name }} " + _JSON),
    "JSON that is none": _template('\n<tool_call>\n{"name": "{{ f.name }}, "arguments": ' + _JSON + '"}\n</tool_call>'),
    "text behind a call": _template('\n<tool_call>{"name": "{{ f.name }}", "arguments": ' + _JSON + "}</tool_call> so"),
}
"""Templates that write calls which no reader of this project reads back."""
