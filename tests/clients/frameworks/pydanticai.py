# /// script
# dependencies = ["pydantic-ai-slim[openai,anthropic]"]
# ///
"""pydantic-ai, by chat completions and by Anthropic's messages; structured answers as a tool and as a format."""

from typing import Literal

from errand import ASKED, MODEL, QUESTION, URL, report, show_note, write_note
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Verdict(BaseModel, extra="forbid"):
    city: Literal["Oslo", "Bergen"]
    done: bool


def main() -> None:
    chat = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))
    messages = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key="none"))
    for model in (chat, messages):
        done = Agent(model, tools=[write_note, show_note], model_settings={"temperature": 0}).run_sync(ASKED)
        by_tool = Agent(model, output_type=Verdict).run_sync(QUESTION)
        report(done.output, by_tool.output)
    report(None, Agent(chat, output_type=NativeOutput(Verdict)).run_sync(QUESTION).output)


main()
