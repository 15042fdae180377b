# /// script
# dependencies = ["langchain", "langchain-openai", "langchain-anthropic", "langgraph"]
# ///
"""LangChain's agent and LangGraph's, by chat completions, responses and Anthropic's messages."""

import warnings
from typing import Annotated, Any, Literal, TypedDict

from errand import ASKED, MODEL, QUESTION, URL, report, show_note, write_note
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic import BaseModel


class Verdict(BaseModel, extra="forbid"):
    """The verdict."""

    city: Literal["Oslo", "Bergen"]
    done: bool


class State(TypedDict):
    messages: Annotated[list[Any], add_messages]


def graph(model: Any) -> Any:
    """A loop of model and tools, built by hand."""
    bound = model.bind_tools([write_note, show_note])
    made = StateGraph(State)
    made.add_node("model", lambda state: {"messages": [bound.invoke(state["messages"])]})
    made.add_node("tools", ToolNode([write_note, show_note]))
    made.add_edge(START, "model")
    made.add_conditional_edges("model", tools_condition)
    made.add_edge("tools", "model")
    return made.compile()


def main() -> None:
    warnings.simplefilter("ignore")
    chat = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none")
    responses = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", use_responses_api=True)
    messages = ChatAnthropic(model=MODEL, base_url=URL, api_key="none")
    for model in (chat, responses, messages):
        methods = ("function_calling",) if model is messages else ("function_calling", "json_schema")
        verdicts = [model.with_structured_output(Verdict, method=method).invoke(QUESTION) for method in methods]
        sure = model.model_copy(update={"temperature": 0})
        for agent in (create_agent(sure, [write_note, show_note]), graph(sure)):
            done = agent.invoke({"messages": [{"role": "user", "content": ASKED}]})["messages"][-1]
            report(done.text if isinstance(done.text, str) else done.text(), *verdicts)


main()
