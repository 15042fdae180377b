# /// script
# dependencies = ["smolagents[openai]"]
# ///
"""smolagents: its agent that calls tools, and a structured answer of its model."""

import json

from errand import ASKED, MODEL, QUESTION, SCHEMA, URL, report, show_note, write_note
from smolagents import OpenAIServerModel, ToolCallingAgent, tool


def main() -> None:
    model = OpenAIServerModel(MODEL, api_base=f"{URL}/v1", api_key="none")
    # By default it asks for `tool_choice: required`; the small model has learned free calls alone.
    free = OpenAIServerModel(MODEL, api_base=f"{URL}/v1", api_key="none", tool_choice="auto", temperature=0)
    done = ToolCallingAgent(tools=[tool(write_note), tool(show_note)], model=free, max_steps=6).run(ASKED)
    form = {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": SCHEMA}}
    said = model.generate([{"role": "user", "content": QUESTION}], response_format=form)
    report(done, json.loads(said.content))


main()
