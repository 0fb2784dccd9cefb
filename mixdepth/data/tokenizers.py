"""Tokenizers: bytes, a BPE trained on the corpus, or any of Hugging Face's. All are transformers' own objects."""

from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mixdepth.hf import smollm2

END = "\x00"
"""The end of a document. Text has no NUL: a file with one is refused as binary."""


def make_tokenizer(name: str, texts: Iterable[str]) -> Any:
    """`bytes`; `bpe:8192`, trained on the texts; or the name or folder of a Hugging Face tokenizer."""
    if name == "bytes":
        return byte_tokenizer()
    kind, _, size = name.partition(":")
    if kind == "bpe":
        return train_bpe(texts, bpe_size(name, size))
    try:
        return load_tokenizer(name)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"tokenizer {name!r} is neither 'bytes' nor 'bpe:SIZE' nor a Hugging Face tokenizer ({reason})"
        ) from error


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a folder, of a name of the hub, or of `smollm2`."""
    return (
        smollm2.tokenizer() if smollm2.is_meant(name) else AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    )


def byte_tokenizer() -> Any:
    """Token b is the byte b of the text's UTF-8; token 0 ends a document.

    >>> byte_tokenizer()("hé")["input_ids"]
    [104, 195, 169]
    """
    vocabulary = {letter: byte for byte, letter in bytes_to_unicode().items() if byte}
    tokenizer = Tokenizer(models.BPE(vocab={END: 0, **vocabulary}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _wrap(tokenizer)


def train_bpe(texts: Iterable[str], size: int) -> Any:
    """A byte-level BPE of `size` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return _wrap(tokenizer)


def bpe_size(name: str, size: str) -> int:
    if not size.isdigit() or int(size) < 258:
        raise ValueError(f"tokenizer {name!r} must say how many tokens it has, at least 258: 'bpe:8192'")
    return int(size)


def pieces(tokenizer: Any, ids: list[int]) -> list[tuple[str, int]]:
    """The text in pieces that are whole characters, each with the number of tokens that it is made of."""
    found, start = [], 0
    for end in range(1, len(ids) + 1):
        before = tokenizer.decode(ids[max(0, start - 8) : start], skip_special_tokens=True)  # a space may depend on it
        piece = tokenizer.decode(ids[max(0, start - 8) : end], skip_special_tokens=True).removeprefix(before)
        if piece.endswith("\ufffd") and end - start < 4 and end < len(ids):
            continue  # a character whose other bytes are still to come
        found.append((piece, end - start))
        start = end
    return found


def token_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """A text for each token. A character of several tokens stands at the first, and dots at the others.

    >>> token_texts(byte_tokenizer(), [104, 195, 169, 0])
    ['h', 'é', '⋯', '\\x00']
    """
    texts: list[str] = []
    for piece, length in pieces(tokenizer, ids):
        whole = piece or tokenizer.convert_ids_to_tokens(ids[len(texts)])  # special tokens have no text
        texts += [whole, *["⋯"] * (length - 1)]
    return texts


def _wrap(tokenizer: Tokenizer) -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )
