"""Text to token windows: a corpus is read once, tokenised once, and memory-mapped from then on.

Documents are split into training, validation and test by their content, so that the same text never lies on two
sides. The tokens of a side stand in one file, documents one after the other; a window is a stretch of it.
"""

import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

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
"""A corpus of fewer documents, such as a single file, is cut at line ends into parts, and these are split."""
NUM_PARTS = 200
TOKENIZER_FILES = ("token*.json", "*.model", "vocab.*", "merges.txt")
CACHE_FORMAT = 2


class Side(NamedTuple):
    """Training, validation or test: how much text it is, and where its tokens are."""

    tokens: np.ndarray[Any, np.dtype[Any]]  # (num_tokens,) on disk
    num_documents: int
    num_bytes: int

    @property
    def bits_per_nat(self) -> float:
        """Bits per byte are this many times the nats per token, over the whole of the text."""
        return len(self.tokens) / self.num_bytes / math.log(2)

    def windows(self, length: int) -> "Windows":
        return Windows(self.tokens, length)


class Corpus(NamedTuple):
    """A tokenised corpus."""

    name: str
    digest: str  # of text, split and tokenizer, whatever their names
    tokenizer: Any
    train: Side
    validation: Side
    test: Side  # empty unless asked for


class Windows(Dataset[Tensor]):
    """Stretches of `length` tokens that do not overlap; what remains at the end is left out."""

    def __init__(self, tokens: np.ndarray[Any, np.dtype[Any]], length: int) -> None:
        self.rows = tokens[: len(tokens) // length * length].reshape(-1, length)  # (N, T), still on disk

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self.rows[index].astype(np.int64))

    def whole_batches(self, batch_size: int) -> "Windows":
        """Without the last windows that would not fill a batch: every epoch has the same number of steps, however
        a batch is shared out."""
        return self._of(self.rows[: len(self) // batch_size * batch_size])

    def _of(self, rows: np.ndarray[Any, np.dtype[Any]]) -> "Windows":
        chosen = Windows(rows[:0].reshape(-1), rows.shape[1])
        chosen.rows = rows
        return chosen

    def spread(self, number: int | None) -> "Windows":
        """At most `number` of the windows, evenly spaced."""
        if number is None or number >= len(self):
            return self
        return self._of(self.rows[np.linspace(0, len(self) - 1, number).round().astype(np.int64)])

    def batches(self, batch_size: int) -> Iterator[Tensor]:
        """(batch_size, T), the last one perhaps smaller, in order."""
        for start in range(0, len(self), batch_size):
            yield torch.from_numpy(self.rows[start : start + batch_size].astype(np.int64))


def collate(rows: list[Tensor]) -> dict[str, Tensor]:
    ids = torch.stack(rows)  # (B, T)
    return {"input_ids": ids, "labels": ids}


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

    `source` is `stdlib` (the Python standard library's source), `python` (that and the source of torch and
    transformers), a text file, a folder, a glob, a .jsonl or
    .parquet file, a dataset saved to disk, or `hf:name[:config[:split]]`. Of the last four `text_field` is used.
    `validation` is the share of the text that is held out to choose by, `test` the share that is held out to report.
    """
    if not 0 < validation < 1:
        raise ValueError(f"validation must be a share between 0 and 1, not {validation}")
    if not 0 <= test < 1 - validation:
        raise ValueError(f"test must be a share of what validation={validation} leaves, not {test}")
    documents = open_source(source, text_field)
    digests, sizes = _survey(documents, source)
    is_cut = len(digests) < MIN_DOCUMENTS
    if is_cut:
        documents = _cut(documents, max(1, sum(sizes) // NUM_PARTS))
        digests, sizes = _survey(documents, source)
    text = json.dumps([CACHE_FORMAT, _digest(*digests), validation, test])
    key = _digest(text.encode(), _tokenizer_key(tokenizer).encode())
    readable = re.sub(r"[^\w.-]", "_", source)[-40:]
    folder = Path(cache or cache_folder()) / f"{readable}-{key[:16]}"
    try:
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{folder}.lock"):
                if not folder.exists():
                    sides = _sides(digests, sizes, validation, test)
                    _tokenise(documents, sides, sum(sizes), tokenizer, folder, has_ends=not is_cut)
    except OSError as error:
        raise OSError(
            f"the token cache {str(folder)!r} cannot be written ({error.strerror or error}): make room, or name "
            "another folder in MIXDEPTH_CACHE"
        ) from error
    return _open(source, text, folder)


def cache_folder() -> str:
    """MIXDEPTH_CACHE, or `mixdepth` in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.environ.get("MIXDEPTH_CACHE") or os.path.join(home, "mixdepth")


def _survey(documents: Documents, source: str) -> tuple[list[bytes], list[int]]:
    """Digest and size of each document."""
    digests, sizes = [], []
    for text in documents():
        digests.append(hashlib.sha256(text).digest())
        sizes.append(len(text))
    if not sum(sizes):
        raise ValueError(f"corpus {source!r} is empty: there is no text in it")
    return digests, sizes


def _cut(documents: Documents, size: int) -> Documents:
    """Parts of one to two times `size` bytes that end with a line, or else with a word or a character."""

    def parts() -> Iterator[bytes]:
        for text in documents():
            start = 0
            while start < len(text):
                least, most = start + size, start + 2 * size
                end = (
                    text.find(b"\n", least - 1, most) + 1
                    or text.find(b" ", least - 1, most) + 1
                    or min(most, len(text))
                )
                while end < len(text) and text[end] & 0xC0 == 0x80:  # within a character
                    end += 1
                yield text[start:end]
                start = end

    return parts


def _sides(digests: list[bytes], sizes: list[int], validation: float, test: float) -> list[str]:
    """The side of each document: in the order of their digests, which is as good as random, documents go to validation
    until its share is reached, then to test; one that would take much more than the share is passed over. Copies
    of a document go together."""
    together: dict[bytes, int] = {}
    for digest, size in zip(digests, sizes, strict=True):
        together[digest] = together.get(digest, 0) + size
    side_of: dict[bytes, str] = {}
    for side, share in zip(HELD_OUT, (validation, test), strict=True):
        num_bytes, limit = 0, share * sum(sizes)
        left = [item for item in sorted(together.items()) if item[0] not in side_of]
        for digest, size in left:
            if num_bytes < limit and num_bytes + size <= 1.25 * limit:
                side_of[digest] = side
                num_bytes += size
        if share and not num_bytes and left:
            side_of[min(left, key=lambda item: item[1])[0]] = side
    return [side_of.get(digest, "train") for digest in digests]


def _tokenise(documents: Documents, sides: list[str], num_bytes: int, name: str, folder: Path, has_ends: bool) -> None:
    """Write tokens, tokenizer and counts aside, then put them in place at once."""
    for leftover in folder.parent.glob(f".{folder.name}-*"):  # of a process that was killed: the lock is ours
        shutil.rmtree(leftover)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for_training = zip(documents(), sides, strict=True)
        tokenizer = make_tokenizer(name, (text.decode() for text, side in for_training if side == "train"))
        dtype = "uint16" if len(tokenizer) <= 2**16 else "uint32"
        end = [tokenizer.eos_token_id] if has_ends and tokenizer.eos_token_id is not None else []
        counts = {side: {"documents": 0, "bytes": 0, "tokens": 0} for side in SIDES}
        files = {side: open(aside / f"{side}.bin", "wb") for side in SIDES}  # noqa: SIM115
        bar = tqdm(total=num_bytes, desc="tokenising", unit="B", unit_scale=True, mininterval=1, leave=False)
        pairs = zip(documents(), sides, strict=True)
        while group := list(islice(pairs, 64)):
            for (text, side), ids in zip(group, _encode(name, tokenizer, [text for text, _ in group]), strict=True):
                files[side].write(np.concatenate([ids, end]).astype(dtype).tobytes())
                for unit, number in {"documents": 1, "bytes": len(text), "tokens": len(ids) + len(end)}.items():
                    counts[side][unit] += number
                bar.update(len(text))
        bar.close()
        for file in files.values():
            file.close()
        tokenizer.save_pretrained(aside / "tokenizer")
        write_json(aside / "meta.json", {"dtype": dtype, "sides": counts})
        aside.rename(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _encode(name: str, tokenizer: Any, texts: list[bytes]) -> list[Any]:
    if name == "bytes":  # its ids are the bytes themselves
        return [np.frombuffer(text, np.uint8) for text in texts]
    encoded: list[Any] = tokenizer([text.decode() for text in texts], add_special_tokens=False)["input_ids"]
    return encoded


def _open(source: str, text: str, folder: Path) -> Corpus:
    meta = json.loads((folder / "meta.json").read_text())
    sides = {}
    for side, counts in meta["sides"].items():
        size = counts["tokens"]
        file = folder / f"{side}.bin"
        if file.stat().st_size != size * np.dtype(meta["dtype"]).itemsize:
            raise ValueError(f"the token cache {str(folder)!r} is damaged: delete it, and it is made again")
        tokens = np.memmap(file, meta["dtype"], "r", shape=(size,)) if size else np.zeros(0, meta["dtype"])
        sides[side] = Side(tokens, counts["documents"], counts["bytes"])
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    identity = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.eos_token_id])
    return Corpus(source, _digest(text.encode(), identity.encode()), tokenizer, **sides)


def _tokenizer_key(name: str) -> str:
    """A tokenizer's folder may change under its name: then its content is the key."""
    files = [file for pattern in TOKENIZER_FILES for file in sorted(Path(name).glob(pattern))]
    return _digest(*(file.read_bytes() for file in files)) if files else name


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()
