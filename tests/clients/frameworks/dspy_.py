# /// script
# dependencies = ["dspy"]
# ///
"""dspy: ReAct with its own text format, and a structured answer."""

from typing import Literal

import dspy
from errand import ASKED, MODEL, QUESTION, SCHEMA, URL, report, show_note, write_note


class Judge(dspy.Signature):
    """Judge."""

    question: str = dspy.InputField()
    city: Literal["Oslo", "Bergen"] = dspy.OutputField()
    done: bool = dspy.OutputField()


def main() -> None:
    model = dspy.LM(
        f"openai/{MODEL}", api_base=f"{URL}/v1", api_key="none", cache=False, temperature=0.0, max_tokens=500
    )
    dspy.configure(lm=model)
    done = dspy.ReAct("question -> answer", tools=[write_note, show_note], max_iters=6)(question=ASKED)
    with dspy.context(adapter=dspy.JSONAdapter()):
        form = {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": SCHEMA}}
        verdict = dspy.Predict(Judge)(question=QUESTION, config={"response_format": form})
    report(done.answer, {"city": verdict.city, "done": verdict.done})


main()
