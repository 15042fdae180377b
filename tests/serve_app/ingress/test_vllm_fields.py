"""Fields of vLLM's API over a real socket: token ids, truncated prompts, echoes, usage in every chunk."""

from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.serve_app.ingress.apis import CHAT, Clients
from tests.serve_app.ingress.scripted import Script
from tests.serve_app.tool_templates.families import WEATHER, call_text

ASKED: dict[str, Any] = {"model": "demo", **CHAT.user("Rain in Oslo?")}
COMPLETION: dict[str, Any] = {"model": "demo", "prompt": ["Rain?", "Sun?"]}
CALL = call_text("get_weather", {"city": "Oslo"}, "hermes")


def chat(client: OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{**ASKED, **fields})


def complete(client: OpenAI, **fields: Any) -> Any:
    return client.completions.create(**{**COMPLETION, **fields})


def ids_of(script: Script, text: str) -> list[int]:
    found: list[int] = script.tokenizer.encode(text, b"r" * 16).token_ids.tolist()
    return found


def prompts(script: Script, count: int) -> list[list[int]]:
    return [made.token_ids.tolist() for made in script.asked[-count:]]


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("text", ["It rains.", "Let me look. " + CALL])
def test_token_ids_are_those_of_prompts_and_answers(client: OpenAI, script: Script, text: str, step: int) -> None:
    """A stream's add up, also where calls are read out of the text; without the field there are none."""
    script.text, script.step = text, step
    answer = ids_of(script, text)
    extra: Any = {"extra_body": {"return_token_ids": True}, "tools": [WEATHER]}
    told = chat(client, n=2, **extra).to_dict()
    assert told["prompt_token_ids"] == prompts(script, 1)[0]
    assert [choice["token_ids"] for choice in told["choices"]] == [answer] * 2
    chunks = [chunk.to_dict() for chunk in chat(client, n=2, stream=True, **extra)]
    assert [chunk.get("prompt_token_ids") for chunk in chunks if "prompt_token_ids" in chunk] == prompts(script, 1)
    assert "prompt_token_ids" in chunks[0]
    for index in range(2):
        of = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert [token_id for choice in of for token_id in choice["token_ids"]] == answer
    del extra["tools"]
    told = complete(client, **extra).to_dict()
    assert [choice["prompt_token_ids"] for choice in told["choices"]] == prompts(script, 2)
    assert [choice["token_ids"] for choice in told["choices"]] == [answer] * 2
    chunks = [chunk.to_dict() for chunk in complete(client, stream=True, **extra)]
    for index, prompt in enumerate(prompts(script, 2)):
        of = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert [choice["prompt_token_ids"] for choice in of if "prompt_token_ids" in choice] == [prompt]
        assert [token_id for choice in of for token_id in choice["token_ids"]] == answer
    assert "token_ids" not in str(chat(client).to_dict()) + str(complete(client).to_dict())


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("text", ["It rains.", "Let me look. " + CALL])
@pytest.mark.parametrize("own", [False, True])
def test_token_ids_include_the_end_token(client: OpenAI, script: Script, text: str, step: int, own: bool) -> None:
    """As in vLLM: the model's own or one of stop_token_ids. Text and usage are as without it."""
    chat(client)
    script.text, script.step = text, step
    ends = script.asked[-1].sampling.stop_token_ids
    script.end_token = ids_of(script, "until")[0] if own else ends[-1]
    more = {"stop_token_ids": [script.end_token]} if own else {}
    answer = [*ids_of(script, text), script.end_token]
    extra: Any = {"extra_body": {"return_token_ids": True, **more}, "tools": [WEATHER]}
    plain = chat(client, tools=[WEATHER], extra_body=more).to_dict()
    told = chat(client, **extra).to_dict()
    assert told["choices"][0].pop("token_ids") == answer
    plain_message, message = (each["choices"][0]["message"] for each in (plain, told))
    assert message["content"] == plain_message["content"]
    assert (told["choices"][0]["finish_reason"], told["usage"]["completion_tokens"]) == (
        plain["choices"][0]["finish_reason"], plain["usage"]["completion_tokens"],
    )  # fmt: skip
    streamed = [choice for chunk in chat(client, stream=True, **extra) for choice in chunk.to_dict()["choices"]]
    assert [token_id for choice in streamed for token_id in choice["token_ids"]] == answer
    del extra["tools"]
    for choice in complete(client, **extra).choices:
        assert (choice.to_dict()["token_ids"], choice.text) == (answer, script.text)
    shown = complete(client, extra_body={**extra["extra_body"], "include_stop_str_in_output": True}).choices[0]
    assert (shown.to_dict()["token_ids"], shown.text == text) == (answer, not own)


def test_token_ids_end_at_a_stop_string(client: OpenAI, script: Script) -> None:
    script.text, script.step = "It rains. END and more", 1000
    told = chat(client, stop=["END"], extra_body={"return_token_ids": True}).to_dict()["choices"][0]
    assert script.tokenizer.text_of(told["token_ids"]).startswith("It rains. END")
    assert len(told["token_ids"]) < len(ids_of(script, script.text))


@pytest.mark.parametrize("create", [chat, complete])
def test_usage_may_come_in_every_chunk(client: OpenAI, script: Script, create: Any) -> None:
    """It grows to that of the end; it needs include_usage, as in vLLM."""
    script.text, script.step = "It rains till noon, and then the sun comes out.", 3
    both = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(create(client, stream=True, stream_options=both))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert len(set(counts)) > 3
    assert {chunk.usage.prompt_tokens for chunk in chunks} >= {chunks[-1].usage.prompt_tokens}
    assert (counts[-1], chunks[-1].choices) == (counts[-2], [])
    for fewer in ({"include_usage": True}, {"continuous_usage_stats": True}):
        *others, _ = create(client, stream=True, stream_options=fewer)
        assert [chunk.usage for chunk in others] == [None] * len(others)


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_a_prompt_is_cut_to_the_tokens_that_are_kept(client: OpenAI, script: Script, side: str | None) -> None:
    """One that is too long for the model fits, too; a prompt that has no more tokens stays whole."""
    for create in (chat, complete):
        create(client)
        whole = prompts(script, 1)[0]
        for count in (5, 1, len(whole), 4000):
            more = {"truncate_prompt_tokens": count, **({"truncation_side": side} if side else {})}
            told = create(client, extra_body=more)
            kept = whole[:count] if side == "right" else whole[-count:]
            assert prompts(script, 1)[0] == kept
            assert told.usage.prompt_tokens == sum(map(len, prompts(script, len(told.choices))))
    words = "rain " * 20_000
    for count, room in ((100, 100), (-1, 8192 - 50)):
        complete(client, prompt=words, max_tokens=50, extra_body={"truncate_prompt_tokens": count})
        assert len(prompts(script, 1)[0]) == room
        chat(client, messages=[{"role": "user", "content": words}], max_tokens=50,
             extra_body={"truncate_prompt_tokens": count})  # fmt: skip
        assert len(prompts(script, 1)[0]) == room
    with pytest.raises(openai.BadRequestError, match="truncate_prompt_tokens"):
        chat(client, extra_body={"truncate_prompt_tokens": -2})


@pytest.mark.parametrize("ask", [CHAT.whole, CHAT.streamed])
def test_a_chat_may_repeat_the_message_that_it_continues(clients: Clients, script: Script, ask: Any) -> None:
    """Its words are no call and no reasoning of the answer; another role's are not repeated."""
    script.text = "and cold."
    said, rain = f"It is {CALL} wet ", CHAT.user("Rain in Oslo?")
    spoken = {"messages": [*rain["messages"], {"role": "assistant", "content": said}]}
    for more, text in (
        ({**spoken, "continue_final_message": True}, said + "and cold."),
        (spoken, said + "and cold."),
        (rain, "and cold."),
        ({**rain, "add_generation_prompt": False}, "Rain in Oslo?and cold."),
    ):
        answer = ask(clients, tools=[WEATHER], echo=True, **more)
        assert (answer.text, answer.calls) == (text, [])
    with pytest.raises(openai.BadRequestError, match="does not go with add_generation_prompt"):
        ask(clients, echo=True, **spoken, continue_final_message=True, add_generation_prompt=True)
