"""What a newcomer reads when an instance is ready: how to call it, and what it is not."""

from __future__ import annotations

import json

from serve_app.checkpoints.demo_model import RECIPES
from serve_app.checkpoints.sources.smollm2 import SMOLLM2
from serve_app.config.app import AppConfig


def greeting(settings: AppConfig, url: str) -> str:
    """Return the lines, with commands to paste."""
    model_name = settings.model_name
    key = "YOUR_KEY" if settings.tenants else "none"
    auth = " -H 'Authorization: Bearer YOUR_KEY'" if settings.tenants else ""
    operators = "   (both with an operator key)" if settings.tenants or settings.operator_key_sha256 else ""
    request = {"model": model_name, "stream": True, "messages": [{"role": "user", "content": "Hello"}]}
    body = json.dumps({**request, "temperature": 0, "max_tokens": 32})
    simulated = settings.engine_traits.simulated
    notes = {
        "This model has random weights: it answers nonsense. Bring another with --model.": settings.model in RECIPES,
        "SmolLM2-135M-Instruct writes full English sentences, which are not always true.": settings.model == SMOLLM2,
        "simulated: no model runs; tokens are made up and times come from a cost model.": simulated,
        "No API keys are configured: everyone who can reach this port is the tenant `default`.": not settings.tenants,
    }
    return f"""\
warmpath serves {model_name} at {url} with {settings.first_replicas} replicas (engine: {settings.engine})
{"".join(f"{note}{chr(10)}" for note, holds in notes.items() if holds)}
curl -N {url}/v1/chat/completions{auth} -H 'Content-Type: application/json' -d '{body}'

from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key="{key}")
stream = client.chat.completions.create(model="{model_name}", stream=True, temperature=0,
                                        max_tokens=32, messages=[{{"role": "user", "content": "Hello"}}])
for chunk in stream: print(chunk.choices[0].delta.content or "", end="", flush=True)

A chat, and the cache map: {url}/
What the caches hold: {url}/v1/cache/state   Metrics: {url}/metrics{operators}   Stop: Ctrl-C"""
