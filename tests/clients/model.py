"""A one-layer model, made here in seconds, that runs one errand with an agent's tools.

It calls a tool that writes a word to a file, then one that shows the file in capitals. It ends when it reads the
capitals, which only the real tool's output contains. Its attention is set by hand: it finds the latest mark of the
errand in a prompt of any length. The words that follow are trained, as pieces of one token each.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Protocol

from tests.serve_app.tokenization.variants import variant_of

NOTE = "note.txt"
PIECE_CHARS = 16
WIDTH, HEAD = 128, 32
SLOWEST = HEAD // 2 - 1
"""The head dimension that positions rotate least, here not at all: the content of a token counts, not its place."""


@dataclass(frozen=True, slots=True)
class Errand:
    """The model's work for one agent: ``writes`` and ``shows`` are its calls, as a tool's name and arguments."""

    word: str
    writes: tuple[str, Mapping[str, Any]]
    shows: tuple[str, Mapping[str, Any]]

    @property
    def asked(self) -> str:
        """The user's message."""
        return f"Keep the word {self.word} in {NOTE}, then show the file in capitals."

    @property
    def ends(self) -> str:
        """The last answer."""
        return f"The file says {self.word.upper()}."

    @property
    def answers(self) -> list[list[str]]:
        """The model's answers in order, each split into pieces."""
        calls = [
            f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'
            for name, arguments in (self.writes, self.shows)
        ]
        return [pieces(text) for text in (*calls, self.ends)]

    @property
    def marks(self) -> list[str]:
        """The texts that mark the errand's progress: asked for, written, shown."""
        written = self.answers[0]
        last = "".join(written).rindex(self.word) + len(self.word) - 1
        return [self.word, written[last // PIECE_CHARS], self.word.upper()]


class Script(Protocol):
    """What a model is trained for: an answer after each mark. A later mark outweighs earlier ones."""

    @property
    def marks(self) -> list[str]:
        """Texts of prompts, and pieces of answers."""
        ...

    @property
    def answers(self) -> list[list[str]]:
        """The answers, split into pieces."""
        ...


def pieces(text: str) -> list[str]:
    """Split an answer into texts of one token each."""
    return [text[at : at + PIECE_CHARS] for at in range(0, len(text), PIECE_CHARS)]


def trained(errands: Sequence[Script], source: Path, target: Path) -> Path:
    """Train a model for some errands and return its checkpoint, with the tokenizer and template of ``source``."""
    import torch  # slow to import, so skipped tests avoid it
    from tokenizers import AddedToken, Tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    words = chain(*(errand.marks for errand in errands), *(answer for errand in errands for answer in errand.answers))
    added = [AddedToken(word, normalized=False) for word in dict.fromkeys(words)]
    (variant_of(source, target, lambda tokenizer: tokenizer.add_tokens(added)) / "model.safetensors").unlink()
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    torch.manual_seed(7)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=WIDTH,
            intermediate_size=512,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=HEAD,
            max_position_embeddings=65_536,
            rope_parameters={"rope_type": "default", "rope_theta": 1e12},
            bos_token_id=None,
            eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        )
    )
    embeddings, attention = model.model.embed_tokens.weight, model.model.layers[0].self_attn
    with torch.no_grad():
        embeddings[:, :2] = 0
        embeddings /= 2 * embeddings.norm(dim=1, keepdim=True)
        embeddings[:, 1] = 0.5  # in every token, so that all have the same query
        for errand in errands:
            for stage, text in enumerate(errand.marks, 1):
                step = min(0.2, 1.2 / len(errand.marks))  # norms level larger values
                embeddings[tokenizer.token_to_id(text), 0] = step * stage  # a later mark outweighs all earlier ones
        for projection, dimension in ((attention.q_proj, 1), (attention.k_proj, 0)):
            projection.weight.zero_()
            projection.weight[SLOWEST, dimension] = 5.0
    for fixed in (embeddings, attention.q_proj.weight, attention.k_proj.weight):
        fixed.requires_grad = False
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=3e-3)
    batch, learned = (torch.tensor(rows) for rows in zip(*_lessons(errands, tokenizer), strict=True))
    loss = torch.tensor(1.0)
    for _ in range(1000):
        if loss.item() < 5e-4:  # agents sample at a temperature of 1
            break
        loss = torch.nn.functional.cross_entropy(model(batch, logits_to_keep=1).logits[:, -1], learned)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    else:
        raise ValueError(f"the model has not learned its errands: {loss.item()}")
    model.save_pretrained(target)
    return target


def _lessons(errands: Sequence[Script], tokenizer: Any) -> Iterator[tuple[list[int], int]]:
    """Yield a mark and a last token, and the token that follows them."""
    ends = tokenizer.token_to_id("<|im_end|>")
    begins = tokenizer.encode("assistant\n", add_special_tokens=False).ids[-1]
    for errand in errands:
        marks = [tokenizer.token_to_id(mark) for mark in errand.marks]
        for answer, read in zip(errand.answers, marks, strict=True):
            mark = read
            tokens = [begins, *map(tokenizer.token_to_id, answer), ends]
            for last, following in pairwise(tokens):
                if last in marks:
                    mark = last  # the model itself has just written it
                yield [mark, last], following
