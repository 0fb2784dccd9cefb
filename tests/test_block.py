"""Routed and Router without transformers: any block, in a loop of the user's own."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

import mixdepth
from mixdepth import DepthConfig, Routed, Router


class Recorder(nn.Module):
    """A block that keeps its arguments."""

    def forward(self, x, **kwargs):
        self.arguments = kwargs
        self.x = x
        return x + 1


@pytest.mark.parametrize("training", [True, False])
def test_without_a_causal_rule_a_block_gets_the_top_k_tokens_in_both_modes(training):
    routed = Routed(Recorder(), width=4, config=DepthConfig(capacity=0.5, gate="one")).train(training)
    x = torch.randn(2, 6, 4)
    out = routed(x)
    scores = x @ routed.router.projection.weight[0]
    for row in range(2):
        chosen = scores[row].topk(3).indices.sort().values
        assert torch.equal(routed.block.x[row], x[row, chosen])
        expected = x[row].clone()
        expected[chosen] += 1
        assert torch.equal(out[row], expected)


def test_arguments_indexed_by_token_are_gathered_along():
    routed = Routed(Recorder(), width=4, config=DepthConfig(capacity=0.5), tokenwise={"position": 1, "pairs": (1, 2)})
    x = torch.randn(2, 6, 4)
    pairs = torch.randn(2, 6, 6)
    routed(x, position=torch.arange(6)[None], pairs=pairs, other=torch.ones(6), absent=None)
    index = routed.route.index
    assert torch.equal(routed.block.arguments["position"], index)
    for row in range(2):
        assert torch.equal(routed.block.arguments["pairs"][row], pairs[row][index[row]][:, index[row]])
    assert torch.equal(routed.block.arguments["other"], torch.ones(6))


def test_padding_is_never_chosen_takes_no_capacity_and_the_block_learns_of_unused_slots():
    routed = Routed(Recorder(), width=4, config=DepthConfig(capacity=0.5), slot_mask="used")
    mask = torch.tensor([[False] * 4 + [True] * 2, [True] * 6])
    routed(torch.randn(2, 6, 4), mask=mask)
    assert routed.route.count.tolist() == [1, 3]
    assert not (routed.route.mask & ~mask).any()
    assert routed.block.arguments["used"].tolist() == [[True, False, False], [True, True, True]]


def test_a_mask_for_a_block_that_cannot_be_told_is_refused():
    with pytest.raises(ValueError, match="slot_mask"):
        Routed(Recorder(), width=4)(torch.randn(1, 3, 4), mask=torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"mask must be boolean, .* not torch.int64"):
        Routed(Recorder(), width=4, slot_mask="used")(torch.randn(1, 3, 4), mask=torch.ones(1, 3, dtype=torch.long))


def test_a_row_of_a_padded_batch_equals_the_row_by_itself_in_an_encoder_layer():
    class Block(nn.TransformerEncoderLayer):
        def forward(self, x, used):
            return super().forward(x, src_key_padding_mask=~used)

    block = Block(8, 2, 16, dropout=0.0, batch_first=True).double()
    routed = Routed(block, width=8, config=DepthConfig(capacity=0.6, init_std=1.0), slot_mask="used").double()
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, 4:] = False
    batch = routed(x, mask=mask)
    alone = routed(x[:1, :4], mask=mask[:1, :4])
    assert (batch[0, :4] - alone[0]).abs().max() <= 1e-10
    assert torch.equal(batch[0, 4:], x[0, 4:])


@pytest.mark.parametrize("training", [True, False])
def test_random_routing_chooses_in_a_padded_row_what_it_chooses_in_the_row_by_itself(training):
    routed = Routed(Recorder(), width=4, config=DepthConfig(scheme="random", capacity=0.5), slot_mask="used")
    routed.train(training)
    x = torch.randn(3, 40, 4)
    mask = torch.ones(3, 40, dtype=torch.bool)
    mask[0, :7] = False  # on the left
    mask[1, 20:26] = False  # between
    routed(x, mask=mask)
    batch = routed.route.mask
    for row in range(3):
        real = mask[row]
        routed(x[row : row + 1, real], mask=real[None, real])
        assert torch.equal(batch[row, real], routed.route.mask[0])


@pytest.mark.parametrize("causal", ["predictor", "aux_loss"])
def test_the_routing_loss_of_a_plain_loop_teaches_the_causal_rule_to_foresee_the_choice(causal):
    """Tokens whose first feature is large are chosen; the rule must learn to see that by itself."""
    config = DepthConfig(capacity=0.25, gate="one", causal=causal, predictor_loss_coef=1.0, router_aux_loss_coef=1.0)
    routed = Routed(Recorder(), width=8, config=config)
    with torch.no_grad():
        routed.router.projection.weight.copy_(torch.eye(8)[:1])
    optimizer = torch.optim.Adam(routed.parameters(), lr=0.02)
    for _ in range(150):
        x = torch.randn(8, 32, 8)
        x[..., 7] = 1  # a constant: the score has no bias of its own
        routed(x)
        optimizer.zero_grad()
        loss = mixdepth.routing_loss(routed)
        loss.backward()
        optimizer.step()
    assert loss < 0.4  # 0.56 is the entropy of a quarter
    routed.eval()(x)
    agreement = (routed.route.mask == mixdepth.routes.top_k(routed.route.logits, torch.full((8,), 8))).double().mean()
    assert agreement > 0.9


def test_the_routing_loss_is_zero_without_a_causal_rule_and_needs_a_routed_model():
    routed = Routed(Recorder(), width=4)
    with pytest.raises(ValueError, match="forward pass first"):
        mixdepth.routing_loss(routed)
    routed(torch.randn(1, 8, 4))
    assert mixdepth.routing_loss(routed) == 0
    with pytest.raises(ValueError, match="Linear has no Routed block"):
        mixdepth.routing_loss(nn.Linear(2, 2))


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_a_causal_rule_skips_in_evaluation(share):
    config = DepthConfig(capacity=0.25, causal="aux_loss", gate="one")
    routed = Routed(Recorder(), width=4, config=config).eval()
    x = torch.ones(3, 10, 4) * (torch.rand(3, 10, 1) < share)
    routed.block.x = x[:, :0]
    with torch.no_grad():
        routed.router.projection.weight.fill_(1.0)
    out = routed(x)
    assert routed.block.x.shape[1] == (x[..., 0] > 0).sum(1).max()
    assert torch.equal(out, x + (x > 0))
    with pytest.raises(ValueError, match=r"call train\(\)"):
        mixdepth.routing_loss(routed.train())


def test_a_routed_block_can_be_copied_after_a_training_pass():
    routed = Routed(nn.Linear(4, 4), width=4)
    routed(torch.randn(1, 8, 4))
    assert copy.deepcopy(routed).route is None


def test_overlapping_look_ahead_contexts_end_when_the_last_one_does():
    routed = Routed(Recorder(), width=4, config=DepthConfig(causal="aux_loss")).eval()
    first, second = mixdepth.lookahead(routed), mixdepth.lookahead(routed)
    first.__enter__(), second.__enter__()
    assert not copy.deepcopy(routed).router.looks_ahead
    first.__exit__(None, None, None)
    assert routed.router.looks_ahead
    second.__exit__(None, None, None)
    assert not routed.router.looks_ahead


def test_what_overflows_in_an_unused_slot_stays_there():
    class Overflow(nn.Module):
        def forward(self, x, used):
            return (x + 1).masked_fill(~used[..., None], torch.inf)

    routed = Routed(Overflow(), width=4, config=DepthConfig(capacity=0.5), slot_mask="used")
    mask = torch.tensor([[True] * 2 + [False] * 4, [True] * 6])
    assert routed(torch.randn(2, 6, 4), mask=mask).isfinite().all()


def test_one_block_takes_one_capacity():
    with pytest.raises(ValueError, match=r"one block takes one capacity, not \[0.5, 0.5\]"):
        Routed(Recorder(), width=4, config=DepthConfig(capacity=(0.5, 0.5)))


def test_an_initial_spread_of_zero_starts_all_scores_at_zero():
    router = Router(4, DepthConfig(init_std=0.0), capacity=0.5)
    route = router(torch.randn(2, 6, 4))
    assert not route.logits.any()
    assert route.index.tolist() == [[0, 1, 2]] * 2  # of equals the earlier ones


@pytest.mark.parametrize(
    ("gate", "weight"),
    [
        ("raw", -2.0),
        ("sigmoid", 0.11920292),
        ("tanh", -0.9640276),
        ("unit", 0.0359724),
        ("straight", 1.0),
        ("one", 1.0),
    ],
)
def test_a_gate_weighs_a_score(gate, weight):
    assert mixdepth.router.weigh(torch.tensor([-2.0]), gate).item() == pytest.approx(weight)


def test_the_core_does_without_transformers():
    code = """
import sys, types
package = types.ModuleType("mixdepth"); package.__path__ = [sys.argv[1]]; sys.modules["mixdepth"] = package
import mixdepth.encoder, mixdepth.block
assert not any(name.split(".")[0] == "transformers" for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code, mixdepth.__path__[0]], check=True)
