"""Losses on the test text. A cell measures them when it ends, while its weights are there; nothing reads them before
all cells have ended."""

from mixdepth.data.corpus import Corpus
from mixdepth.evaluation.comparison import evaluate_runs
from mixdepth.files import write_json, writing
from mixdepth.isoflop.study import TEST, Cell, Losses, Study


def is_unsealed(study: Study, cell: Cell) -> bool:
    """Return whether a finished cell has its weights, but no losses on the test text."""
    if not study.is_finished(cell) or _read(study, cell) is not None:
        return False
    weights = study.run_of(cell).folder.glob("*.safetensors")
    return any(weights)


def sealed_losses(study: Study, cell: Cell, corpus: Corpus | None = None) -> Losses | None:
    """Read the losses of a finished cell on the test text, and measure them first where they are missing.

    They are None if the weights are missing too. `corpus` is the text of the study, where it has been read already.
    """
    if is_unsealed(study, cell):
        _measure(study, cell, corpus)
    return _read(study, cell)


def _measure(study: Study, cell: Cell, corpus: Corpus | None) -> None:
    """Evaluate a cell on the test text, and write test.json."""
    folder = study.run_of(cell).folder
    comparison = evaluate_runs(
        [str(folder)],
        split="test",
        windows=cell.settings["eval_windows"],
        context=cell.settings["context"],
        corpus_of_runs=corpus,
    )
    evaluation = comparison.entries[0].evaluation
    content = {
        "loss": evaluation.loss,
        "lookahead_loss": evaluation.lookahead_loss,
        "capacities": [layer.capacity for layer in evaluation.layers.values()],
        "windows": len(evaluation.rows),
    }
    with writing(folder):
        write_json(folder / TEST, content)


def _read(study: Study, cell: Cell) -> Losses | None:
    """Read the losses; None if they are missing, or damaged: they can be measured again while the weights are there."""
    try:
        return study.sealed_losses(cell)
    except ValueError:
        return None
