"""A model of one layer, made here in seconds, that runs one errand with an agent's tools.

It calls a tool that writes a word to a file, then one that shows the file in capitals, and it ends once it reads the
capitals, which stand in the output of the real tool alone. Its attention is set: it finds the latest mark of the errand
in a prompt of any length. Which words follow is trained; they are pieces of its answers, a token each.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from tests.serve_app.tokenization.variants import variant_of

NOTE = "note.txt"
PIECE_CHARS = 16
WIDTH, HEAD = 128, 32
SLOWEST = HEAD // 2 - 1
"""The dimension of a head that positions turn least, here not at all: what was read counts, not where."""


@dataclass(frozen=True, slots=True)
class Errand:
    """What the model does for one agent: ``writes`` and ``shows`` are its calls, a tool's name and its arguments."""

    word: str
    writes: tuple[str, Mapping[str, Any]]
    shows: tuple[str, Mapping[str, Any]]

    @property
    def asked(self) -> str:
        """What a user says."""
        return f"Keep the word {self.word} in {NOTE}, then show the file in capitals."

    @property
    def ends(self) -> str:
        """The last answer."""
        return f"The file says {self.word.upper()}."

    @property
    def answers(self) -> list[list[str]]:
        """What the model says, in its order, in pieces."""
        calls = [
            f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'
            for name, arguments in (self.writes, self.shows)
        ]
        texts = (*calls, self.ends)
        return [[text[at : at + PIECE_CHARS] for at in range(0, len(text), PIECE_CHARS)] for text in texts]


def marks(errands: Sequence[Errand]) -> list[list[str]]:
    """Return for each errand the texts by which the model knows how far it is: asked for, written, shown."""
    found = []
    for errand in errands:
        written = errand.answers[0]
        last = "".join(written).rindex(errand.word) + len(errand.word) - 1
        found.append([errand.word, written[last // PIECE_CHARS], errand.word.upper()])
    return found


def trained(errands: Sequence[Errand], source: Path, target: Path) -> Path:
    """Make a model for some errands and return its checkpoint; ``source``: one whose tokenizer and template it has."""
    import torch  # seconds, which tests that are skipped do without
    from tokenizers import AddedToken, Tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    words = chain(*marks(errands), *(answer for errand in errands for answer in errand.answers))
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
        embeddings[:, 1] = 0.5  # in every token, so that each asks alike
        for errand_marks in marks(errands):
            for stage, text in enumerate(errand_marks, 1):
                embeddings[tokenizer.token_to_id(text), 0] = 0.2 * stage  # a later mark outweighs all before it
        for projection, dimension in ((attention.q_proj, 1), (attention.k_proj, 0)):
            projection.weight.zero_()
            projection.weight[SLOWEST, dimension] = 5.0
    for fixed in (embeddings, attention.q_proj.weight, attention.k_proj.weight):
        fixed.requires_grad = False
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=3e-3)
    batch, learned = (torch.tensor(rows) for rows in zip(*_lessons(errands, tokenizer), strict=True))
    loss = torch.tensor(1.0)
    for _ in range(1000):
        if loss.item() < 5e-4:  # agents ask for a temperature of 1
            break
        loss = torch.nn.functional.cross_entropy(model(batch).logits[:, -1], learned)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    else:
        raise ValueError(f"the model has not learned its errands: {loss.item()}")
    model.save_pretrained(target)
    return target


def _lessons(errands: Sequence[Errand], tokenizer: Any) -> Iterator[tuple[list[int], int]]:
    """Yield a mark and a last token, and what the model says then."""
    ends = tokenizer.token_to_id("<|im_end|>")
    begins = tokenizer.encode("assistant\n", add_special_tokens=False).ids[-1]
    for errand, (asked, written, shown) in zip(errands, marks(errands), strict=True):
        mark = asked
        for answer, read in zip(errand.answers, (asked, written, shown), strict=True):
            mark = read
            tokens = [begins, *map(tokenizer.token_to_id, answer), ends]
            for last, following in pairwise(tokens):
                if last == tokenizer.token_to_id(written):
                    mark = written  # it has just said so itself
                yield [tokenizer.token_to_id(mark), last], following
