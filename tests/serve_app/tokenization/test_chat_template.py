"""Conversations become text by the checkpoint's own template, tools first; its faults are the client's errors."""

from pathlib import Path
from typing import Any

import pytest

from serve_app.errors import InvalidRequest
from serve_app.generation.tool_calls.round_trip import find_parser
from serve_app.tokenization.tokenizer import PromptTokenizer
from tests.serve_app.tokenization.variants import sentencepiece_like, variant_of
from tests.serve_app.tool_templates.families import FAMILIES, SEARCH, WEATHER, family


def test_chat_is_rendered_by_the_checkpoints_template(tokenizer: PromptTokenizer) -> None:
    """``system_text`` is the formatted system prompt alone, "" without one."""
    system = {"role": "system", "content": "Be brief."}
    user = {"role": "user", "content": "Hi"}
    rendered = tokenizer.template.render([system, user])
    assert rendered.system_text == "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert rendered.text == rendered.system_text + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.template.render([user]).system_text == ""
    assert tokenizer.template.render([system, user], add_generation_prompt=False).text.endswith("Hi<|im_end|>\n")


@pytest.mark.parametrize(
    ("template", "system_text"),
    [
        ("{{ messages | length }}{{ messages | map(attribute='content') | join }}", "2sys"),
        ("HEAD {% for m in messages %}{{ m.content }}{{ [' alone', ' of '][messages | length - 1] }}{% endfor %}",
         "HEAD sys of "),
        ("{% if messages[-1].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
         "{% for m in messages %}{{ m.content }} {% endfor %}", "sys "),
    ],
)  # fmt: skip
def test_system_text_is_always_a_prefix(demo_model_path: Path, tmp_path: Path, template: str, system_text: str) -> None:
    """If a template renders system messages differently when alone, it is what stands before another message."""
    path = variant_of(demo_model_path, tmp_path / "model")
    (path / "chat_template.jinja").write_text(template)
    rendered = PromptTokenizer(path).template.render(
        [{"role": "system", "content": "sys"}, {"role": "user", "content": "u"}]
    )
    assert rendered.system_text == system_text
    assert rendered.text.startswith(system_text)


def test_a_variable_that_the_template_does_not_have_is_known(demo_model_path: Path, tmp_path: Path) -> None:
    """Names are matched as whole words: ``enable`` is not ``enable_thinking``."""
    path = variant_of(demo_model_path, tmp_path / "model")
    (path / "chat_template.jinja").write_text("{% if enable_thinking %}think {% endif %}{{ messages[0].content }}")
    asked = ["enable_thinking", "enable", "enable_thinkin", ""]
    assert list(PromptTokenizer(path).template.unread(asked)) == ["enable", "enable_thinkin", ""]


def test_the_servers_own_template_takes_the_place_of_the_checkpoints(demo_model_path: Path) -> None:
    """It is what the prompts are rendered with; one that is none is refused when the tokenizer is loaded."""
    template = "{% for each in messages %}[{{ each.role }}] {{ each.content }}\n{% endfor %}"
    tokenizer = PromptTokenizer(demo_model_path, chat_template=template)
    assert tokenizer.template.render([{"role": "user", "content": "Hi."}]).text == "[user] Hi.\n"
    with pytest.raises(ValueError, match=r"chat_template is no Jinja template: .* line 1"):
        PromptTokenizer(demo_model_path, chat_template="{% for each in messages %}")


def test_template_faults_are_the_clients_errors(demo_model_path: Path, tmp_path: Path) -> None:
    """The template's own message is passed on; other failures become one sentence, and none escapes raw."""
    path = variant_of(demo_model_path, tmp_path / "model")
    user = [{"role": "user", "content": "x"}]
    for template, sentence in (
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ messages[0].content + 1 }}", "cannot render"),
        ("{{ messages[7].content.strip() }}", "refuses these messages"),
    ):
        (path / "chat_template.jinja").write_text(template)
        with pytest.raises(InvalidRequest, match=sentence):
            PromptTokenizer(path).template.render(user)
    (path / "chat_template.jinja").unlink()
    with pytest.raises(InvalidRequest, match="no chat template"):
        PromptTokenizer(path).template.render(user)


def test_a_template_that_takes_no_later_system_message_gets_it_as_the_users(
    demo_model_path: Path, tmp_path: Path
) -> None:
    """Agents send these, and two of one role in a row."""
    path = variant_of(demo_model_path, tmp_path / "model")
    (path / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if not loop.first and m.role in ('system', loop.previtem.role) %}"
        "{{ raise_exception('not so') }}{% endif %}{{ m.role }}: {{ m.content }}{{ m.tool_calls }}\n{% endfor %}"
    )
    said = ["system S", "system T", "user U", "user V", "system W", "assistant A", "assistant B", "system X", "user Y"]
    messages = [dict(zip(("role", "content"), words.split(), strict=True)) for words in said]
    template = PromptTokenizer(path).template
    rendered = template.render(messages)
    assert rendered.text == "system: S\n\nT\nuser: U\n\nV\n\nW\nassistant: A\n\nB\nuser: X\n\nY\n"
    assert rendered.system_text == "system: S\n\nT\n"
    assert rendered.text.startswith(template.render(messages[:7]).text)


@pytest.mark.parametrize(
    "name",
    ["chat_template", "tokenize", "tools", "conversation", "return_tensors"]
    + [f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")],
)
def test_template_kwargs_reach_neither_the_library_nor_the_models_special_tokens(
    tokenizer: PromptTokenizer, name: str
) -> None:
    """A client's variables cannot bring another template, or another end of a turn."""
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(InvalidRequest, match=f"chat_template_kwargs must not set {name}"):
        tokenizer.template.render(messages, **{name: "evil"})
    assert tokenizer.template.render(messages, enable_thinking=True) == tokenizer.template.render(messages)
    with pytest.raises(InvalidRequest):
        tokenizer.template.render(messages, **{"messages": []})


SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Rain?"}

every_family = pytest.mark.parametrize("name", FAMILIES)
Families = dict[str, PromptTokenizer]


@pytest.fixture(scope="module")
def families(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Families:
    parent = tmp_path_factory.mktemp("families")
    return {name: PromptTokenizer(family(name, demo_model_path, parent / name)) for name in FAMILIES}


@every_family
@pytest.mark.parametrize("leading", [[], [SYSTEM]], ids=["no system prompt", "system prompt"])
def test_the_system_text_holds_the_tools_and_tells_their_format(
    name: str, leading: list[Any], families: Families
) -> None:
    """It is a prefix of every conversation with those system messages and tools. (docs: caching)"""
    tokenizer = families[name]
    assert tokenizer.template.reads_tools
    assert find_parser(tokenizer) == FAMILIES[name]
    rendered = tokenizer.template.render([*leading, USER], [WEATHER])
    assert "get_weather" in rendered.system_text
    assert rendered.text.startswith(rendered.system_text)
    again = families[name].template.render([*leading, {"role": "user", "content": "\ue000 or else?"}], [WEATHER])
    assert again.system_text == rendered.system_text
    other = families[name].template.render([*leading, USER], [WEATHER, SEARCH])
    assert other.system_text != rendered.system_text


@pytest.mark.parametrize("name", ["hermes", "llama3"])
def test_a_longer_conversation_keeps_its_system_text(name: str, families: Families) -> None:
    """This includes one with calls; if a template puts tools before the last question, there is no system text."""
    first = families[name].template.render([SYSTEM, USER], [WEATHER])
    more = [{"role": "assistant", "content": "No."}, USER]
    assert families[name].template.render([SYSTEM, USER, *more], [WEATHER]).system_text == first.system_text
    assert families["mistral"].template.render([SYSTEM, USER, *more], [WEATHER]).system_text == ""


@pytest.mark.parametrize("byte_level", [True, False])
def test_special_tokens_are_shown_where_asked(byte_level: bool, demo_model_path: Path, tmp_path: Path) -> None:
    """They appear at their own places; all others stay out of the text."""
    if byte_level:
        tokenizer = PromptTokenizer(variant_of(demo_model_path, tmp_path / "model"))
    else:
        tokenizer = sentencepiece_like(tmp_path / "model", demo_model_path)
    text = "<|im_end|>the fox<|im_start|> jumps<|im_end|>"
    ids = tokenizer.encode(text, b"r" * 16).token_ids.tolist()
    for shown, expected in ((["<|im_start|>"], "the fox<|im_start|> jumps"), ([], "the fox jumps")):
        for size in (1, 2, len(ids)):
            decoder = tokenizer.decoder(shown)
            pieces = [decoder.push(ids[at : at + size]) for at in range(0, len(ids), size)]
            assert "".join([*pieces, decoder.flush()]).split() == expected.split()
