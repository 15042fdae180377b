"""An agent with two tools. Each turn sends the whole conversation again, and its prefix is in the cache.

warmpath serve Qwen/Qwen3-0.6B        # the model needs a chat template with tools
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
    """Run a tool; return its result, or an error for wrong arguments."""
    try:
        return str(prod(json.loads(arguments)["numbers"])) if name == "multiply" else date.today().isoformat()
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error}"


def described(name: str) -> dict:
    """Return a tool's description for the API."""
    text, fields = TOOLS[name]
    parameters = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}


if __name__ == "__main__":
    client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("WARMPATH_API_KEY", "none"))
    session = {"x-session-id": uuid4().hex}  # optional: the server also recognizes the session by its prompts
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
