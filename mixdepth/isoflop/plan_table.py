"""The plan of a study as a table."""

from mixdepth.isoflop.study import Cell, Study
from mixdepth.text import columns, short

PLAN_HEADER = [
    "budget",
    "variant",
    "layers x width",
    "parameters",
    "FLOPs/token",
    "rate",
    "steps",
    "epochs",
    "seeds",
    "minutes",
]


def table(study: Study, workers: int) -> str:
    """Write the plan as a table with one line for each variant and size."""
    groups: dict[tuple[float, str, str], list[Cell]] = {}
    for cell in study.cells:
        groups.setdefault((cell.budget, cell.variant, cell.shape), []).append(cell)
    rows = [PLAN_HEADER]
    for cells in groups.values():
        rows.append(_row(cells))
    unfinished = [cell for cell in study.cells if not study.is_finished(cell)]
    total_flops = sum(cell.flops for cell in study.cells)
    hours = sum(cell.seconds for cell in unfinished) / 3600 / workers
    lines = [
        columns(rows, left=(1,)),
        f"{len(study.cells)} runs of {total_flops:.3g} FLOPs in all, {len(study.cells) - len(unfinished)} finished; "
        f"about {hours:.1f} hours for the rest with {workers} side by side, one core each",
    ]
    repeated = sorted({cell.variant for cell in study.cells if cell.epochs > 1})
    if repeated:
        lines.append(f"note: {', '.join(repeated)} read some text more than once (epochs above 1)")
    return "\n".join(lines)


def _row(cells: list[Cell]) -> list[str]:
    """Write the cells of one variant and size, which differ in the seed."""
    cell = cells[0]
    return [
        short(cell.budget),
        cell.variant,
        f"{cell.settings['layers']} x {cell.settings['width']}",
        f"{cell.parameters:,}",
        f"{cell.flops_per_token:,.0f}",
        f"{cell.settings['learning_rate']:.2g}",
        f"{cell.steps:,}",
        f"{cell.epochs:.2f}",
        f"{len(cells)}",
        f"{cell.seconds / 60:.1f}",
    ]
