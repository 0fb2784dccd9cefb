"""Losses on the test text: taken when a cell ends, while its weights are there, and not looked at before all have."""

from mixdepth.compare import evaluate_runs
from mixdepth.files import read_json, write_json
from mixdepth.isoflop.study import TEST, Cell, Study
from mixdepth.run import writing


def is_unsealed(study: Study, cell: Cell) -> bool:
    """Whether it is finished and its weights are there, but not its losses on the test text."""
    folder = study.run_of(cell).folder
    return study.is_finished(cell) and not (folder / TEST).exists() and any(folder.glob("*.safetensors"))


def sealed_losses(study: Study, cell: Cell) -> tuple[float, float] | None:
    """Causal and look-ahead, from a finished cell's test.json, which is written if need be; None if it cannot be."""
    run = study.run_of(cell)
    path = run.folder / TEST
    if is_unsealed(study, cell):
        window = {"windows": cell.settings["eval_windows"], "context": cell.settings["context"]}
        found = evaluate_runs([str(run.folder)], split="test", **window).entries[0].evaluation
        with writing(run.folder):
            write_json(path, {"loss": found.loss, "lookahead_loss": found.lookahead_loss, "windows": len(found.rows)})
    if not path.exists():
        return None
    sealed = read_json(path)
    return sealed["loss"], sealed["lookahead_loss"]
