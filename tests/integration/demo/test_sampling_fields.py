"""Fields that decide which tokens are chosen, by the OpenAI client against a real instance of two replicas."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai import OpenAI

pytestmark = pytest.mark.integration

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["invoice", "order"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": SCHEMA}}


def ask(client: OpenAI, **fields: Any) -> Any:
    messages = [{"role": "user", "content": "What is it?"}]
    extra = {name: fields.pop(name) for name in list(fields) if name in VLLM}
    how: dict[str, Any] = {"max_tokens": 40, "seed": 5, "messages": messages, **fields}
    return client.chat.completions.create(model="demo", extra_body=extra, **how)


VLLM = {"structured_outputs", "repetition_penalty", "min_p", "min_tokens", "stop_token_ids", "bad_words",
        "include_stop_str_in_output", "continue_final_message", "add_generation_prompt", "ignore_eos"}  # fmt: skip


@pytest.mark.parametrize("temperature", [0, 1.3])
def test_an_answer_matches_its_schema(client: OpenAI, temperature: float) -> None:
    """Whole and streamed, greedy and sampled; the model's weights are random, so nothing but the grammar makes JSON."""
    whole = ask(client, response_format=FORMAT, temperature=temperature, n=3, max_tokens=400)
    for choice in whole.choices:
        found = json.loads(choice.message.content)
        assert found["kind"] in ("invoice", "order")
        assert 0 <= found["count"] <= 99
        assert choice.finish_reason == "stop"
    how: dict[str, Any] = {"response_format": FORMAT, "temperature": temperature, "max_tokens": 400}
    chunks = ask(client, **how, stream=True, ignore_eos=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content


def test_regex_choice_and_grammar(client: OpenAI) -> None:
    import re

    assert re.fullmatch(
        "[a-c]{4}-[0-9]{2}", ask(client, structured_outputs={"regex": "[a-c]{4}-[0-9]{2}"}).choices[0].message.content
    )
    assert ask(client, structured_outputs={"choice": ["yes", "no"]}).choices[0].message.content in ("yes", "no")
    lark = 'start: "<" WORD ">"\nWORD: /[xyz]{2}/'
    assert re.fullmatch("<[xyz]{2}>", ask(client, structured_outputs={"grammar": lark}).choices[0].message.content)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {
            "type": "object", "properties": {"a": {"type": "arr"}}}}}},
         "response_format.json_schema.schema", "at properties.a: Invalid type: arr"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias", "token ids from 0 to 4095"),
        ({"stop_token_ids": [4096]}, "stop_token_ids", "4096 is none"),
        ({"min_tokens": 41}, "min_tokens", "at most max_tokens, which is 40"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_a_400(client: OpenAI, fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said) as caught:
        ask(client, **fields)
    assert caught.value.param == param


def test_logprobs_come_with_their_tokens(client: OpenAI) -> None:
    """The tokens are the text; a greedy one is the likeliest; a stream tells the same; completions in their shape."""
    whole = ask(client, temperature=0, logprobs=True, top_logprobs=3, max_tokens=12)
    told = whole.choices[0].logprobs.content
    assert len(told) == whole.usage.completion_tokens == 12
    assert (
        bytes(byte for one in told for byte in one.bytes).decode(errors="replace") == whole.choices[0].message.content
    )
    assert all(one.logprob == one.top_logprobs[0].logprob and len(one.top_logprobs) == 3 for one in told)
    chunks = ask(client, temperature=0, logprobs=True, top_logprobs=3, max_tokens=12, stream=True)
    streamed = [one for chunk in chunks if chunk.choices and chunk.choices[0].logprobs
                for one in chunk.choices[0].logprobs.content]  # fmt: skip
    assert [one.bytes for one in streamed] == [one.bytes for one in told]
    response = client.responses.create(
        model="demo", input="What is it?", max_output_tokens=12, temperature=0, extra_body={"seed": 5},
        include=["message.output_text.logprobs"], top_logprobs=3,
    )  # fmt: skip
    (part,) = response.output[0].content
    assert [one.model_dump() for one in part.logprobs] == [one.model_dump() for one in told]
    old = client.completions.create(model="demo", prompt="Alpha", max_tokens=8, temperature=0, logprobs=2)
    logprobs = old.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.text_offset is not None
    assert logprobs.text_offset[0] == 0
    assert len(logprobs.tokens or ()) == len(logprobs.top_logprobs or ()) == 8
    for token, offset in zip(logprobs.tokens or (), logprobs.text_offset, strict=True):
        if not token.startswith("bytes:"):
            assert old.choices[0].text[offset:].startswith(token)


def test_echo_and_the_end_of_an_answer(client: OpenAI) -> None:
    """The prompt before the answer; stop strings and tokens as its last part."""
    plain = client.completions.create(model="demo", prompt="Alpha", max_tokens=8, temperature=0).choices[0].text
    echoed = client.completions.create(model="demo", prompt=["Alpha", "Beta"], max_tokens=8, temperature=0, echo=True)
    assert echoed.choices[0].text == "Alpha" + plain
    assert echoed.choices[1].text.startswith("Beta")
    stop = plain[3:5]
    ended = client.completions.create(
        model="demo", prompt="Alpha", max_tokens=8, temperature=0, stop=stop,
        extra_body={"include_stop_str_in_output": True},
    )  # fmt: skip
    assert ended.choices[0].text == plain[: plain.index(stop) + len(stop)]
    assert ended.choices[0].finish_reason == "stop"


def test_an_answer_goes_on_with_the_last_message(client: OpenAI) -> None:
    """The prompt ends with the message's text: what follows is what a completion of that prompt is."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The answer is"}]
    found = ask(client, messages=messages, temperature=0, max_tokens=8, continue_final_message=True)
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nThe answer is"
    expected = client.completions.create(model="demo", prompt=prompt, max_tokens=8, temperature=0)
    assert found.choices[0].message.content == expected.choices[0].text


def test_rules_change_answers_and_are_repeatable(client: OpenAI) -> None:
    said = ask(client, temperature=0, logprobs=True).choices[0]
    plain = said.message.content
    for fields in (
        {"frequency_penalty": 2, "presence_penalty": 2}, {"repetition_penalty": 1.8}, {"logit_bias": {"300": 100}},
        {"bad_words": [said.logprobs.content[0].token]}, {"min_p": 1.0, "temperature": 2},
    ):  # fmt: skip
        how = {"temperature": 0, **fields}
        first, second = (ask(client, **how).choices[0].message.content for _ in range(2))
        assert first == second
        assert (first == plain) == ("min_p" in fields)
