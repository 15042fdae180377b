"""Two tenants of one server ask the same question: each uses its own cache, and never the other's.

warmpath serve --config examples/tenants.yaml
python examples/chat_with_tenants.py
"""

import os

from openai import OpenAI

URL = os.environ.get("WARMPATH_URL", "http://127.0.0.1:8000")
KEYS = {"acme": "acme-key", "zeta": "zeta-key"}
"""The keys of examples/tenants.yaml; make your own with `warmpath keys new NAME`."""

HANDBOOK = "Handbook of the house. " + "Every guest is greeted, every bag is carried, every key is logged. " * 20


def ask(tenant: str, question: str) -> tuple[str, int, int]:
    """Return an answer, its cached tokens and its prompt tokens."""
    client = OpenAI(base_url=f"{URL}/v1", api_key=KEYS[tenant])
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "system", "content": HANDBOOK}, {"role": "user", "content": question}],
        temperature=0,
        max_tokens=24,
    )
    usage = answer.usage
    return answer.choices[0].message.content, usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens


if __name__ == "__main__":
    for tenant, question in (
        ("acme", "Who carries the bags?"),
        ("acme", "Who greets the guests?"),
        ("zeta", "Who carries the bags?"),
    ):
        text, cached, tokens = ask(tenant, question)
        print(f"{tenant}: {cached} of {tokens} tokens from the cache: {text!r}")
