"""Corpora are read the same way from everywhere, split by document, and tokenised once."""

import json
import os
from multiprocessing import get_context

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from corpora import documents, write_folder

from mixdepth.data.corpus import load_corpus
from mixdepth.data.sources import python_files, stdlib_files
from mixdepth.data.tokenizers import byte_tokenizer, train_bpe

TEXTS = documents()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MIXDEPTH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def written_as(kind, folder):
    """The texts as a corpus of this kind."""
    if kind == "folder":
        return write_folder(folder / "texts", TEXTS)
    if kind == "glob":
        write_folder(folder / "texts", TEXTS)
        (folder / "texts" / "left_out.bin").write_bytes(b"\0\1")
        return str(folder / "**" / "*.txt")
    if kind == "jsonl parts":
        (folder / "parts").mkdir()
        for half in (0, 20):
            rows = "\n".join(json.dumps({"text": text}) for text in TEXTS[half : half + 20])
            (folder / "parts" / f"{half:02}.jsonl").write_text(rows)
        return str(folder / "parts")
    if kind == "dataset splits":
        data = datasets.Dataset.from_dict({"text": TEXTS})
        datasets.DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(folder / "texts")
        return str(folder / "texts")
    if kind == "jsonl":
        (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
        return str(folder / "texts.jsonl")
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), folder / "texts.parquet")
        return str(folder / "texts.parquet")
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(folder / "texts")
    return str(folder / "texts")


@pytest.mark.parametrize("kind", ["glob", "jsonl", "jsonl parts", "parquet", "dataset", "dataset splits"])
def test_the_same_documents_are_the_same_corpus_wherever_they_are(kind, tmp_path):
    expected = load_corpus(written_as("folder", tmp_path / "expected"))
    (tmp_path / kind).mkdir()
    found = load_corpus(written_as(kind, tmp_path / kind))
    assert found.digest == expected.digest
    for side, side_0 in ((found.train, expected.train), (found.validation, expected.validation)):
        assert np.array_equal(side.tokens, side_0.tokens)
        assert side.num_documents == side_0.num_documents


@pytest.mark.parametrize("test", [0.0, 0.2])
def test_the_sides_have_whole_documents_and_share_none(test, tmp_path):
    repeated = [*TEXTS, *TEXTS[:10]]  # the same text twice is on the same side twice
    corpus = load_corpus(write_folder(tmp_path / "texts", repeated), validation=0.25, test=test)
    parts = (corpus.train, corpus.validation, corpus.test)
    sides = [bytes(side.tokens.astype(np.uint8)).split(b"\0")[:-1] for side in parts]
    assert len(set.union(*map(set, sides))) == sum(len(set(side)) for side in sides)
    assert sorted(text for side in sides for text in side) == sorted(text.encode() for text in repeated)
    shares = [side.num_bytes / sum(part.num_bytes for part in parts) for side in parts]
    assert 0.2 <= shares[1] < 0.32  # whole documents, and copies go along
    assert (0.15 <= shares[2] < 0.26) if test else (shares[2] == 0)
    assert [len(side) for side in sides] == [part.num_documents for part in parts]
    assert corpus.train.num_bytes == sum(map(len, sides[0]))


def test_the_held_out_share_counts_every_copy_of_a_document(tmp_path):
    copies = [text for text in TEXTS for _ in range(6)]
    corpus = load_corpus(write_folder(tmp_path / "texts", copies), validation=0.25)
    share = corpus.validation.num_bytes / (corpus.train.num_bytes + corpus.validation.num_bytes)
    assert 0.2 <= share < 0.32  # whole documents, each with its six copies


def test_a_test_side_is_taken_from_training_and_not_from_validation(tmp_path):
    folder = write_folder(tmp_path / "texts", TEXTS)
    two, three = load_corpus(folder), load_corpus(folder, test=0.2)
    assert np.array_equal(two.validation.tokens, three.validation.tokens)
    assert two.digest != three.digest


def test_python_is_the_source_of_what_everyone_here_has():
    files = python_files()
    assert {"dataclasses.py", "optimizer.py", "modeling_llama.py"} <= {file.name for file in files}
    assert sum(file.stat().st_size for file in files) > 1e8
    assert len(set(files)) == len(files)


def test_a_single_file_is_cut_at_line_ends_and_held_out_in_parts(tmp_path):
    text = "".join(TEXTS)
    (tmp_path / "all.txt").write_text(text)
    corpus = load_corpus(str(tmp_path / "all.txt"))
    sides = [bytes(side.tokens.astype(np.uint8)) for side in (corpus.train, corpus.validation)]
    assert sum(map(len, sides)) == len(text.encode())  # and no ends where the text has none
    assert sorted(b"".join(sides).splitlines()) == sorted(text.encode().splitlines())
    assert corpus.validation.num_documents > 10


@pytest.mark.parametrize("text", ["word " * 9000, "\u4e2d" * 9000])
def test_a_text_without_lines_is_cut_between_words_or_characters(text, tmp_path):
    (tmp_path / "line.txt").write_text(text)
    corpus = load_corpus(str(tmp_path / "line.txt"))
    sides = [bytes(side.tokens.astype(np.uint8)).decode() for side in (corpus.train, corpus.validation)]
    assert len("".join(sides)) == len(text)


def test_a_large_document_among_small_ones_is_not_held_out_alone(tmp_path):
    for trial in range(3):
        texts = [f"{trial} {text}" for text in documents(25, 300)]
        corpus = load_corpus(write_folder(tmp_path / str(trial), [*texts, f"{trial}\n" * 200_000]))
        share = corpus.validation.num_bytes / (corpus.train.num_bytes + corpus.validation.num_bytes)
        assert 0 < share <= 0.125


def test_windows_are_stretches_of_one_side_without_overlap(tmp_path):
    corpus = load_corpus(write_folder(tmp_path / "texts", TEXTS))
    windows = corpus.train.windows(100)
    rows = torch.stack([windows[index] for index in range(len(windows))])  # (N, 100)
    assert torch.equal(rows.flatten(), torch.from_numpy(corpus.train.tokens[: rows.numel()].astype(np.int64)))
    assert len(corpus.train.tokens) - rows.numel() < 100
    assert torch.equal(torch.cat([*windows.batches(7)]), rows)
    spread = torch.cat([*windows.spread(5).batches(2)])
    assert torch.equal(spread, rows[torch.linspace(0, len(rows) - 1, 5).round().long()])


def test_byte_tokens_are_the_bytes_of_the_text():
    tokenizer = byte_tokenizer()
    text = "def größe(x):\n\treturn '\u0100 \u4e2d'  # \x7f\r\n"
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == 256
    assert tokenizer.eos_token_id == 0


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_tokens_decode_to_the_text_with_an_end_after_each_document(tokenizer, tmp_path):
    corpus = load_corpus(write_folder(tmp_path / "texts", TEXTS), tokenizer)
    found = corpus.tokenizer.decode(corpus.validation.tokens.tolist()).split("\0")[:-1]
    assert len(found) == corpus.validation.num_documents
    assert set(found) <= set(TEXTS)
    assert sum(len(text.encode()) for text in found) == corpus.validation.num_bytes
    assert (tokenizer == "bytes") == (len(corpus.validation.tokens) == corpus.validation.num_bytes + len(found))


def test_a_bpe_is_trained_on_training_text_alone(tmp_path):
    corpus = load_corpus(write_folder(tmp_path / "texts", TEXTS), "bpe:300")
    held_out = set(corpus.tokenizer.decode(corpus.validation.tokens.tolist()).split("\0"))
    again = train_bpe([text for text in TEXTS if text not in held_out], 300)
    assert corpus.tokenizer.get_vocab() == again.get_vocab()
    assert len(corpus.tokenizer) == 300


def test_a_hugging_face_tokenizer_is_taken_by_its_folder_and_known_by_its_content(tmp_path):
    texts = write_folder(tmp_path / "texts", TEXTS)
    train_bpe(TEXTS, 400).save_pretrained(tmp_path / "tokenizer")
    first = load_corpus(texts, str(tmp_path / "tokenizer"))
    assert len(first.tokenizer) == 400
    train_bpe(TEXTS, 350).save_pretrained(tmp_path / "tokenizer")
    assert load_corpus(texts, str(tmp_path / "tokenizer")).digest != first.digest


def test_a_corpus_is_tokenised_once_and_again_when_a_byte_of_it_changes(tmp_path, cache):
    source = write_folder(tmp_path / "texts", TEXTS)
    first = load_corpus(source)
    written = {file: file.stat().st_mtime_ns for file in cache.rglob("*.bin")}
    assert load_corpus(source).digest == first.digest
    assert {file: file.stat().st_mtime_ns for file in cache.rglob("*.bin")} == written
    (tmp_path / "texts" / "000.txt").write_text(TEXTS[0][:-2] + "?\n")
    assert load_corpus(source).digest != first.digest
    assert isinstance(first.train.tokens, np.memmap)


def test_processes_that_want_the_same_corpus_at_once_all_get_it(tmp_path, cache):
    source = write_folder(tmp_path / "texts", TEXTS)
    with get_context("forkserver").Pool(3) as processes:
        digests = processes.starmap(digest_of, [(source, str(cache))] * 3, chunksize=1)
    assert len(set(digests)) == 1
    assert len([entry for entry in cache.iterdir() if entry.is_dir()]) == 1


def digest_of(source, cache):
    os.environ["MIXDEPTH_CACHE"] = cache
    return load_corpus(source, "bpe:500").digest


def test_what_a_killed_process_left_in_the_cache_is_cleared_away(tmp_path, cache):
    source = write_folder(tmp_path / "texts", TEXTS)
    load_corpus(source)
    (folder,) = [entry for entry in cache.iterdir() if entry.is_dir()]
    folder.rename(cache / f".{folder.name}-half")
    load_corpus(source)
    assert [entry.name for entry in cache.iterdir() if entry.is_dir()] == [folder.name]


def test_the_standard_library_is_the_same_files_each_time_and_no_tests():
    files = stdlib_files()
    assert files == stdlib_files()
    assert len(files) > 500
    assert not [file for file in files if {"test", "tests", "site-packages"} & set(file.parts[-4:-1])]


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda folder: "nowhere.txt", {}, "corpus 'nowhere.txt' is not a file, a folder or a glob"),
        (lambda folder: folder, {}, "has no files"),
        (lambda folder: folder.joinpath("a.txt").touch() or folder / "a.txt", {}, "is empty: there is no text"),
        (lambda folder: folder.joinpath("a").write_bytes(b"a\0b") and folder / "a", {}, "is not text in UTF-8"),
        (lambda folder: folder.joinpath("a").write_bytes(b"\xff") and folder / "a", {}, "is not text in UTF-8"),
        (
            lambda folder: folder.joinpath("a.jsonl").write_text("{") and folder / "a.jsonl",
            {},
            "line 1 of .* is not JSON",
        ),
        (
            lambda folder: folder.joinpath("a.jsonl").write_text('{"body": "x"}') and folder / "a.jsonl",
            {},
            r"line 1 of .* has no text under 'text', but \['body'\]",
        ),
        (
            lambda folder: folder.joinpath("a.parquet").write_text("x") and folder / "a.parquet",
            {},
            "not a parquet file",
        ),
        (lambda folder: "hf:no/such/thing", {}, "corpus 'hf:no/such/thing' cannot be loaded"),
        (lambda folder: "stdlib", {"tokenizer": "bpe:10"}, "'bpe:10' must say how many tokens"),
        (lambda folder: "stdlib", {"tokenizer": "no/such"}, "tokenizer 'no/such' is neither"),
        (lambda folder: "stdlib", {"test": 0.95}, "test must be a share of what validation=0.1 leaves, not 0.95"),
        (lambda folder: "stdlib", {"validation": 1.0}, "validation must be a share between 0 and 1, not 1.0"),
    ],
)
def test_a_wrong_corpus_is_answered_in_a_sentence(make, options, message, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "corpus"
    folder.mkdir()
    with pytest.raises(ValueError, match=message) as error:
        load_corpus(str(make(folder)), **options)
    assert "\n" not in str(error.value)
