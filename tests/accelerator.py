"""A pretend accelerator: training steps on a device that has no memory, for law 11.

Tensors on it have shapes and no values, so reading one on the host is an error, and so is an operation between it
and the CPU. torch registers such a device once for a whole process. So this file is run as a process of its own, and
prints what went wrong in each variant, in JSON.
"""

import json
import sys
import types

import torch
from tiny import routed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from variants import ALL_VARIANTS, EXPERT_VARIANTS

import mixdepth

DEVICE = "pretend"


def register() -> None:
    """Give torch a device by this name, with one card."""
    module = types.SimpleNamespace(
        _is_in_bad_fork=lambda: False,
        current_device=lambda: 0,
        device_count=lambda: 1,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        is_available=lambda: True,
        is_initialized=lambda: True,
    )
    _setup_privateuseone_for_python_backend(DEVICE, module)


def move(model: torch.nn.Module) -> None:
    """Put every parameter and buffer on the device; `Module.to` would want memory there."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                there = torch.empty(parameter.shape, dtype=parameter.dtype, device=DEVICE)
                module._parameters[name] = torch.nn.Parameter(there, requires_grad=parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=DEVICE)


def train_step(variant: str) -> None:
    """One training step, in bfloat16 since the kernel of grouped experts has no other dtype."""
    architecture = "mixtral" if variant in EXPERT_VARIANTS else "llama"
    model = routed(architecture, torch.bfloat16, **ALL_VARIANTS[variant]).train()
    if variant in EXPERT_VARIANTS:
        model.set_experts_implementation("grouped_mm")  # the eager experts loop over what they got
    with FakeTensorMode(allow_non_fake_inputs=False):
        move(model)
        ids = torch.zeros(2, 20, dtype=torch.long, device=DEVICE)
        mask = torch.ones(2, 20, dtype=torch.long, device=DEVICE)
        model(ids, attention_mask=mask, labels=ids).loss.backward()
        mixdepth.update_routers(model)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert gradients
        assert {gradient.device.type for gradient in gradients} == {DEVICE}


def main() -> None:
    register()
    problems = {}
    for variant in sys.argv[1:]:
        problems[variant] = None
        try:
            train_step(variant)
        except Exception as error:
            problems[variant] = f"{type(error).__name__}: {error}"
    print(json.dumps(problems))


if __name__ == "__main__":
    main()
