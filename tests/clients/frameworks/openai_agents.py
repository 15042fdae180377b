# /// script
# dependencies = ["openai-agents"]
# ///
"""openai-agents, by responses and by chat completions."""

from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from errand import ASKED, MODEL, QUESTION, URL, report, show_note, write_note
from openai import AsyncOpenAI
from pydantic import BaseModel


class Verdict(BaseModel):
    city: Literal["Oslo", "Bergen"]
    done: bool


def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")
    tools = [function_tool(write_note), function_tool(show_note)]
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        model = kind(MODEL, client)
        done = Runner.run_sync(
            Agent(name="clerk", model=model, tools=tools, model_settings=ModelSettings(temperature=0)), ASKED
        )
        asked = Runner.run_sync(Agent(name="judge", model=model, output_type=Verdict), QUESTION)
        report(done.final_output, asked.final_output)


main()
