"""Law 10: compilation, activation checkpointing, gradient accumulation and several processes change nothing."""

import copy

import pytest
import torch
import torch.multiprocessing as mp
from tiny import routed, token_ids
from transformers import Trainer, TrainerCallback, TrainingArguments
from two_processes import rank_main
from variants import ALL_VARIANTS, EXPERT_VARIANTS

import mixdepth
from mixdepth.hf.layer import RoutedLayer

IN_TWO_PROCESSES = (
    "default",
    "aux_loss",
    "threshold",
    "token_choice",
    "early_exit",
    "random",
    "soft",
    "mlp",
    "gate_on_mlp",
    "staged",
    "expert_choice",
    "integrated",
)
COMPILED = (
    "default",
    "straight",
    "normed",
    "aux_loss",
    "threshold",
    "token_choice",
    "early_exit",
    "random",
    "soft",
    "attention",
    "mlp",
    "gate_on_mlp",
    "staged",
    "expert_choice",
    "integrated",
    "integrated-expert_choice",
)
"""Variants that are compiled as a whole in the quick suite: one for each way of routing."""


def compiled_cases():
    for variant in ALL_VARIANTS:
        marks = ()
        if variant not in COMPILED:
            marks = pytest.mark.slow
        yield pytest.param(variant, marks=marks)


BOTH_RULES = pytest.mark.parametrize("causal", ["predictor", "aux_loss"])


def architecture_of(variant):
    return "mixtral" if variant in EXPERT_VARIANTS else "llama"


def step(model, ids, **kwargs):
    """Loss and gradients of one training step, by parameter name."""
    model.zero_grad()
    loss = model(ids, labels=ids, **kwargs).loss
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name.replace("_orig_mod.", "")] = parameter.grad.clone()
    return loss.detach(), gradients


def assert_same(actual, expected, tolerance):
    """Compare two results of `step`."""
    loss, gradients = actual
    expected_loss, expected_gradients = expected
    assert abs(loss - expected_loss) <= tolerance
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        assert (gradient - expected_gradients[name]).abs().max() <= tolerance, name


def routed_layers(model):
    return [layer for layer in model.modules() if isinstance(layer, RoutedLayer)]


@pytest.mark.parametrize("padded", [False, True])
@BOTH_RULES
def test_a_compiled_routed_layer_has_one_graph_and_keeps_it(causal, padded):
    model = routed(causal=causal, dtype=torch.float32).train()
    reference = copy.deepcopy(model)
    torch._dynamo.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for layer in routed_layers(model):
        layer.compile(fullgraph=True, backend=count)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []
    for seed in range(3):
        # Other tokens, another choice and another length have the same graph.
        ids = token_ids(seed=seed)
        inputs = {}
        if padded:
            mask = torch.ones_like(ids)
            mask[0, : 3 * (seed + 1)] = 0
            inputs = {"attention_mask": mask}
        assert_same(step(model, ids, **inputs), step(reference, ids, **inputs), 1e-6)
        optimizer.step()
        reference.load_state_dict(model.state_dict())
        counts.append(len(graphs))
    assert counts[0] == counts[1] == counts[2] <= len(routed_layers(model))


@pytest.mark.slow
def test_a_layer_compiled_to_machine_code_computes_the_same():
    model = routed(dtype=torch.float32).train()
    reference = copy.deepcopy(model)
    torch._dynamo.reset()
    for layer in routed_layers(model):
        layer.compile(fullgraph=True)
    for seed in range(2):
        ids = token_ids(seed=seed)
        assert_same(step(model, ids), step(reference, ids), 1e-4)  # fused kernels sum in another order


@pytest.mark.parametrize("variant", list(compiled_cases()))
def test_a_whole_model_compiles_without_a_graph_break(variant):
    model = routed(architecture_of(variant), torch.float32, **ALL_VARIANTS[variant]).train()
    if variant in EXPERT_VARIANTS:
        model.set_experts_implementation("grouped_mm")  # the eager experts loop over what they got
    reference = copy.deepcopy(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    ids = token_ids()
    assert_same(step(compiled, ids), step(reference, ids), 1e-6)
    mixdepth.update_routers(model)  # it saw the compiled pass


@pytest.mark.parametrize("variant", ALL_VARIANTS)
def test_activation_checkpointing_changes_no_variant_by_a_bit(variant):
    model = routed(architecture_of(variant), torch.float32, **ALL_VARIANTS[variant]).train()
    reference = copy.deepcopy(model)
    model.gradient_checkpointing_enable()
    for seed in range(2):
        ids = token_ids(seed=seed)
        assert_same(step(model, ids), step(reference, ids), 0)
        for m in (model, reference):
            mixdepth.update_routers(m)
    for (name, ours), theirs in zip(model.named_buffers(), reference.buffers(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2", "gpt_neox", "mixtral", "gemma2"])
@BOTH_RULES
def test_activation_checkpointing_gives_the_same_loss_and_gradients_to_the_bit(architecture, causal):
    model = routed(architecture, torch.float32, causal=causal).train()
    ids = token_ids()
    expected = step(model, ids)
    model.gradient_checkpointing_enable()
    assert_same(step(model, ids), expected, 0)


def test_reentrant_checkpointing_which_loses_the_routing_losses_is_refused():
    model = routed(dtype=torch.float32).train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    with pytest.raises(ValueError, match="use_reentrant"):
        model(token_ids(), labels=token_ids())


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_two_processes_have_the_gradients_and_thresholds_of_one(engine, tmp_path):
    arguments = (engine, str(tmp_path / "store"), IN_TWO_PROCESSES)
    mp.start_processes(rank_main, arguments, nprocs=2, start_method="forkserver")


class KeepGradients(TrainerCallback):
    def __init__(self):
        self.gradients = {}

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@BOTH_RULES
def test_gradients_accumulate_in_the_trainer_to_those_of_the_whole_batch(causal, tmp_path):
    rows = [{"input_ids": row, "labels": row[:9] + [-100] * 7} for row in token_ids(4, 16).tolist()]
    results = []
    for accumulation in (1, 2, 4):
        model = routed(causal=causal, predictor_loss_coef=0.3, router_aux_loss_coef=0.3)
        keep = KeepGradients()
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4 // accumulation,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            optim="sgd",
            max_grad_norm=0,
        )
        trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[keep])
        loss = torch.tensor(trainer.train().training_loss)
        results.append((loss, keep.gradients))
    for result in results[1:]:
        assert_same(result, results[0], 1e-6)  # the trainer adds up its loss in float32


def test_a_micro_batchs_routing_loss_counts_for_its_share_of_the_label_tokens():
    model = routed(predictor_loss_coef=0.5).train()
    ids = token_ids(2, 16)
    labels = ids.clone()
    labels[:, 11:] = -100  # 10 labels a row are predicted, 20 of 80 in the whole batch
    out = model(ids, labels=labels, num_items_in_batch=torch.tensor(80))
    assert out.loss == out.lm_loss + 0.5 * out.predictor_loss * 20 / 80
