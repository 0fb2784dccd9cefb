"""`mixdepth eval --tasks`: benchmark tasks by lm_eval, for routed and plain models. Routing is causal."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mixdepth.config import check_integer
from mixdepth.models.loading import load
from mixdepth.text import columns, tell


def evaluate_tasks(
    names: Sequence[str], tasks: Sequence[str], *, limit: int | None = None, batch_size: int = 16
) -> dict[str, dict[str, dict[str, float]]]:
    """What lm_eval finds: model -> task -> metric -> value. A task is a YAML file of lm_eval's, or one of its names,
    whose data may need a hub."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ValueError("tasks need the package lm_eval: pip install 'mixdepth[tasks]'") from error
    check_integer("batch_size", batch_size, minimum=1)
    if limit is not None:
        check_integer("limit", limit, minimum=1)
    files = [Path(task) for task in tasks if task.endswith((".yaml", ".yml"))]
    for file in files:
        if not file.is_file():
            raise ValueError(f"there is no task file {str(file)!r}")
    _check_names(files)
    folders = sorted({str(file.parent.resolve()) for file in files})
    manager = TaskManager(include_path=folders or None, include_defaults=len(files) < len(tasks))
    wanted = [_task_name(Path(task)) if Path(task) in files else task for task in tasks]
    unknown = [task for task in wanted if task not in manager.all_tasks]
    if unknown:
        raise ValueError(f"lm_eval has no task {unknown[0]!r}: name one of its tasks, or a YAML file")
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in names:
        loaded = load(name)
        if loaded.note:
            tell(loaded.note)
        model = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=batch_size)
        try:
            results = simple_evaluate(model, tasks=wanted, task_manager=manager, limit=limit, log_samples=False)
        except Exception as error:  # whatever a task's file, its templates, its data or its metrics raise
            reason = (str(error).strip().splitlines() or [""])[0]
            raise ValueError(
                f"lm_eval cannot run {', '.join(wanted)} on {name!r} ({type(error).__name__}: {reason})"
            ) from error
        found[name] = {task: _numbers(values) for task, values in results["results"].items()}
    return found


def table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """A line for each task and metric, a column for each model."""
    rows = [["task", "metric", *found]]
    first = next(iter(found.values()))
    for task, values in first.items():
        for metric in [metric for metric in values if "_stderr" not in metric]:
            cells = []
            name, comma, kind = metric.partition(",")
            for results in found.values():
                error = results[task].get(f"{name}_stderr{comma}{kind}")
                cells.append(f"{results[task][metric]:.4f}" + ("" if error is None else f" ± {error:.4f}"))
            rows.append([task, metric, *cells])
    return columns(rows, left=(0, 1))


def _check_names(files: Sequence[Path]) -> None:
    """lm_eval finds a task by its name in all folders, so that another file's task could be run instead."""
    for file in files:
        name = _task_name(file)
        for folder in {other.parent.resolve() for other in files}:
            for other in sorted({*folder.rglob("*.yaml"), *folder.rglob("*.yml")}):
                if other.resolve() != file.resolve() and _name_in(other) == name:
                    raise ValueError(f"{str(file)!r} and {str(other)!r} both say task: {name}: rename one of them")


def _task_name(file: Path) -> str:
    name = _name_in(file)
    if name is None:
        raise ValueError(f"{str(file)!r} is no task of lm_eval: it has no line 'task: NAME'")
    return name


def _name_in(file: Path) -> str | None:
    """By its line `task: name`; the rest may hold tags that only lm_eval can read."""
    text = file.read_text(encoding="utf-8", errors="replace")
    found = re.search(r"""^task:[ \t]*["']?([^\s"'#]+)""", text, re.MULTILINE)
    return None if found is None else found[1]


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    """lm_eval's own names, `acc,none` and `acc_stderr,none`, without what is no number and no measure."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "sample_len"
    }
