"""Answers a question from documents, after a public prompt: all tenants share its KV, but not the documents' KV.

warmpath serve --config examples/tenants.yaml
python examples/rag.py "What happens when a replica dies?"
"""

import os
import re
import sys
from collections import Counter
from pathlib import Path

from openai import OpenAI

URL = os.environ.get("WARMPATH_URL", "http://127.0.0.1:8000")
DOCUMENTS = Path(__file__).parents[1] / "docs" / "explanation"


def words(text: str) -> Counter[str]:
    """Return the frequency of each word in a text."""
    return Counter(re.findall(r"[a-z]{4,}", text.lower()))


def best(question: str, count: int = 2) -> list[str]:
    """Return the passages with most of the question's words, in a fixed order, so that prompts share more."""
    passages = [part for page in sorted(DOCUMENTS.glob("*.md")) for part in page.read_text().split("\n## ")[1:]]
    wanted = words(question)
    ranked = sorted(passages, key=lambda passage: -sum((words(passage) & wanted).values()))
    return sorted(ranked[:count], key=passages.index)


if __name__ == "__main__":
    question = " ".join(sys.argv[1:]) or "What happens when a replica dies?"
    client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("WARMPATH_API_KEY", "acme-key"))
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "\n\n".join([*best(question), question])}],
        temperature=0,
        max_tokens=48,
        extra_body={"prompt_ref": "librarian@1"},
    )
    print(answer.choices[0].message.content)
    print(answer.usage.prompt_tokens_details.cached_tokens, "of", answer.usage.prompt_tokens, "tokens from the cache")
