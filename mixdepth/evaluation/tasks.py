"""`mixdepth eval --tasks`: benchmark tasks by lm_eval, for routed and plain models. Routing is causal."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mixdepth.config import check_integer
from mixdepth.models.loading import load
from mixdepth.text import columns, tell

Metrics = dict[str, float]
TaskResults = dict[str, Metrics]
"""The metrics of each task, by its name."""


def evaluate_tasks(
    names: Sequence[str], tasks: Sequence[str], *, limit: int | None = None, batch_size: int = 16
) -> dict[str, TaskResults]:
    """Evaluate models on tasks by lm_eval: model -> task -> metric -> value.

    A task is a YAML file of lm_eval's, or the name of one of its tasks, whose data may need a hub.
    """
    # 1. Check what can be checked before a model is loaded.
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
    # 2. Show lm_eval the folders of the files, and ask for their tasks by name.
    folders = sorted({str(file.parent.resolve()) for file in files})
    manager = TaskManager(include_path=folders or None, include_defaults=len(files) < len(tasks))
    task_names = []
    for task in tasks:
        task_name = _task_name(Path(task)) if Path(task) in files else task
        if task_name not in manager.all_tasks:
            raise ValueError(f"lm_eval has no task {task_name!r}: name one of its tasks, or a YAML file")
        task_names.append(task_name)
    # 3. Evaluate one model after the other.
    results_of: dict[str, TaskResults] = {}
    for name in names:
        loaded = load(name)
        if loaded.note:
            tell(loaded.note)
        model = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=batch_size)
        try:
            answer = simple_evaluate(model, tasks=task_names, task_manager=manager, limit=limit, log_samples=False)
        except Exception as error:  # whatever a task's file, its templates, its data or its metrics raise
            reason = (str(error).strip().splitlines() or [""])[0]
            raise ValueError(
                f"lm_eval cannot run {', '.join(task_names)} on {name!r} ({type(error).__name__}: {reason})"
            ) from error
        results_of[name] = {task: _metrics(values) for task, values in answer["results"].items()}
    return results_of


def table(results_of: dict[str, TaskResults]) -> str:
    """Return a table with a line for each task and metric, and a column for each model."""
    rows = [["task", "metric", *results_of]]
    first = next(iter(results_of.values()))
    for task, metrics in first.items():
        for metric in metrics:
            if "_stderr" not in metric:
                cells = [_cell(results[task], metric) for results in results_of.values()]
                rows.append([task, metric, *cells])
    return columns(rows, left=(0, 1))


def _cell(metrics: Metrics, metric: str) -> str:
    """Return the value of a metric with its standard error, where lm_eval gives one."""
    name, comma, kind = metric.partition(",")
    error = metrics.get(f"{name}_stderr{comma}{kind}")
    value = f"{metrics[metric]:.4f}"
    return value if error is None else f"{value} ± {error:.4f}"


def _check_names(files: Sequence[Path]) -> None:
    """Refuse two files of one task name: lm_eval looks for a name in all folders, and could run the other file."""
    folders = {file.parent.resolve() for file in files}
    for file in files:
        name = _task_name(file)
        for folder in folders:
            for other in sorted({*folder.rglob("*.yaml"), *folder.rglob("*.yml")}):
                if other.resolve() != file.resolve() and _name_in(other) == name:
                    raise ValueError(f"{str(file)!r} and {str(other)!r} both say task: {name}: rename one of them")


def _task_name(file: Path) -> str:
    name = _name_in(file)
    if name is None:
        raise ValueError(f"{str(file)!r} is not a task of lm_eval: it has no line 'task: NAME'")
    return name


def _name_in(file: Path) -> str | None:
    """Read the name from the line `task: name`. The rest of the file may hold tags that only lm_eval can read."""
    text = file.read_text(encoding="utf-8", errors="replace")
    match = re.search(r"""^task:[ \t]*["']?([^\s"'#]+)""", text, re.MULTILINE)
    return None if match is None else match[1]


def _metrics(values: dict[str, Any]) -> Metrics:
    """Keep lm_eval's own names, such as `acc,none` and `acc_stderr,none`, and drop what is not a metric."""
    metrics = {}
    for name, value in values.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and name != "sample_len":
            metrics[name.removesuffix(",none")] = float(value)
    return metrics
