"""What holds in every API, over a real socket with the real clients; the model's text is scripted."""

from typing import Any

import httpx
import pytest

from serve_app.errors import GenerationFailed, InvalidRequest
from tests.serve_app.ingress.apis import (
    APIS,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    Api,
    Clients,
    assert_same_events,
    every_api,
    every_chat,
)
from tests.serve_app.ingress.scripted import PATIENCE_S, Script
from tests.serve_app.tool_templates.families import call_text

CALL = call_text("get_weather", {"city": "Oslo"}, "hermes")
FORCED = '[{"name": "get_weather", "parameters": {"city": "Oslo"}}]'


@every_api
@pytest.mark.parametrize("step", [1, 1000])
def test_text_in_text_out(clients: Clients, script: Script, api: Api, step: int) -> None:
    """The model sees the system prompt, a stop string ends the answer, and usage reports the cached tokens."""
    script.text, script.step = "It rains. END of it", step
    stop: Any = {api.stop: ["END"]} if api.stop else {}
    for ask in (api.whole, api.streamed):
        answer = ask(clients, **api.system("Be brief."), **stop)
        assert (answer.text, answer.ended) == (("It rains. ", api.ends[3]) if stop else (script.text, api.ends[0]))
        assert answer.counts[:2] == (len(script.asked[-1].token_ids), 16)
        assert "Be brief." in script.prompt()


@every_api
@pytest.mark.parametrize(("text", "reason", "said"), [("It rai", "length", "It rai"), ("<|im_end|>", "stop", "")])
def test_an_answer_may_be_cut_off_or_have_no_text(
    clients: Clients, script: Script, api: Api, text: str, reason: Any, said: str
) -> None:
    script.text, script.reason = text, reason
    for ask in (api.whole, api.streamed):
        answer = ask(clients)
        assert (answer.text, answer.ended) == (said, api.ends[reason == "length"])
        assert answer.parts == ["text"] or (not said and api is not RESPONSES)


@every_chat
@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_call_that_the_length_cuts_has_the_arguments_so_far(
    clients: Clients, script: Script, api: Api, choice: str, step: int
) -> None:
    """The end tells that more would have come, and no text has the call's form; a whole message has an object."""
    text = FORCED if choice == "required" else CALL
    script.text, script.reason, script.step = text[: text.index("Oslo") + 2], "length", step
    for ask in (api.whole, api.streamed):
        answer = ask(clients, **api.tools(choice=choice))
        closed = '"}' if ask == MESSAGES.whole else ""
        assert answer.calls == [("get_weather", '{"city": "Os' + closed)]
        assert (answer.text, answer.ended) == ("", api.ends[1])
        assert api is CHAT or answer.parts == ["call"]


SERVED = {"auto": "default", "default": "default", "flex": "flex", "priority": "priority", None: ""}


@pytest.mark.parametrize(
    ("api", "tier", "served"),
    [
        *((CHAT, *each) for each in SERVED.items()),
        *((COMPLETIONS, tier, "") for tier in SERVED),
        *((RESPONSES, tier, served or "default") for tier, served in SERVED.items()),
        *((MESSAGES, tier, "standard") for tier in ("auto", "standard_only", None)),
    ],
)
def test_answers_say_which_tier_was_served(
    clients: Clients, script: Script, api: Api, tier: str | None, served: str
) -> None:
    """Chats if they ask for one, as in OpenAI's API; completions have no such field, messages one tier. (docs: api)"""
    script.text = "It rains."
    for ask in (api.whole, api.streamed):
        assert ask(clients, **({} if tier is None else {"service_tier": tier})).tier == served
        assert tier is not None or script.asked[-1].order == 0


@pytest.mark.parametrize(
    ("api", "field", "value"),
    [
        *((api, "service_tier", value) for api in APIS for value in ("fast", 1)),
        (MESSAGES, "service_tier", "priority"),
        *((api, "priority", value) for api in APIS[:3] for value in (0.5, 2**31, "high")),
    ],
)
def test_an_unknown_tier_is_refused(hermes: tuple[str, Script], api: Api, field: str, value: Any) -> None:
    """The error names the field and its values."""
    tiers = "auto or standard_only" if api is MESSAGES else "auto, default, flex or priority"
    values = tiers if field == "service_tier" else "a whole number from -2147483648 to 2147483647"
    refused = api.post(hermes[0], **{field: value})
    error = refused.json()["error"]
    assert (refused.status_code, error["message"]) == (400, f"{field} must be {values}.")
    assert api is MESSAGES or error["param"] == field


@pytest.mark.parametrize("api", APIS[:3])
def test_a_body_without_a_model_is_for_the_served_one(hermes: tuple[str, Script], api: Api) -> None:
    """The clients' types want one, but vLLM does not."""
    for body in (api.body, {**api.body, "model": None}):
        assert httpx.post(hermes[0] + api.path, json=body, timeout=PATIENCE_S).json()["model"] == "demo"


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("case", ["plain", "stop", "tools", "fails"])
@every_api
def test_events_are_the_same_for_either_path_of_tokens(
    hermes: tuple[str, Script], script: Script, api: Api, case: str, step: int
) -> None:
    script.step, script.text = step, "Größe: 3 €. \U0001f327 It rains in \u5317\u4eac. END of it, and of more."
    fields: dict[str, Any] = {}
    if case == "stop" and api.stop:
        fields = {api.stop: ["END"]}
    elif case == "tools" and api is not COMPLETIONS:
        fields, script.text = api.tools(), "Let me look. " + CALL
    elif case == "fails":
        script.fails = GenerationFailed("broken")
    assert_same_events(hermes[0], script, api, **fields)


@pytest.mark.parametrize("text", ["", "It rains"])
@every_api
def test_a_grammar_that_fails_in_an_answer_is_an_error_of_the_api(
    hermes: tuple[str, Script], script: Script, api: Api, text: str
) -> None:
    """A 400 that names the field; in a stream that has begun, an event."""
    script.text, script.fails = text, InvalidRequest("f cannot be followed: x.", param="f")
    for stream in (False, True):
        answer = api.post(hermes[0], stream=stream)
        assert answer.status_code == (200 if stream and text else 400)
        assert "invalid_request_error" in answer.text and "f cannot be followed: x." in answer.text
