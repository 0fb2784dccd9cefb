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
    settings = {**ALL_VARIANTS[variant], "capacity_loss_coef": 0.0, "expert_balance_coef": 0.0}  # of a micro-batch
    model = routed(architecture, **settings).train()
    trained = wrap(model)
    trained(rows, labels=rows).loss.backward()
    mixdepth.update_routers(model)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    gradients = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in gradients.items()}
    return gradients, [buffer.clone() for name, buffer in model.named_buffers() if "depth_router" in name]


def sharded(model):
    for layer in decoder_layers(model):
        fully_shard(layer)
    return fully_shard(model)


def rank_main(rank, engine, store, variants):
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    ids = token_ids(4, 20)
    for variant in variants:
        expected, thresholds_0 = step(variant, lambda model: model, ids)
        wrap = DistributedDataParallel if engine == "ddp" else sharded
        gradients, thresholds = step(variant, wrap, ids[2 * rank : 2 * rank + 2])
        assert gradients.keys() == expected.keys(), (variant, gradients.keys() ^ expected.keys())
        for name, gradient in gradients.items():
            error = (gradient - expected[name]).abs().max().item()
            assert error < 1e-6, (variant, name, error)  # transformers takes its loss in float32
        for ours, theirs in zip(thresholds, thresholds_0, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-9), variant
    dist.barrier()
    os._exit(0)  # taking DDP down, torch can wait for itself: gloo's thread wants the GIL that the destructor holds
