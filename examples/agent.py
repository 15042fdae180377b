"""An agent with two tools. Each turn sends the whole conversation again, and finds it in the cache.

warmpath serve Qwen/Qwen3-0.6B        # a model whose chat template knows tools
python examples/agent.py "What is 17 times 23, and what is the day today?"
"""

import json
import os
import sys
from datetime import date
from math import prod
from uuid import uuid4

from openai import OpenAI

URL = os.environ.get("WARMPATH_URL", "http://127.0.0.1:8000")
TURNS = 8
TOOLS = {
    "multiply": ("Multiply numbers.", {"numbers": {"type": "array", "items": {"type": "number"}, "maxItems": 8}}),
    "today": ("Tell the date of today.", {}),
}


def run(name: str, arguments: str) -> str:
    """Run a tool; return what it says, also of arguments that are wrong."""
    try:
        return str(prod(json.loads(arguments)["numbers"])) if name == "multiply" else date.today().isoformat()
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error}"


def described(name: str) -> dict:
    """Return a tool as the API takes it."""
    text, fields = TOOLS[name]
    parameters = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}


if __name__ == "__main__":
    client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("WARMPATH_API_KEY", "none"))
    session = {"x-session-id": uuid4().hex}  # optional: the server finds the session by the prompts, too
    messages = [{"role": "user", "content": " ".join(sys.argv[1:]) or "What is 17 times 23?"}]
    options = {"model": client.models.list().data[0].id, "tools": list(map(described, TOOLS)), "temperature": 0}
    for turn in range(TURNS):
        forced = "required" if turn == 0 else "none" if turn == TURNS - 1 else "auto"
        answer = client.chat.completions.create(
            messages=messages, tool_choice=forced, max_tokens=128, extra_headers=session, **options
        )
        message, usage = answer.choices[0].message, answer.usage
        print(f"turn {turn + 1}: {usage.prompt_tokens_details.cached_tokens} of {usage.prompt_tokens} tokens cached")
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            result = run(call.function.name, call.function.arguments)
            print(f"  {call.function.name}({call.function.arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            print(message.content)
            break
