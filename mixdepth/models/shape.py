"""The shape of a language model: how many layers, how wide."""

from typing import Any

from transformers import LlamaConfig, MixtralConfig

from mixdepth.config import check_integer

HEAD_WIDTH = 16
"""The width of a head in narrow models."""
WIDE = 256
"""The width of a model from which heads are twice as wide."""


def model_config(
    layers: int = 8,
    width: int = 256,
    vocab_size: int = 256,
    num_experts: int = 0,
    experts_per_token: int = 2,
    context: int = 2048,
    heads: int | None = None,
) -> Any:
    """Return the config of a Llama of this shape, or of a Mixtral if it has experts.

    Logits share their weights with the embedding.
    """
    # 1. Check the shape.
    for name, value in {"layers": layers, "width": width, "vocab_size": vocab_size, "context": context}.items():
        check_integer(name, value, minimum=1)
    if width % HEAD_WIDTH:
        raise ValueError(f"width must be a multiple of {HEAD_WIDTH}, the width of a head, not {width}")
    num_heads = default_heads(width) if heads is None else heads
    check_integer("heads", num_heads, minimum=1)
    if width % (2 * num_heads):
        raise ValueError(
            f"heads must divide width={width} into even parts, not be {num_heads}: give {width // HEAD_WIDTH}, say"
        )

    # 2. What both kinds of model have.
    common = {
        "vocab_size": vocab_size,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "max_position_embeddings": context,
        "tie_word_embeddings": True,
        # the tokenizer says which tokens these are
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if num_experts == 0:
        return LlamaConfig(**common, intermediate_size=4 * width)

    # 3. Experts. Those of a token cost as many FLOPs as a dense MLP of four times the width.
    check_integer("num_experts", num_experts, minimum=0)
    if not 1 <= experts_per_token <= num_experts:
        raise ValueError(f"experts_per_token must be from 1 to num_experts={num_experts}, not {experts_per_token}")
    return MixtralConfig(
        **common,
        num_local_experts=num_experts,
        num_experts_per_tok=experts_per_token,
        output_router_logits=True,  # without it transformers has no balance loss
        intermediate_size=4 * width // experts_per_token,
    )


def default_heads(width: int) -> int:
    """Return the number of heads: their width is 16 in narrow models and 32 in others, which was best when measured.

    >>> default_heads(64), default_heads(80), default_heads(256)
    (4, 5, 8)
    """
    if width < WIDE or width % (2 * HEAD_WIDTH):
        return width // HEAD_WIDTH
    return width // (2 * HEAD_WIDTH)
