"""The shape of a language model: how many layers, how wide."""

from typing import Any

from transformers import LlamaConfig, MixtralConfig

from mixdepth.config import check_integer

WIDE = 256
"""From this width on heads are twice as wide."""


def model_config(
    layers: int = 8,
    width: int = 256,
    vocab_size: int = 256,
    num_experts: int = 0,
    experts_per_token: int = 2,
    context: int = 2048,
    heads: int | None = None,
) -> Any:
    """A Llama of this shape, or a Mixtral if it has experts; logits share their weights with the embedding."""
    for name, value in {"layers": layers, "width": width, "vocab_size": vocab_size, "context": context}.items():
        check_integer(name, value, minimum=1)
    if width % 16:
        raise ValueError(f"width must be a multiple of 16, the width of a head, not {width}")
    num_heads = default_heads(width) if heads is None else heads
    check_integer("heads", num_heads, minimum=1)
    if width % (2 * num_heads):
        raise ValueError(
            f"heads must divide width={width} into even parts, not be {num_heads}: give {width // 16}, say"
        )
    shape = {"vocab_size": vocab_size, "hidden_size": width, "num_hidden_layers": layers}
    shape |= {"num_attention_heads": num_heads, "num_key_value_heads": num_heads, "max_position_embeddings": context}
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # the tokenizer's business
    if num_experts == 0:
        return LlamaConfig(**shape, **tokens, intermediate_size=4 * width, tie_word_embeddings=True)
    check_integer("num_experts", num_experts, minimum=0)
    if not 1 <= experts_per_token <= num_experts:
        raise ValueError(f"experts_per_token must be from 1 to num_experts={num_experts}, not {experts_per_token}")
    share = 4 * width // experts_per_token  # as many FLOPs as a dense MLP of four times the width
    experts = {"num_local_experts": num_experts, "num_experts_per_tok": experts_per_token}
    experts |= {"output_router_logits": True}  # without which transformers has no balance loss
    return MixtralConfig(**shape, **tokens, **experts, intermediate_size=share, tie_word_embeddings=True)


def default_heads(width: int) -> int:
    """Heads of 16 in small models, of 32 in others: LOG.md, section 5.

    >>> default_heads(64), default_heads(80), default_heads(256)
    (4, 5, 8)
    """
    return width // 16 if width < WIDE or width % 32 else width // 32
