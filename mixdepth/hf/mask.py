"""Attention masks of routed layers, taken from the masks that the model made for dense layers.

A mask is None (causal), boolean (True is allowed) or additive, of shape (B or 1, 1, T, C): T queries,
C columns that end with the last query's own. Shapes: R rows, K slots, S keys.
"""

import torch
from torch import Tensor

from mixdepth.routing import Route


def real_tokens(mask: Tensor | None, num_tokens: int) -> Tensor | None:
    """(B or 1, T) bool: a query that may not attend to its own column is padding. None: all are real."""
    if mask is None:
        return None
    own = mask[:, 0].diagonal(mask.shape[-1] - num_tokens, dim1=-2, dim2=-1)
    return own if own.dtype == torch.bool else own > torch.finfo(own.dtype).min / 2


def routed_mask(
    mask: Tensor | None, route: Route, key_columns: Tensor, num_keys: Tensor, query_columns: Tensor, last_column: int
) -> Tensor:
    """The mask (R, 1, K, S) of the route's queries over keys at `key_columns` (R, S).

    Only the first `num_keys` (R,) keys of a row count. `query_columns` (R, K) are the places of the
    route's tokens in the whole sequence, which `last_column` ends.
    """
    num_slots = route.index.shape[1]
    used = torch.arange(key_columns.shape[1], device=key_columns.device) < num_keys[:, None]  # (R, S)
    if mask is None:
        allowed = used[:, None] & (key_columns[:, None] <= query_columns[..., None])  # (R, K, S)
    else:
        offset = last_column + 1 - mask.shape[-1]  # the first column that the mask covers
        used = used & (key_columns >= offset)
        columns = (key_columns - offset).clamp(min=0).long()[:, None].expand(-1, num_slots, -1)
        allowed = route.gather(mask[:, 0]).gather(2, columns)  # (R, K, S)
        if mask.dtype == torch.bool:
            allowed = allowed & used[:, None]
        else:
            allowed = allowed.where(used[:, None], torch.finfo(mask.dtype).min)
    # An unused slot may be allowed nothing, and softmax over nothing is NaN: let it see the first key.
    first = torch.arange(key_columns.shape[1], device=key_columns.device) == 0  # (S,)
    spared = ~route.used[..., None] & first  # (R, K, S)
    return (allowed | spared if allowed.dtype == torch.bool else allowed.masked_fill(spared, 0))[:, None]
