"""Attention masks of routed layers, made from the masks that the model made for dense layers.

A mask is None (causal), boolean (True is allowed) or additive, of shape (B or 1, 1, T, C): T queries, and C columns
that end with the last query's.

Shapes: R rows with a chosen token, K slots, S stored keys.
"""

import torch
from torch import Tensor

from mixdepth.routes import Route

FORBIDDEN = -1e3
"""An additive mask below this leaves no weight; some architectures write -1e4 for minus infinity."""


def real_tokens(mask: Tensor | None, num_tokens: int) -> Tensor | None:
    """(B or 1, T) bool: which tokens are not padding. None: all are real.

    A query that may not attend to the column of its token is padding.
    """
    if mask is None:
        return None
    if mask.ndim != 4 or mask.shape[1] != 1:
        raise ValueError(
            f"an attention mask of shape {tuple(mask.shape)} cannot be routed: one for all heads is needed"
        )
    offset = mask.shape[-1] - num_tokens  # the column of the first query
    diagonal = mask[:, 0].diagonal(offset, dim1=-2, dim2=-1)  # (B or 1, T)
    if diagonal.dtype == torch.bool:
        return diagonal
    return diagonal > FORBIDDEN


def routed_mask(
    mask: Tensor | None, route: Route, columns: Tensor, num_keys: Tensor, seen: int, num_tokens: int
) -> Tensor:
    """The mask (R, 1, K, S) of the route's queries over keys at `columns` (R, S) of their sequences.

    Only the first `num_keys` (R,) keys of a row count. The route's tokens are among the `num_tokens`
    that follow the `seen` ones.
    """
    num_slots = route.index.shape[1]
    key = torch.arange(columns.shape[1], device=columns.device)  # (S,)
    stored = key < num_keys[:, None]  # (R, S)
    # 1. Which keys may a query attend to?
    if mask is None:
        own_column = route.index[..., None] + seen  # (R, K, 1)
        allowed = stored[:, None] & (columns[:, None] <= own_column)  # (R, K, S)
    else:
        offset = seen + num_tokens - mask.shape[-1]  # the first column that the mask covers
        stored = stored & (columns >= offset)  # (R, S)
        place = (columns - offset).clamp(min=0).long()  # (R, S): each key's column in the mask
        place = place[:, None].expand(-1, num_slots, -1)  # (R, K, S)
        allowed = route.gather(mask[:, 0]).gather(2, place)  # (R, K, S)
        if mask.dtype == torch.bool:
            allowed = allowed & stored[:, None]
        else:
            allowed = allowed.where(stored[:, None], torch.finfo(mask.dtype).min)
    # 2. An unused slot may be allowed nothing, and softmax over nothing is NaN: let it see the first key.
    spared = ~route.used[..., None] & (key == 0)  # (R, K, S)
    if allowed.dtype == torch.bool:
        allowed = allowed | spared
    else:
        allowed = allowed.masked_fill(spared, 0)
    return allowed[:, None]
