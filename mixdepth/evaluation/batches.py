"""How evaluation calls a model: its arguments for a batch, and evaluation mode for a while."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

Batch = Tensor | Mapping[str, Any]
"""Token ids (B, T), or keyword arguments of the model. Without `labels`, all ids that are not padding are labels."""

IGNORED_LABEL = -100
"""The label of positions that do not count in a loss, as in PyTorch's cross-entropy."""


def model_inputs(batch: Batch) -> dict[str, Any]:
    """Return the keyword arguments of the model for this batch, always with labels (B, T)."""
    inputs = {"input_ids": batch} if isinstance(batch, Tensor) else dict(batch)
    if inputs.get("labels") is not None:
        return inputs
    if inputs.get("input_ids") is None:
        raise ValueError("a batch without input_ids needs labels")
    labels = inputs["input_ids"]
    mask = inputs.get("attention_mask")
    if mask is not None and mask.ndim == 2:  # a 4-D mask says nothing about padding
        labels = labels.masked_fill(mask == 0, IGNORED_LABEL)
    inputs["labels"] = labels
    return inputs


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Put the model into evaluation mode, and afterwards back into the mode that it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
