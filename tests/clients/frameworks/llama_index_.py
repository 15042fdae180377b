# /// script
# dependencies = ["llama-index-llms-openai-like"]
# ///
"""LlamaIndex' agent, and its structured answers."""

import asyncio
from typing import Literal

from errand import ASKED, MODEL, QUESTION, URL, report, show_note, write_note
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Verdict(BaseModel, extra="forbid"):
    """The verdict."""

    city: Literal["Oslo", "Bergen"]
    done: bool


async def main() -> None:
    model = OpenAILike(
        model=MODEL,
        api_base=f"{URL}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        strict=True,
        temperature=0,
    )
    done = await FunctionAgent(tools=[write_note, show_note], llm=model).run(ASKED)
    verdict = await model.astructured_predict(Verdict, PromptTemplate(QUESTION))
    report(done.response.content, verdict)


asyncio.run(main())
