"""Small tokenizers of three kinds, trained here on made words, in checkpoints that can be served."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.serve_app.tokenization.variants import variant_of

SYLLABLES = ("ba", "ce", "di", "fo", "gu", "ka", "le", "mi", "no", "ru")
WORDS = ["".join(parts) for parts in product(SYLLABLES, SYLLABLES)]
SPECIAL = ["<pad>", "<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "[UNK]", "[CLS]", "[SEP]"]
CORPUS = [" ".join(WORDS[at:] + WORDS[:at]) for at in range(20)]


def byte_level() -> Tokenizer:
    """Return one like GPT-2's: byte-level BPE that adds nothing."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=700, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    return made


def sentencepiece() -> Tokenizer:
    """Return one like Llama 2's: spaces as U+2581, one before the text, and a BOS."""
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL, show_progress=False))
    made.pre_tokenizer = None  # type: ignore[assignment]  # as in Llama's: a text is one piece
    bos = ("<s>", made.token_to_id("<s>"))
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    return made


def unigram() -> Tokenizer:
    """Return one like T5's: Unigram, an end token behind each text."""
    # Trained on so few words it would keep their syllables alone.
    letters = sorted({letter for word in WORDS for letter in word})
    scores = dict.fromkeys(SPECIAL, 0.0) | {f"\u2581{word}": -6.0 for word in WORDS}
    scores |= dict.fromkeys((*SYLLABLES, "\u2581"), -7.0) | dict.fromkeys(letters, -9.0)
    made = Tokenizer(models.Unigram(list(scores.items()), unk_id=1, byte_fallback=False))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    end = ("</s>", made.token_to_id("</s>"))
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[end])
    return made


def word_piece() -> Tokenizer:
    """Return one like BERT's: WordPiece in lower case, between [CLS] and [SEP]."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False)
    )
    around = [(name, made.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=around)
    return made


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level BPE": byte_level, "SentencePiece with BOS": sentencepiece, "Unigram with EOS": unigram,
    "WordPiece with both": word_piece,
}  # fmt: skip
"""How to make each."""


def checkpoint_with(tokenizer: Tokenizer, source: Path, target: Path) -> Path:
    """Copy a checkpoint with another tokenizer of fewer tokens."""
    variant_of(source, target)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    (target / "tokenizer.json").write_text(tokenizer.to_str())
    config = json.loads((target / "tokenizer_config.json").read_text())
    config |= {"bos_token": "<s>" if tokenizer.num_special_tokens_to_add(is_pair=False) == 1 else None}
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    return target
