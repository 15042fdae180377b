# /// script
# dependencies = ["litellm[proxy]"]
# ///
"""LiteLLM's proxy before the server: the OpenAI client's chats and the Anthropic client's messages go through it."""

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from errand import ASKED, MODEL, QUESTION, SCHEMA, TOOLS, URL, report
from openai import OpenAI

KEY = "sk-" + secrets.token_hex(16)
PARAMETERS = {
    "write_note": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    "show_note": {"type": "object", "properties": {"capitals": {"type": "boolean"}}, "required": ["capitals"]},
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": SCHEMA}}


def chats(url: str, model: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key=KEY)
    tools: Any = [
        {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}
        for name, schema in PARAMETERS.items()
    ]
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    while True:
        answer = (
            client.chat.completions.create(model=model, messages=messages, tools=tools, temperature=0)
            .choices[0]
            .message
        )
        if not answer.tool_calls:
            break
        messages.append(answer.model_dump(exclude_none=True))
        for call in answer.tool_calls:
            result = TOOLS[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    asked: Any = [{"role": "user", "content": QUESTION}]
    verdict = client.chat.completions.create(model=model, messages=asked, response_format=FORMAT)
    report(answer.content, json.loads(verdict.choices[0].message.content))


def messages(url: str, model: str) -> None:
    """By httpx, since the proxy's environment need not have Anthropic's client."""
    tools = [{"name": name, "description": name, "input_schema": schema} for name, schema in PARAMETERS.items()]
    said: list[Any] = [{"role": "user", "content": ASKED}]
    while True:
        body = {"model": model, "max_tokens": 200, "messages": said, "tools": tools, "temperature": 0}
        answer = httpx.post(f"{url}/v1/messages", json=body, headers={"x-api-key": KEY}, timeout=120)
        content = answer.raise_for_status().json()["content"]
        uses = [block for block in content if block["type"] == "tool_use"]
        if not uses:
            break
        said.append({"role": "assistant", "content": content})
        results = [
            {"type": "tool_result", "tool_use_id": use["id"], "content": TOOLS[use["name"]](**use["input"])}
            for use in uses
        ]
        said.append({"role": "user", "content": results})
    report("".join(block["text"] for block in content if block["type"] == "text"))


def main() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = {"by-openai": f"openai/{MODEL}", "by-vllm": f"hosted_vllm/{MODEL}", "by-anthropic": f"anthropic/{MODEL}"}
    models = [
        {
            "model_name": name,
            "litellm_params": {"model": model, "api_key": "none", "api_base": URL if "anth" in name else f"{URL}/v1"},
        }
        for name, model in names.items()
    ]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(json.dumps({"model_list": models}))  # JSON is YAML
        command = [str(Path(sys.executable).parent / "litellm"), "--config", str(config), "--port", str(port)]
        environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": KEY}
        with (Path(folder) / "log").open("w+") as log:
            proxy = subprocess.Popen(
                [*command, "--host", "127.0.0.1"], stdout=log, stderr=log, env=environment, cwd=folder
            )
            try:
                url = f"http://127.0.0.1:{port}"
                wait_for(f"{url}/health/liveliness", proxy)
                chats(url, "by-openai")
                chats(url, "by-vllm")
                chats(url, "by-anthropic")
                messages(url, "by-openai")
                messages(url, "by-anthropic")
            except BaseException:
                print((Path(folder) / "log").read_text()[-5000:], file=sys.stderr)
                raise
            finally:
                proxy.terminate()
                proxy.wait()


def wait_for(url: str, proxy: "subprocess.Popen[bytes]") -> None:
    while proxy.poll() is None:
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise SystemExit("the proxy has ended")


main()
