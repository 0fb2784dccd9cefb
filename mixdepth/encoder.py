"""MixtureOfDepths: encodes a window of features into one vector with routed transformer layers.

Shapes: B batch, T timesteps, K slots in a route, E features of a timestep, D hidden size.
"""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from mixdepth.block import Routed
from mixdepth.config import DepthConfig, check_capacity, check_integer, is_number


class MixtureOfDepths(nn.Module):
    """Maps features (B, T, E) to one vector (B, D), the state of the last real timestep.

    `build` makes an encoder from options. The constructor takes layers of any kind, each a module
    `layer(x, mask=...) -> x'` over the stream (B, T, D).

    >>> model = MixtureOfDepths.build(embed_dim=287, capacity_ratio=0.5)
    >>> model(torch.randn(8, 60, 287)).shape
    torch.Size([8, 256])
    >>> model.layers[0].route.count  # of 60 timesteps
    tensor([30, 30, 30, 30, 30, 30, 30, 30])
    """

    def __init__(self, layers: Iterable[nn.Module], *, embed_dim: int, hidden_size: int, window_size: int) -> None:
        super().__init__()
        self.projection = nn.Linear(embed_dim, hidden_size)
        self.positions = nn.Embedding(window_size, hidden_size)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(hidden_size)

    @classmethod
    def build(
        cls,
        *,
        embed_dim: int | None = None,
        hidden_size: int = 256,
        num_heads: int = 4,
        capacity_ratio: float = 0.5,
        num_layers: int = 4,
        dropout: float = 0.1,
        window_size: int = 60,
        soft: bool = False,
    ) -> "MixtureOfDepths":
        """Make an encoder of up to `window_size` timesteps with `embed_dim` features each.

        Each layer processes the share `capacity_ratio` of the timesteps, those with the highest scores, and the others
        skip it. With `soft` each layer processes all timesteps, and a gate between 0 and 1 says how far each of them
        moves, gate * block(x) + (1 - gate) * x: nothing is skipped, and `capacity_ratio` has no effect.
        """
        # 1. Refuse options that make no sense.
        if embed_dim is None:
            raise ValueError("embed_dim is missing: give the number of features of a timestep, as in embed_dim=287")
        sizes = {
            "embed_dim": embed_dim,
            "hidden_size": hidden_size,
            "num_heads": num_heads,
            "num_layers": num_layers,
            "window_size": window_size,
        }
        for name, size in sizes.items():
            check_integer(name, size, minimum=1)
        if hidden_size % num_heads:
            raise ValueError(f"hidden_size must be a multiple of num_heads={num_heads}, not {hidden_size}")
        check_capacity(capacity_ratio, "capacity_ratio")
        if not is_number(dropout) or not 0 <= dropout < 1:
            raise ValueError(f"dropout must be a fraction in [0, 1), not {dropout!r}")
        if not isinstance(soft, bool):
            raise ValueError(f"soft must be True or False, not {soft!r}")

        # 2. Make the layers, each routed with a router of its own.
        config = DepthConfig(capacity=capacity_ratio, gate="sigmoid")
        if soft:
            config = DepthConfig(scheme="soft")
        blocks = [CausalBlock(hidden_size, num_heads, dropout) for _ in range(num_layers)]
        layers = [Routed(block, width=hidden_size, config=config, slot_mask="used") for block in blocks]
        return cls(layers, embed_dim=embed_dim, hidden_size=hidden_size, window_size=window_size)

    @classmethod
    def recommended_defaults(cls) -> dict[str, Any]:
        """Return the options of `build` with their defaults, without `embed_dim`, which has no default.

        >>> MixtureOfDepths.recommended_defaults()["window_size"]
        60
        """
        options = inspect.signature(cls.build).parameters.values()
        return {option.name: option.default for option in options if option.name != "embed_dim"}

    @classmethod
    def output_size(cls, **options: Any) -> int:
        """Return the width of the vectors that the encoder `build(**options)` makes.

        >>> MixtureOfDepths.output_size(embed_dim=287)
        256
        """
        all_options = cls.recommended_defaults() | options
        hidden_size: int = all_options["hidden_size"]
        check_integer("hidden_size", hidden_size, minimum=1)
        return hidden_size

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Encode features x (B, T, E); `mask` (B, T) is True at real timesteps, False at padding.

        Padding may lie anywhere and hold anything: a padded window gives the same vector as the window by itself. All
        rows without a real timestep give the same vector, which has no meaning.
        """
        self._check(x, mask)
        if mask is None:
            mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)  # (B, T)
        x = x.masked_fill(~mask[..., None], 0)  # a NaN would pass attention, even at weight 0
        position = (mask.cumsum(1) - 1).clamp(min=0)  # (B, T): counted over real timesteps
        x = self.projection(x) + self.positions(position)  # (B, T, D)
        for layer in self.layers:
            x = layer(x, mask=mask)
        last = torch.arange(x.shape[1], device=x.device).where(mask, 0).amax(1)  # (B,): the last real timestep
        place = last[:, None, None].expand(-1, 1, x.shape[2])  # (B, 1, D)
        state = x.gather(1, place)[:, 0]  # (B, D)
        encoded: Tensor = self.norm(state)
        return encoded

    def _check(self, x: Tensor, mask: Tensor | None) -> None:
        embed_dim = self.projection.in_features
        window_size = self.positions.num_embeddings
        if x.ndim != 3 or x.shape[2] != embed_dim:
            raise ValueError(f"x must have shape (batch, timesteps, embed_dim={embed_dim}), not {tuple(x.shape)}")
        if not 1 <= x.shape[1] <= window_size:
            raise ValueError(
                f"x must have 1 to window_size={window_size} timesteps, not {x.shape[1]}: "
                "cut it, or build with a larger window_size"
            )
        if mask is not None and mask.dtype != torch.bool:
            raise ValueError(f"mask must be boolean, True at real timesteps, not {mask.dtype}")
        if mask is not None and mask.shape != x.shape[:2]:
            raise ValueError(f"mask must have the shape {tuple(x.shape[:2])} of x's timesteps, not {tuple(mask.shape)}")


class CausalBlock(nn.TransformerEncoderLayer):
    """A transformer layer: attention to earlier slots and an MLP of four times the width, each after a norm."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__(width, num_heads, 4 * width, dropout, activation="gelu", batch_first=True, norm_first=True)

    def forward(self, x: Tensor, used: Tensor) -> Tensor:  # type: ignore[override]
        """Map (B, K, D) to (B, K, D). Unused slots are the last ones, so no used slot attends to them."""
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)  # (K, K)
        return super().forward(x, src_mask=later, is_causal=True)
