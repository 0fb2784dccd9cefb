"""`mixdepth bench` counts bytes and FLOPs exactly, and leaves models as they were.

Nothing here asks how fast something is.
"""

import json

import pytest
import torch
from corpora import TINY
from tiny import dense, routed, token_ids
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

import mixdepth
from mixdepth.bench import Spread, decode_in_turns, decode_work, fresh_pair, prefill_work, step_work, tokens_taken
from mixdepth.bench.bounds import keys_in_reach, share_taken
from mixdepth.bench.measure import ANCESTRAL
from mixdepth.bench.pair import shared_copy
from mixdepth.bench.timing import CacheSize, take_turns
from mixdepth.cli import main
from mixdepth.files import as_json
from mixdepth.modes import choosers

SMALL = {"batch_sizes": (1, 2), "prompts": (4, 9), "new_tokens": 5, "repeats": 1}
SMALL |= {"train_batch_size": 2, "train_context": 12}
VARIANTS = {
    "block": {},
    "mlp": {"target": "mlp"},
    "attention": {"target": "attention"},
    "token_choice": {"scheme": "token_choice"},
    "early_exit": {"scheme": "early_exit", "capacity": (0.6, 0.4), "layers": (1, 3)},
    "random": {"scheme": "random"},
    "threshold": {"causal": "threshold"},
}
# A layer of the tiny Llama: queries, keys, values, output; three maps of the MLP; two norms. And its head.
ATTENTION, MLP, NORM, HEAD = 32 * 32 + 2 * 32 * 16 + 32 * 32, 3 * 32 * 40, 32, 61 * 32
TOKEN_BYTES = 2 * 2 * 8 * 4  # keys and values of two heads of 8, fp32


@pytest.fixture(autouse=True)
def _little_memory_to_read(monkeypatch):
    monkeypatch.setattr("mixdepth.bench.timing.MEMORY_BYTES", 2**20)


def sampled(model, batch_size=2, length=7, new_tokens=6):
    """Return the tokens that went through the model, and the size of their cache."""
    (text,) = decode_in_turns({"it": model}, token_ids(batch_size, length), new_tokens, 1, top_k=0)["it"]
    assert text.tokens_per_second > 0
    assert text.ids.shape == (batch_size, length + new_tokens + 1)
    return text.ids[:, :-1], text.cache


def test_functions_take_turns_and_the_first_round_is_left_out():
    calls = []
    found = take_turns({name: lambda i, name=name: calls.append(name + str(i)) or i for name in "ab"}, 2)
    assert calls == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert found == {"a": [1, 2], "b": [1, 2]}


def test_a_ratio_is_taken_pair_by_pair():
    assert Spread.of_ratios([2.0, 20.0, 6.0], [1.0, 20.0, 2.0]) == (2.0, 1.0, 3.0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_cache_holds_what_was_processed_to_the_byte(variant):
    model = routed(**VARIANTS[variant])
    ids, cache = sampled(model)
    taken = tokens_taken(model, ids)
    if variant == "mlp":  # attention is dense
        taken = [torch.ones_like(mask) for mask in taken]
    assert cache.stored == tuple(int(mask.sum()) for mask in taken)
    assert cache.held == sum(cache.stored) * 2 * TOKEN_BYTES  # float64
    assert cache.held <= cache.allocated


def test_tokens_that_an_exit_keeps_go_through_the_layers_after_it():
    model = routed(**VARIANTS["early_exit"])
    before, exit_, after, last = tokens_taken(model, token_ids(2, 30))
    assert before.all()
    assert torch.equal(exit_, after)
    assert not exit_.all()
    assert (last <= exit_).all()
    assert (last != exit_).any()
    found = share_taken(model, (before, exit_, after, last))
    assert found == pytest.approx((2 * exit_.float().mean() + last.float().mean()).item() / 3)


def test_the_limits_of_decoding_equal_those_counted_by_hand():
    model = routed(dtype=torch.float32, layers=(1,), scheme="token_choice")
    all_tokens = torch.ones(2, 5, dtype=torch.bool)
    # after prompts of three tokens two steps: one row chooses the layer in the second, none in the first
    chosen = torch.tensor([[1, 0, 1, 0, 1], [1, 1, 1, 0, 0]], dtype=torch.bool)
    cache = CacheSize((10, 5, 10, 10), (TOKEN_BYTES,) * 4, (None,) * 4, 0)
    work = decode_work(model, [all_tokens, chosen, all_tokens, all_tokens], 3, cache)
    layer, router = ATTENTION + MLP + 2 * NORM, 32
    dense_pairs, routed_pairs = 2 * (4 + 5), 3
    assert work.bytes == (
        2 * 3 * layer * 4  # two steps through three dense layers
        + 3 * dense_pairs * TOKEN_BYTES
        + layer * 4  # one step through the routed one
        + routed_pairs * TOKEN_BYTES
        + 2 * router * 4
        + 2 * HEAD * 4
    )
    linear, scores = 2 * (ATTENTION + MLP), 2 * 4 * (8 + 8)
    assert work.flops == (4 * (3 * linear + 2 * router + 2 * HEAD) + linear + (3 * dense_pairs + routed_pairs) * scores)
    assert decode_work(dense(), [all_tokens] * 4, 3, cache).bytes == 2 * (4 * layer + HEAD) * 4 + 4 * 18 * TOKEN_BYTES


@pytest.mark.parametrize(("target", "skipped"), [("mlp", MLP + NORM), ("attention", ATTENTION + NORM)])
def test_a_half_that_no_token_chose_spares_its_own_weights_only(target, skipped):
    model = routed(dtype=torch.float32, layers=(1,), target=target, scheme="token_choice")
    all_tokens, no_token = torch.ones(1, 4, dtype=torch.bool), torch.zeros(1, 4, dtype=torch.bool)
    cache = CacheSize((4,) * 4, (TOKEN_BYTES,) * 4, (None,) * 4, 0)
    all_pass, none_pass = (
        decode_work(model, [all_tokens, mask, all_tokens, all_tokens], 3, cache) for mask in (all_tokens, no_token)
    )
    keys = 0 if target == "mlp" else 4
    assert all_pass.bytes - none_pass.bytes == skipped * 4 + keys * TOKEN_BYTES
    linear = 2 * (skipped - NORM)
    assert all_pass.flops - none_pass.flops == linear + keys * 2 * 4 * (8 + 8)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3", "a dense mistral"])
def test_the_flops_of_prefill_and_decoding_equal_torchs(architecture):
    # a routed layer with a sliding window drops what is out of reach only now and then, and would compute more
    is_dense = architecture.startswith("a dense ")
    model = dense("mistral") if is_dense else routed(architecture, torch.float32, scheme="token_choice")
    ids, length = token_ids(1, 26), 20
    taken = tokens_taken(model, ids)
    assert is_dense or 0 < share_taken(model, taken) < 1
    cache = DynamicCache(config=model.config)

    def counted(part):
        with torch.no_grad(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return counter.get_total_flops()

    prompt = counted(ids[:, :length])
    assert prefill_work(model, [mask[:, :length] for mask in taken]).flops == prompt
    steps = sum(counted(ids[:, [column]]) for column in range(length, ids.shape[1]))
    assert decode_work(model, taken, length, CacheSize.of(cache)).flops == steps


@pytest.mark.parametrize("window", [None, 1, 3, 9])
def test_keys_in_reach_are_those_within_the_window(window):
    attending = torch.rand(3, 8) < 0.5
    for row in range(3):
        for column in range(8):
            first = 0 if window is None else max(0, column - window + 1)
            expected = attending[row, first : column + 1].sum()
            assert keys_in_reach(attending, window)[row, column] == expected


def test_experts_have_no_limit_by_bytes_and_uncounted_architectures_none_by_flops():
    for architecture, flops in (("mixtral", True), ("diffllama", False)):
        model = dense(architecture)
        ids, cache = sampled(model)
        work = decode_work(model, tokens_taken(model, ids), 7, cache)
        assert (work.flops is not None) == flops
        assert (work.bytes is None) == flops
        assert (step_work(model, 1, 9).flops is not None) == flops
        assert (prefill_work(model, tokens_taken(model, ids)).flops is not None) == flops


@pytest.mark.parametrize("variant", VARIANTS)
def test_models_are_measured_and_left_as_they_were(variant):
    model = routed(dtype=torch.float32, **VARIANTS[variant])
    plain = mixdepth.unroute(shared_copy(model)).train()
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    observed = [router.observed for router in choosers(model)]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, text, modes = torch.get_rng_state(), token_ids(1, 300), []
    hook = model.register_forward_pre_hook(lambda model, args: modes.append(model.training))
    found = mixdepth.measure_speed(plain, model, text[0], **SMALL)
    hook.remove()
    assert sum(modes) == 2  # a step that warms up and one that is timed
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert plain.training
    assert not model.training
    assert torch.equal(model.lm_head.weight.grad, torch.ones_like(model.lm_head.weight))
    assert model.model.norm.weight.grad is None
    assert [router.observed for router in choosers(model)] == observed

    step, *others = found.rows
    kinds = [(row.what, row.batch_size, row.context) for row in found.rows]
    assert kinds == [
        ("training step", 2, 12),
        *(("prefill", size, 9) for size in (1, 2)),
        *(("decode", size, length) for size in (1, 2) for length in (4, 9)),
    ]
    ratio = mixdepth.count_flops(plain, 12).total / mixdepth.count_flops(model, 12).total
    assert step.by_flops == pytest.approx(ratio)
    assert step.taken == pytest.approx(0.5 if variant == "early_exit" else 0.4)
    assert 0 < sum(row.taken for row in others) < len(others)
    assert all((row.by_flops > 1) == (row.taken < 1) for row in others)
    (sample,) = decode_in_turns({"it": model}, text[:, :9], 5, 1, **ANCESTRAL)["it"]
    new = [mask[:, 9:] for mask in tokens_taken(model, sample.ids[:, :-1])]
    assert found.rows[4].taken == share_taken(model, new)
    for row in found.rows[3:]:
        assert (row.by_bytes > 1) == (row.taken < 1)
        assert row.cache.dense == row.batch_size * (row.context + 5) * 4 * TOKEN_BYTES
        assert (row.cache.routed < row.cache.dense) == (variant != "mlp")


def test_results_are_json_and_a_table():
    plain = dense("gpt2")
    found = mixdepth.measure_speed(plain, mixdepth.route(shared_copy(plain), capacity=0.5), **SMALL)
    values = found.to_dict()
    assert json.loads(as_json(values)) == values
    assert values["rows"][3]["by_bytes"] == found.rows[3].by_bytes
    assert values["models"]["dense"] == {"class": "GPT2LMHeadModel", "parameters": plain.num_parameters()}
    machine, models, header, *lines = str(found).splitlines()
    assert "GFLOP/s in matrix products" in machine
    assert "medians of 1" in models
    assert header.split()[:2] == ["batch", "context"]
    assert [line.split("  ")[0] for line in lines] == ["training step", *["prefill"] * 2, *["decode"] * 4]


def test_a_model_at_capacity_1_saves_nothing_and_says_so():
    plain = dense()
    whole = mixdepth.route(shared_copy(plain), capacity=1.0, gate="one")
    found = mixdepth.measure_speed(plain, whole, **{**SMALL, "train_batch_size": 0})
    assert "stands at capacity 1" in found.notes[0]
    for row in found.rows:
        assert row.what != "training step"
        assert row.taken == 1
        assert 0.9 < row.by_flops < 1  # routers have their cost
    assert all(row.cache.routed == row.cache.dense for row in found.rows[2:])


def test_lengths_that_are_not_given_keep_below_the_models_positions():
    plain = dense()
    found = mixdepth.measure_speed(plain, routed(plain), batch_sizes=(1,), new_tokens=40, repeats=1)
    assert [row.context for row in found.rows] == [128, 87, 16, 87]


def test_a_fresh_pair_shares_its_weights_and_chooses_its_share():
    pair = fresh_pair({"layers": 4, "width": 64}, {"capacity": 0.25})
    assert (pair.text, pair.notes) == (None, [])
    for name, parameter in pair.dense.named_parameters():
        assert pair.routed.get_parameter(name) is parameter
    share = share_taken(pair.routed, tokens_taken(pair.routed, torch.randint(256, (16, 512))))
    assert share == pytest.approx(0.25, abs=0.05)


# The command line


def bench(*arguments, capsys, **settings):
    flags = {"batch-sizes": "1", "prompts": "5", "new-tokens": "4", "repeats": "1", "train-context": "16", **settings}
    code = main(["bench", *arguments, *(part for name, value in flags.items() for part in (f"--{name}", value))])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_shape_is_benched_and_written_to_a_file(tmp_path, capsys):
    file = tmp_path / "speeds.json"
    code, out, _ = bench("--layers", "2", "--width", "32", "--capacity", "0.5", "--json", str(file), capsys=capsys)
    assert code == 0
    assert out.splitlines()[1].startswith("dense LlamaForCausalLM, ")
    rows = json.loads(file.read_text())["rows"]
    assert [(row["what"], row["context"]) for row in rows] == [("training step", 16), ("prefill", 5), ("decode", 5)]
    assert rows[0]["taken"] == 0.5


def test_a_run_is_unrouted_and_a_plain_model_is_routed_for_the_comparison(tmp_path, capsys, corpus):
    run = tmp_path / "run"
    mixdepth.train(run, corpus=corpus, steps=2, depth=mixdepth.DepthConfig(capacity=0.25), **TINY)
    code, out, _ = bench(str(run), "--json", "-", capsys=capsys)
    assert code == 0
    found = json.loads(out)
    assert found["models"]["dense"]["class"] == "LlamaForCausalLM"
    assert found["notes"] == []
    assert found["rows"][0]["taken"] == 0.25

    plain = tmp_path / "plain"
    mixdepth.convert(str(run), plain)
    code, out, _ = bench(str(plain), "--corpus", corpus, "--scheme", "token_choice", "--json", "-", capsys=capsys)
    found = json.loads(out)
    assert code == 0
    assert "not trained" in found["notes"][0]
    assert found["rows"][0]["taken"] == 0.5  # what conversion takes by default

    whole = tmp_path / "converted"
    mixdepth.convert(str(plain), whole, mixdepth.DepthConfig(capacity=0.5, gate="unit"))
    code, out, _ = bench(str(whole), "--corpus", corpus, capsys=capsys)
    assert code == 0
    assert "stands at capacity 1" in out

    code, _, err = bench(str(run), "--capacity", "0.5", capsys=capsys)
    assert (code, err) == (2, f"mixdepth: {str(run)!r} is routed already: leave out capacity\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "'nowhere' is neither a run nor a model's folder nor a model of the hub"),
        (["nowhere", "--width", "64"], "width has no meaning next to a model"),
        (["--corpus", "stdlib"], "--corpus stdlib has no meaning without a model"),
        (["--width", "33"], "width must be a multiple of 16"),
        (["--capacity", "2"], "capacity must be a fraction in (0, 1], not 2"),
        (["--prompts", "0"], "prompts must be a whole number of at least 1, not 0"),
        (["--prompts", "5,half"], "prompts must be a whole number of at least 1, not 'half'"),
        (["--batch-sizes", ","], "batch_sizes must name at least one number"),
        (["--new-tokens", "0"], "new_tokens must be a whole number of at least 1, not 0"),
        (["--repeats", "0"], "repeats must be a whole number of at least 1, not 0"),
        (["--train-batch-size", "-1"], "train_batch_size must be a whole number of at least 0, not -1"),
        (["--prompts", "200000"], "are beyond the models' 131072 positions"),
        (["--train-context", "200000"], "train_context=200000 is beyond the models' 131072 positions"),
    ],
)
def test_what_makes_no_sense_ends_with_code_2_and_one_sentence(arguments, message, capsys):
    if "--width" not in arguments and "nowhere" not in arguments:
        arguments = ["--layers", "2", "--width", "32", *arguments]
    code = main(["bench", *arguments])
    _, err = capsys.readouterr()
    assert code == 2
    assert err.startswith("mixdepth: ")
    assert message in err
    assert err.count("\n") == 1


def test_text_must_be_long_enough_and_of_the_models_vocabulary_and_something_must_learn():
    plain = dense()
    with pytest.raises(ValueError, match="the text has 8 tokens, fewer than a window of 12"):
        mixdepth.measure_speed(plain, routed(plain), token_ids(1, 8)[0], **SMALL)
    with pytest.raises(ValueError, match="the text has a token 70, and the models have 61 tokens"):
        mixdepth.measure_speed(plain, routed(plain), torch.full((50,), 70), **SMALL)
    with pytest.raises(ValueError, match="new_tokens=200 are beyond the models' 128 positions"):
        mixdepth.measure_speed(plain, routed(plain), new_tokens=200)
    with pytest.raises(ValueError, match="no parameter of the dense model can be trained"):
        mixdepth.measure_speed(dense().requires_grad_(False), routed(plain), **SMALL)
