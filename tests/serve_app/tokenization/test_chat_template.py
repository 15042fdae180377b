"""Conversations become text by the checkpoint's own template, and whatever is wrong with them is the client's error."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.errors import InvalidRequest
from serve_app.tokenization.tokenizer import PromptTokenizer
from tests.serve_app.tokenization.variants import variant_of


@pytest.fixture(scope="module")
def tokenizer(demo_model_path: Path) -> PromptTokenizer:
    return PromptTokenizer(demo_model_path)


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
        ("{{ messages | length }}{{ messages[0].content }}", ""),
        ("HEAD {{ messages[0].content }}{{ ' only' if messages | length == 1 else ' more' }}", "HEAD sys "),
        ("{% if messages | length == 1 %}{{ raise_exception('no user') }}{% endif %}{{ messages[0].content }}", ""),
    ],
)
def test_system_text_is_always_a_prefix(demo_model_path: Path, tmp_path: Path, template: str, system_text: str) -> None:
    """Templates that render system messages otherwise when alone give what is equal in both."""
    path = variant_of(demo_model_path, tmp_path / "model", None)
    (path / "chat_template.jinja").write_text(template)
    rendered = PromptTokenizer(path).template.render(
        [{"role": "system", "content": "sys"}, {"role": "user", "content": "u"}]
    )
    assert rendered.system_text == system_text
    assert rendered.text.startswith(system_text)


def test_a_variable_that_the_template_does_not_have_is_known(demo_model_path: Path, tmp_path: Path) -> None:
    """As whole words: ``enable`` is not ``enable_thinking``."""
    path = variant_of(demo_model_path, tmp_path / "model", None)
    (path / "chat_template.jinja").write_text("{% if enable_thinking %}think {% endif %}{{ messages[0].content }}")
    asked = ["enable_thinking", "enable", "enable_thinkin", ""]
    assert list(PromptTokenizer(path).template.unread(asked)) == ["enable", "enable_thinkin", ""]


def test_template_faults_are_the_clients_errors(demo_model_path: Path, tmp_path: Path) -> None:
    """What the template says is passed on; other failures in it become one sentence; none gets out raw."""
    path = variant_of(demo_model_path, tmp_path / "model", None)
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


@pytest.mark.parametrize(
    "name",
    ["chat_template", "tokenize", "tools", "conversation", "return_tensors"]
    + [f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")],
)
def test_template_kwargs_reach_neither_the_library_nor_the_models_special_tokens(
    tokenizer: PromptTokenizer, name: str
) -> None:
    """A client's variables are only that: it brings no template of its own, and no other end of a turn."""
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(InvalidRequest, match=f"chat_template_kwargs must not set {name}"):
        tokenizer.template.render(messages, **{name: "evil"})
    assert tokenizer.template.render(messages, enable_thinking=True) == tokenizer.template.render(messages)
    with pytest.raises(InvalidRequest):
        tokenizer.template.render(messages, **{"messages": []})
