"""Text becomes windows of tokens: a corpus is read and tokenised once, and memory-mapped from then on.

Documents are split into training, validation and test by their content, so that the same text never lies on two
sides. The tokens of a side are in one file, documents one after the other; a window is a stretch of that file.
"""

import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import AutoTokenizer

from mixdepth.data.sources import Documents, open_source
from mixdepth.data.tokenizers import make_tokenizer
from mixdepth.files import write_json

HELD_OUT = ("validation", "test")
SIDES = ("train", *HELD_OUT)
MIN_DOCUMENTS = 20
"""A corpus of fewer documents, such as a single file, is cut at line ends into parts, and the parts are split."""
NUM_PARTS = 200
"""A corpus that is cut has at most this many parts, and at least half as many."""
MOST_OF_A_SHARE = 1.25
"""A document is held out if its side then has at most this many times its share of the text."""
TOKENIZER_FILES = ("token*.json", "*.model", "vocab.*", "merges.txt")
CACHE_FORMAT = 2
GROUP_SIZE = 64
"""How many documents are tokenised together."""

Tokens = np.ndarray[Any, np.dtype[Any]]


# What a corpus is


@dataclass(frozen=True, kw_only=True)
class Side:
    """The training, validation or test side of a corpus: its tokens, and how much text they stand for."""

    tokens: Tokens
    """(num_tokens,), on disk."""
    num_documents: int
    num_bytes: int

    @property
    def bits_per_nat(self) -> float:
        """The factor from nats per token to bits per byte, over the whole text of the side."""
        return len(self.tokens) / self.num_bytes / math.log(2)

    def windows(self, length: int) -> "Windows":
        """Cut the side into windows of `length` tokens."""
        return Windows(self.tokens, length)


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A tokenised corpus."""

    name: str
    digest: str
    """The digest of text, split and tokenizer, whatever their names are."""
    tokenizer: Any
    train: Side
    validation: Side
    test: Side
    """Empty unless a share of the text was asked for."""


@dataclass(frozen=True, kw_only=True)
class TokenisedText:
    """A corpus that lies tokenised in the cache. A process can hand it to others, which need not read the text."""

    source: str
    identity: str
    """What the text and its split are, as JSON."""
    folder: Path

    def open(self) -> Corpus:
        """Map the tokens into memory."""
        meta = json.loads((self.folder / "meta.json").read_text())
        dtype = np.dtype(meta["dtype"])
        sides = {}
        for side, counts in meta["sides"].items():
            num_tokens = counts["tokens"]
            file = self.folder / f"{side}.bin"
            if file.stat().st_size != num_tokens * dtype.itemsize:
                raise ValueError(f"the token cache {str(self.folder)!r} is damaged: delete it, and it is made again")
            tokens: Tokens = np.zeros(0, dtype)  # an empty file cannot be mapped
            if num_tokens:
                tokens = np.memmap(file, dtype, "r", shape=(num_tokens,))
            sides[side] = Side(tokens=tokens, num_documents=counts["documents"], num_bytes=counts["bytes"])
        tokenizer = AutoTokenizer.from_pretrained(self.folder / "tokenizer")
        vocabulary = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.eos_token_id])
        digest = _digest(self.identity.encode(), vocabulary.encode())
        return Corpus(name=self.source, digest=digest, tokenizer=tokenizer, **sides)


class Windows(Dataset[Tensor]):
    """Stretches of `length` tokens that do not overlap. Tokens that do not fill the last one are left out."""

    def __init__(self, tokens: Tokens, length: int) -> None:
        number = len(tokens) // length
        self.rows = tokens[: number * length].reshape(-1, length)  # (N, T), still on disk

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self.rows[index].astype(np.int64))  # (T,)

    def whole_batches(self, batch_size: int) -> "Windows":
        """Return the windows without the last ones, which would not fill a batch.

        Every epoch then has the same number of steps, however many processes share a batch.
        """
        return self._with_rows(self.rows[: len(self) // batch_size * batch_size])

    def spread(self, number: int | None) -> "Windows":
        """Return at most `number` of the windows, evenly spaced; None returns all."""
        if number is None or number >= len(self):
            return self
        indices = np.linspace(0, len(self) - 1, number).round().astype(np.int64)  # (number,)
        return self._with_rows(self.rows[indices])

    def _with_rows(self, rows: Tokens) -> "Windows":
        windows = Windows(rows[:0].reshape(-1), rows.shape[1])
        windows.rows = rows  # (N, T)
        return windows

    def batches(self, batch_size: int) -> Iterator[Tensor]:
        """Yield the windows in order as (batch_size, T); the last batch may be smaller."""
        for start in range(0, len(self), batch_size):
            yield torch.from_numpy(self.rows[start : start + batch_size].astype(np.int64))


def collate(rows: list[Tensor]) -> dict[str, Tensor]:
    """Put windows (T,) together into the inputs of a language model."""
    ids = torch.stack(rows)  # (B, T)
    return {"input_ids": ids, "labels": ids}


# Reading, splitting, tokenising


def load_corpus(
    source: str,
    tokenizer: str = "bytes",
    *,
    text_field: str = "text",
    validation: float = 0.1,
    test: float = 0.0,
    cache: str | None = None,
) -> Corpus:
    """Read, split and tokenise a corpus, or find it in the cache.

    `source` is one of:

    - `stdlib`, the Python standard library's source;
    - `python`, that and the source of torch and transformers;
    - a text file, a folder or a glob;
    - a .jsonl or .parquet file, a dataset saved to disk, or `hf:name[:config[:split]]`, with the text in `text_field`.

    `validation` is the share of the text that is held out to make choices by, `test` the share that is held out to
    report at the end.
    """
    tokenised = tokenise_corpus(source, tokenizer, text_field=text_field, validation=validation, test=test, cache=cache)
    return tokenised.open()


def tokenise_corpus(
    source: str,
    tokenizer: str = "bytes",
    *,
    text_field: str = "text",
    validation: float = 0.1,
    test: float = 0.0,
    cache: str | None = None,
) -> TokenisedText:
    """Read and hash a corpus, and tokenise it unless the cache has it already. `load_corpus` explains the settings."""
    if not 0 < validation < 1:
        raise ValueError(f"validation must be a share between 0 and 1, not {validation}")
    if not 0 <= test < 1 - validation:
        raise ValueError(f"test must be a share of what validation={validation} leaves, not {test}")

    # 1. Read all documents once, for their digests and sizes. A corpus of few documents is cut into parts.
    documents = open_source(source, text_field)
    digests, sizes = _survey(documents, source)
    is_cut = len(digests) < MIN_DOCUMENTS
    if is_cut:
        documents = _cut(documents, max(1, sum(sizes) // NUM_PARTS))
        digests, sizes = _survey(documents, source)

    # 2. The cache's folder is named by the hash of text, split and tokenizer.
    identity = json.dumps([CACHE_FORMAT, _digest(*digests), validation, test])
    key = _digest(identity.encode(), _tokenizer_key(tokenizer).encode())
    readable = re.sub(r"[^\w.-]", "_", source)[-40:]
    folder = Path(cache or cache_folder()) / f"{readable}-{key[:16]}"

    # 3. Split and tokenise the text if the folder is not there.
    try:
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{folder}.lock"):
                if not folder.exists():  # another process may have made it meanwhile
                    sides = _sides(digests, sizes, validation, test)
                    _tokenise(documents, sides, sum(sizes), tokenizer, folder, has_ends=not is_cut)
    except OSError as error:
        raise OSError(
            f"the token cache {str(folder)!r} cannot be written ({error.strerror or error}): make room, or name "
            "another folder in MIXDEPTH_CACHE"
        ) from error
    return TokenisedText(source=source, identity=identity, folder=folder)


def cache_folder() -> str:
    """Return MIXDEPTH_CACHE, or `mixdepth` in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.environ.get("MIXDEPTH_CACHE") or os.path.join(home, "mixdepth")


def _survey(documents: Documents, source: str) -> tuple[list[bytes], list[int]]:
    """Return the digest and the size of each document."""
    digests, sizes = [], []
    for text in documents():
        digests.append(hashlib.sha256(text).digest())
        sizes.append(len(text))
    if not sum(sizes):
        raise ValueError(f"corpus {source!r} is empty: there is no text in it")
    return digests, sizes


def _cut(documents: Documents, size: int) -> Documents:
    """Cut documents into parts of one to two times `size` bytes."""

    def parts() -> Iterator[bytes]:
        for text in documents():
            start = 0
            while start < len(text):
                end = _end_of_part(text, start + size, start + 2 * size)
                yield text[start:end]
                start = end

    return parts


def _end_of_part(text: bytes, least: int, most: int) -> int:
    """Find the end of a part between these positions: the end of a line, or else of a word, or of a character."""
    for separator in (b"\n", b" "):
        position = text.find(separator, least - 1, most)
        if position >= 0:
            end = position + 1
            break
    else:
        end = min(most, len(text))
    while end < len(text) and text[end] & 0xC0 == 0x80:  # a later byte of a character of several
        end += 1
    return end


def _sides(digests: list[bytes], sizes: list[int], validation: float, test: float) -> list[str]:
    """Choose the side of each document.

    In the order of their digests, which is as good as random, documents go to validation until its share is reached,
    and then to test. One that would take much more than the share is passed over. Copies of a document go together.
    """
    # 1. How large each document is with all its copies.
    together: dict[bytes, int] = {}
    for digest, size in zip(digests, sizes, strict=True):
        together[digest] = together.get(digest, 0) + size
    in_order = sorted(together.items())

    # 2. Fill each held-out side.
    side_of: dict[bytes, str] = {}
    for side, share in zip(HELD_OUT, (validation, test), strict=True):
        num_bytes = 0
        limit = share * sum(sizes)
        remaining = [(digest, size) for digest, size in in_order if digest not in side_of]
        for digest, size in remaining:
            if num_bytes < limit and num_bytes + size <= MOST_OF_A_SHARE * limit:
                side_of[digest] = side
                num_bytes += size
        if share and not num_bytes and remaining:  # all are too large: the smallest is taken
            smallest, _ = min(remaining, key=lambda document: document[1])
            side_of[smallest] = side

    # 3. All others are trained on.
    return [side_of.get(digest, "train") for digest in digests]


def _tokenise(documents: Documents, sides: list[str], num_bytes: int, name: str, folder: Path, has_ends: bool) -> None:
    """Write tokens, tokenizer and counts into a temporary folder, then rename it to `folder`."""
    for leftover in folder.parent.glob(f".{folder.name}-*"):  # of a process that was killed: the lock is ours
        shutil.rmtree(leftover)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        # 1. Make the tokenizer, which may have to be trained.
        train_texts = (text.decode() for text, side in zip(documents(), sides, strict=True) if side == "train")
        tokenizer = make_tokenizer(name, train_texts)
        tokenizer.save_pretrained(aside / "tokenizer")

        # 2. Write the tokens of each side into one file.
        dtype = "uint16" if len(tokenizer) <= 2**16 else "uint32"
        end: list[int] = []
        if has_ends and tokenizer.eos_token_id is not None:
            end = [tokenizer.eos_token_id]
        counts = {side: {"documents": 0, "bytes": 0, "tokens": 0} for side in SIDES}
        bar = tqdm(total=num_bytes, desc="tokenising", unit="B", unit_scale=True, mininterval=1, leave=False)
        with ExitStack() as stack:
            files = {side: stack.enter_context(open(aside / f"{side}.bin", "wb")) for side in SIDES}
            for text, side, ids in _encoded(documents, sides, name, tokenizer):
                files[side].write(np.concatenate([ids, end]).astype(dtype).tobytes())
                counts[side]["documents"] += 1
                counts[side]["bytes"] += len(text)
                counts[side]["tokens"] += len(ids) + len(end)
                bar.update(len(text))
        bar.close()

        # 3. Put all in place at once.
        write_json(aside / "meta.json", {"dtype": dtype, "sides": counts})
        aside.rename(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _encoded(documents: Documents, sides: list[str], name: str, tokenizer: Any) -> Iterator[tuple[bytes, str, Any]]:
    """Yield each document, its side and its token ids."""
    pairs = zip(documents(), sides, strict=True)
    while group := list(islice(pairs, GROUP_SIZE)):
        all_ids = _encode(name, tokenizer, [text for text, _ in group])
        for (text, side), ids in zip(group, all_ids, strict=True):
            yield text, side, ids


def _encode(name: str, tokenizer: Any, texts: list[bytes]) -> list[Any]:
    """Return the token ids of each text."""
    if name == "bytes":  # its ids are the bytes themselves
        return [np.frombuffer(text, np.uint8) for text in texts]
    encoded: list[Any] = tokenizer([text.decode() for text in texts], add_special_tokens=False)["input_ids"]
    return encoded


def _tokenizer_key(name: str) -> str:
    """Return what identifies a tokenizer: the content of its folder, which may change under its name, or its name."""
    files: list[Path] = []
    for pattern in TOKENIZER_FILES:
        files += sorted(Path(name).glob(pattern))
    if not files:
        return name
    return _digest(*(file.read_bytes() for file in files))


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()
