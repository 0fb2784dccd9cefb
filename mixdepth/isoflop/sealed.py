"""Losses on the test text: taken when a cell ends, while its weights are there, and not looked at before all have."""

from mixdepth.evaluation.comparison import evaluate_runs
from mixdepth.files import write_json, writing
from mixdepth.isoflop.study import TEST, Cell, Losses, Study


def is_unsealed(study: Study, cell: Cell) -> bool:
    """Whether it is finished and its weights are there, but not its losses on the test text."""
    folder = study.run_of(cell).folder
    return study.is_finished(cell) and _read(study, cell) is None and any(folder.glob("*.safetensors"))


def sealed_losses(study: Study, cell: Cell) -> Losses | None:
    """From a finished cell's test.json, which is written if need be; None if it cannot be."""
    folder = study.run_of(cell).folder
    if is_unsealed(study, cell):
        window = {"windows": cell.settings["eval_windows"], "context": cell.settings["context"]}
        found = evaluate_runs([str(folder)], split="test", **window).entries[0].evaluation
        capacities = [layer.capacity for layer in found.layers.values()]
        losses = {"loss": found.loss, "lookahead_loss": found.lookahead_loss, "capacities": capacities}
        with writing(folder):
            write_json(folder / TEST, {**losses, "windows": len(found.rows)})
    return _read(study, cell)


def _read(study: Study, cell: Cell) -> Losses | None:
    try:
        return study.sealed_losses(cell)
    except ValueError:  # it is not there; or it is damaged, and can be written again as long as the weights are there
        return None
