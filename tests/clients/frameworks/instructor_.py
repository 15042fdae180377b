# /// script
# dependencies = ["instructor"]
# ///
"""instructor: structured answers as a tool and as a format. It runs no tools itself, so the loop here is short."""

from typing import Literal

import instructor
from errand import ASKED, MODEL, QUESTION, URL, report, show_note, write_note
from openai import OpenAI
from pydantic import BaseModel


class Verdict(BaseModel, extra="forbid"):
    city: Literal["Oslo", "Bergen"]
    done: bool


class WriteNote(BaseModel, extra="forbid"):
    text: Literal["larch"]


class ShowNote(BaseModel, extra="forbid"):
    capitals: Literal[True]


def main() -> None:
    client = OpenAI(base_url=f"{URL}/v1", api_key="none")
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        ask = instructor.from_openai(client, mode=mode).chat.completions.create
        verdict = ask(model=MODEL, response_model=Verdict, messages=[{"role": "user", "content": QUESTION}])
        messages = [{"role": "user", "content": ASKED}]
        written = ask(model=MODEL, response_model=WriteNote, messages=messages)
        messages += [{"role": "assistant", "content": write_note(written.text)}]
        shown = ask(model=MODEL, response_model=ShowNote, messages=messages)
        report(show_note(shown.capitals), verdict)


main()
