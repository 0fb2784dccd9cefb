"""Tokenizers: bytes, a BPE trained on the corpus, or any of Hugging Face. All are objects of transformers."""

from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mixdepth.hf import smollm2

END = "\x00"
"""The token that ends a document. No text has a NUL: a file with one is refused as binary."""
MIN_BPE_SIZE = 258
"""The size of a byte-level BPE with one merge: 256 bytes, the end of a document, and the merge."""
NUM_BEFORE = 8
"""How many tokens before a piece are decoded with it: whether it begins with a space may depend on them."""
LONGEST_CHARACTER = 4
"""No character of UTF-8 has more bytes, and so none has more tokens."""


def make_tokenizer(name: str, texts: Iterable[str]) -> Any:
    """Make the tokenizer `bytes`, train `bpe:8192` on the texts, or load a Hugging Face tokenizer by name or folder."""
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
    """Load the tokenizer of a folder, of a name of the hub, or of `smollm2`."""
    if smollm2.is_meant(name):
        return smollm2.tokenizer()
    return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


def byte_tokenizer() -> Any:
    """Make the tokenizer in which token b is the byte b of the text in UTF-8. Token 0 ends a document.

    >>> byte_tokenizer()("hé")["input_ids"]
    [104, 195, 169]
    """
    vocabulary = {letter: byte for byte, letter in bytes_to_unicode().items() if byte}
    tokenizer = Tokenizer(models.BPE(vocab={END: 0, **vocabulary}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _wrap(tokenizer)


def train_bpe(texts: Iterable[str], size: int) -> Any:
    """Train a byte-level BPE of `size` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return _wrap(tokenizer)


def bpe_size(name: str, size: str) -> int:
    """Read the number of tokens in the name of a BPE."""
    if not size.isdigit() or int(size) < MIN_BPE_SIZE:
        raise ValueError(f"tokenizer {name!r} must say how many tokens it has, at least {MIN_BPE_SIZE}: 'bpe:8192'")
    return int(size)


def pieces(tokenizer: Any, ids: list[int]) -> list[tuple[str, int]]:
    """Decode ids into pieces of whole characters, each with the number of tokens that it is made of."""
    decoded = []
    start = 0
    for end in range(1, len(ids) + 1):
        context = max(0, start - NUM_BEFORE)
        before = tokenizer.decode(ids[context:start], skip_special_tokens=True)
        piece = tokenizer.decode(ids[context:end], skip_special_tokens=True).removeprefix(before)
        is_incomplete = piece.endswith("\ufffd")  # the other bytes of its last character are still to come
        if is_incomplete and end - start < LONGEST_CHARACTER and end < len(ids):
            continue
        decoded.append((piece, end - start))
        start = end
    return decoded


def token_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """Return a text for each token. A character of several tokens stands at the first, and dots at the others.

    >>> token_texts(byte_tokenizer(), [104, 195, 169, 0])
    ['h', 'é', '⋯', '\\x00']
    """
    texts: list[str] = []
    for piece, length in pieces(tokenizer, ids):
        whole = piece or tokenizer.convert_ids_to_tokens(ids[len(texts)])  # special tokens have no text
        texts += [whole, *["⋯"] * (length - 1)]
    return texts


def _wrap(tokenizer: Tokenizer) -> Any:
    """Make a tokenizer of transformers, for which a document's end also fills batches."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )
