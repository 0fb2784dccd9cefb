"""One training step in two processes, each with half of the rows, under DDP or FSDP2: for law 10."""

import os

import torch
import torch.distributed as dist
from tiny import routed, token_ids
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from variants import ALL_VARIANTS, EXPERT_VARIANTS

import mixdepth
from mixdepth.hf.architectures import decoder_layers


def step(variant, wrap, rows):
    """Loss and gradients, by name, of one step on these rows."""
    architecture = "mixtral" if variant in EXPERT_VARIANTS else "llama"
    # These two losses depend on the micro-batch, which differs between one process and two.
    settings = {**ALL_VARIANTS[variant], "capacity_loss_coef": 0.0, "expert_balance_coef": 0.0}
    model = routed(architecture, **settings).train()
    trained = wrap(model)
    trained(rows, labels=rows).loss.backward()
    mixdepth.update_routers(model)
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = whole(parameter.grad)
    buffers = [buffer.clone() for name, buffer in model.named_buffers() if "depth_router" in name]
    return gradients, buffers


def whole(gradient):
    """The gradient itself, gathered from all processes if it is sharded."""
    if hasattr(gradient, "full_tensor"):
        return gradient.full_tensor()
    return gradient


def sharded(model):
    """The model under FSDP2, layer by layer."""
    for layer in decoder_layers(model):
        fully_shard(layer)
    return fully_shard(model)


def rank_main(rank, engine, store, variants):
    """Compare this process's step on half of the rows with a step of one process on all of them."""
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    ids = token_ids(4, 20)
    for variant in variants:
        expected, expected_thresholds = step(variant, lambda model: model, ids)
        wrap = DistributedDataParallel if engine == "ddp" else sharded
        gradients, thresholds = step(variant, wrap, ids[2 * rank : 2 * rank + 2])
        assert gradients.keys() == expected.keys(), (variant, gradients.keys() ^ expected.keys())
        for name, gradient in gradients.items():
            error = (gradient - expected[name]).abs().max().item()
            assert error < 1e-6, (variant, name, error)  # transformers takes its loss in float32
        for threshold, expected_threshold in zip(thresholds, expected_thresholds, strict=True):
            assert torch.allclose(threshold, expected_threshold, atol=1e-9), variant
    dist.barrier()
    os._exit(0)  # taking DDP down, torch can wait for itself: gloo's thread wants the GIL that the destructor holds
