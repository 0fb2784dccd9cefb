"""Every mode of `generate()`: each gives with its cache what it gives without one, and what it says about itself.

Modes that routed models refuse are refused with one sentence, and leave the model as it was.
"""

import copy
import inspect

import pytest
import torch
from promised import (
    ARCHITECTURES,
    CASES,
    DENSE,
    every_model,
    every_routed_model,
    every_rule_on_llama,
    logits_of,
    over,
    precision,
    promised,
)
from tiny import VOCAB, dense, routed, token_ids
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    WatermarkingConfig,
)

import mixdepth
from mixdepth.hf.architectures import RUN_ALL_LAYERS, decoder_layers
from mixdepth.hf.names import SUPPORTED

NEW = 8
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
SAMPLE = {**GREEDY, "do_sample": True}

those_that_draft_early = over([case for case in CASES if case[1] != DENSE or case[0] not in RUN_ALL_LAYERS])
"""transformers itself fails where a dense model runs all of its layers."""


def prompts():
    """Three texts of different lengths, padded on the left."""
    ids = token_ids(3, 14)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    mask[1, :2] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def repetitive_prompt():
    """One text, in which what follows can be looked up."""
    return token_ids(1, 6).repeat(1, 4)


def ready(architecture, variant):
    """A model whose decisions do not depend on the order of sums."""
    dtype, _ = precision(architecture, variant)
    model = promised(architecture, variant, dtype)
    model.set_experts_implementation("eager")
    return model


def generated(model, inputs, seed=3, **settings):
    torch.manual_seed(seed)
    return model.generate(**inputs, **settings)


def assert_as_without_cache(model, inputs, **settings):
    with_cache = generated(model, inputs, use_cache=True, **settings)
    without = generated(model, inputs, use_cache=False, **settings)
    assert torch.equal(with_cache, without)
    return with_cache


# Modes


MODES = {
    "greedy": GREEDY,
    "sampling": SAMPLE,
    "several samples": {**SAMPLE, "num_return_sequences": 2},
    "beams": {**GREEDY, "num_beams": 3},
    "several beams": {**GREEDY, "num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5},
    "early beams": {**GREEDY, "num_beams": 2, "early_stopping": True, "eos_token_id": list(range(3, 12))},
    "sampled beams": {**SAMPLE, "num_beams": 2, "temperature": 1.5},
}


@pytest.mark.parametrize("mode", MODES)
@every_model
def test_a_mode_gives_the_same_with_and_without_a_cache(architecture, variant, mode):
    settings = MODES[mode]
    inputs = prompts()
    tokens = assert_as_without_cache(ready(architecture, variant), inputs, **settings)
    copies = settings.get("num_return_sequences", 1)
    assert len(tokens) == 3 * copies
    assert torch.equal(tokens[:, :14], inputs["input_ids"].repeat_interleave(copies, 0))


def greedily_by_hand(model, ids, mask):
    """The likeliest token of a whole pass, again and again."""
    for _ in range(NEW):
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
        mask = torch.cat([mask, mask[:, -1:]], 1)
    return ids


@every_model
def test_greedy_tokens_are_the_likeliest_of_whole_passes(architecture, variant):
    model = ready(architecture, variant)
    inputs = prompts()
    expected = greedily_by_hand(model, inputs["input_ids"], inputs["attention_mask"])
    assert torch.equal(generated(model, inputs, **GREEDY), expected)


@every_model
def test_a_row_with_left_padding_is_continued_as_if_alone(architecture, variant):
    model = ready(architecture, variant)
    inputs = prompts()
    together = generated(model, inputs, **GREEDY)
    for row, mask in enumerate(inputs["attention_mask"]):
        alone = generated(model, {"input_ids": inputs["input_ids"][row : row + 1, mask == 1]}, **GREEDY)
        assert torch.equal(together[row, 14:], alone[0, int(mask.sum()) :])


@every_model
def test_the_mode_of_the_model_does_not_change_what_it_generates(architecture, variant):
    """In training mode dropout would run, which these models have none of; routing stays causal."""
    model = ready(architecture, variant)
    expected = generated(model, prompts(), **GREEDY)
    assert torch.equal(generated(model.train(), prompts(), **GREEDY), expected)
    assert model.training


# Settings that change the scores


WARPERS = {
    "temperature": {"temperature": 0.4},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "top_h": {"top_h": 0.5},
    "typical_p": {"typical_p": 0.6},
    "epsilon_cutoff": {"epsilon_cutoff": 0.02},
    "eta_cutoff": {"eta_cutoff": 0.02},
    "all together": {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "renormalize_logits": True},
}


@pytest.mark.parametrize("warper", WARPERS)
@every_rule_on_llama
def test_a_warper_of_sampling_gives_the_same_with_and_without_a_cache(architecture, variant, warper):
    model = ready(architecture, variant)
    tokens = assert_as_without_cache(model, prompts(), **SAMPLE, **WARPERS[warper])
    assert tokens.shape == (3, 14 + NEW)


PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.8},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[5], [7, 8]]},
    "sequence_bias": {"sequence_bias": [[[9], 8.0]]},
    "suppress_tokens": {"suppress_tokens": list(range(40))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(3, 40))},
    "forced_eos_token_id": {"forced_eos_token_id": 17},
    "min_new_tokens": {"min_new_tokens": 6, "eos_token_id": list(range(3, 60))},  # all but 0, 1, 2 and 60
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (2, 9.0), "eos_token_id": 11},
    "remove_invalid_values": {"remove_invalid_values": True},
    "guidance_scale": {"guidance_scale": 1.7},
    "watermarking": {"watermarking_config": WatermarkingConfig(bias=3.0)},
}


@pytest.mark.parametrize("processor", PROCESSORS)
@every_rule_on_llama
def test_a_processor_of_scores_gives_the_same_with_and_without_a_cache(architecture, variant, processor):
    model = ready(architecture, variant)
    tokens = assert_as_without_cache(model, prompts(), **{**GREEDY, **PROCESSORS[processor]})[:, 14:]
    if processor == "suppress_tokens":
        assert (tokens >= 40).all()
    if processor == "forced_eos_token_id":
        assert (tokens[:, -1] == 17).all()
    if processor == "min_new_tokens":
        assert ((tokens[:, :6] < 3) | (tokens[:, :6] == 60)).all()


@every_model
def test_guidance_takes_a_negative_prompt(architecture, variant):
    model = ready(architecture, variant)
    inputs = {"input_ids": token_ids(2, 9)}
    negative = token_ids(2, 9, seed=4)
    settings = {**GREEDY, "guidance_scale": 2.0, "negative_prompt_ids": negative}
    settings["negative_prompt_attention_mask"] = torch.ones_like(negative)
    guided = assert_as_without_cache(model, inputs, **settings)
    assert not torch.equal(guided, generated(model, inputs, **GREEDY))


class Favourite(LogitsProcessor):
    """Prefers the token that has the number of the step."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, input_ids.shape[1]] += 100
        return scores


class UntilFive(StoppingCriteria):
    """Ends a row once it has five new tokens."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= 19)


@every_model
def test_processors_and_criteria_of_the_user_are_asked(architecture, variant):
    model = ready(architecture, variant)
    favourite, until_five = LogitsProcessorList([Favourite()]), StoppingCriteriaList([UntilFive()])
    tokens = generated(model, prompts(), logits_processor=favourite, stopping_criteria=until_five, **GREEDY)
    assert tokens[:, 14:].tolist() == [[14, 15, 16, 17, 18]] * 3


@every_model
def test_a_text_ends_at_its_end_token_and_is_padded(architecture, variant):
    model = ready(architecture, variant)
    free = generated(model, prompts(), **GREEDY)[:, 14:]
    end = int(free[0, 2])
    tokens = generated(model, prompts(), **{**GREEDY, "eos_token_id": end})[:, 14:]
    for row, whole in zip(tokens.tolist(), free.tolist(), strict=True):
        length = whole.index(end) + 1 if end in whole else NEW
        assert row[:length] == whole[:length]
        assert set(row[length:]) <= {0}


LENGTHS = {
    "max_length": ({"max_length": 17}, 3),
    "max_new_tokens": ({"max_new_tokens": 1}, 1),
    "max_time": ({"max_new_tokens": 50, "max_time": 0.0}, 1),
    "criterion": ({"max_new_tokens": 50, "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(16)])}, 2),
    "min_length": ({"max_new_tokens": 5, "min_length": 30}, 5),
}


@pytest.mark.parametrize("limit", LENGTHS)
@every_rule_on_llama
def test_a_limit_of_length_holds(architecture, variant, limit):
    settings, expected = LENGTHS[limit]
    base = {name: value for name, value in GREEDY.items() if name != "max_new_tokens"}
    tokens = generated(ready(architecture, variant), prompts(), **base, **settings)
    assert tokens.shape[1] == 14 + expected


# What comes out besides tokens


@every_model
def test_the_logits_of_the_steps_are_those_of_one_pass(architecture, variant):
    model = ready(architecture, variant)
    _, tolerance = precision(architecture, variant)
    options = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    out = generated(model, {"input_ids": token_ids()}, **GREEDY, **options, output_hidden_states=True)
    with torch.no_grad():
        whole = model(out.sequences[:, :-1], output_hidden_states=True, use_cache=False)
    logits = torch.stack(out.logits, 1)
    assert (logits - whole.logits[:, 19:].float()).abs().max() <= max(tolerance, 1e-5)
    assert torch.equal(torch.stack(out.scores, 1), logits)
    assert len(out.hidden_states) == NEW
    for step, states in enumerate(out.hidden_states):
        assert [state.shape[1] for state in states] == [20 if step == 0 else 1] * 5
        for state, expected in zip(states, whole.hidden_states, strict=True):
            difference = (state[:, -1] - expected[:, 19 + step]).abs().max()
            assert difference <= tolerance * expected.abs().max().clamp(min=1)


@pytest.mark.parametrize("num_beams", [1, 3])
@every_model
def test_transition_scores_are_the_log_probabilities_of_one_pass(architecture, variant, num_beams):
    model = ready(architecture, variant)
    ids = token_ids()
    options = {"return_dict_in_generate": True, "output_scores": True, "num_beams": num_beams, "length_penalty": 0.0}
    out = generated(model, {"input_ids": ids}, **{**GREEDY, **options})
    beams = getattr(out, "beam_indices", None)
    scores = model.compute_transition_scores(out.sequences, out.scores, beams, normalize_logits=num_beams == 1)
    with torch.no_grad():
        logits = model(out.sequences[:, :-1], use_cache=False).logits[:, 19:].float()
    expected = logits.log_softmax(-1).gather(2, out.sequences[:, 20:, None])[..., 0]
    torch.testing.assert_close(scores, expected, atol=1e-3, rtol=1e-3)
    if beams is not None:
        torch.testing.assert_close(out.sequences_scores, expected.sum(1), atol=1e-3, rtol=1e-3)


class Collector:
    """A streamer that keeps what it is given."""

    def __init__(self):
        self.tokens, self.is_ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.is_ended = True


@every_model
def test_a_streamer_is_given_the_prompt_and_every_token(architecture, variant):
    streamer = Collector()
    out = generated(ready(architecture, variant), {"input_ids": token_ids(1)}, streamer=streamer, **GREEDY)
    assert streamer.tokens == out[0].tolist()
    assert streamer.is_ended


# Drafts


@every_model
def test_drafts_of_an_assistant_change_nothing(architecture, variant):
    model = ready(architecture, variant)
    inputs = {"input_ids": token_ids(1, 14)}
    expected = generated(model, inputs, **GREEDY)
    assistants = {
        "dense": dense("llama", torch.float64, seed=5),
        "routed": routed("llama", seed=5),
        "itself": model,
        "its twin": copy.deepcopy(model),
    }
    for name, assistant in assistants.items():
        assert torch.equal(generated(model, inputs, assistant_model=assistant, **GREEDY), expected), name


@every_model
def test_drafts_that_are_looked_up_in_the_prompt_change_nothing(architecture, variant):
    model = ready(architecture, variant)
    inputs = {"input_ids": repetitive_prompt()}
    expected = generated(model, inputs, **GREEDY)
    options = {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 2}
    assert torch.equal(generated(model, inputs, **options, **GREEDY), expected)


@every_model
def test_sampling_takes_drafts(architecture, variant):
    model = ready(architecture, variant)
    inputs = {"input_ids": repetitive_prompt()}
    drafts = [{"assistant_model": dense("llama", torch.float64, seed=5)}, {"prompt_lookup_num_tokens": 3}]
    for draft in drafts:
        tokens = generated(model, inputs, **SAMPLE, **draft)
        assert tokens.shape == (1, 24 + NEW)
        assert tokens.max() < VOCAB


def calls_of_layers(model):
    """How often each layer of the stack is called, counted as it is."""
    counts = [0] * len(decoder_layers(model))

    def count(index):
        def hook(*args):
            counts[index] += 1

        return hook

    for index, layer in enumerate(decoder_layers(model)):
        layer.register_forward_pre_hook(count(index))
    return counts


@pytest.mark.parametrize("num_layers", [1, 3])
@those_that_draft_early
def test_drafts_of_the_first_layers_change_nothing_or_are_refused(architecture, variant, num_layers):
    model = ready(architecture, variant)
    inputs = {"input_ids": token_ids(1, 14)}
    expected = generated(model, inputs, **GREEDY)
    before = everything_of(model)
    if architecture in RUN_ALL_LAYERS:
        with pytest.raises(ValueError, match=f"assistant_early_exit={num_layers} cannot be used with '{architecture}'"):
            generated(model, inputs, assistant_early_exit=num_layers, **GREEDY)
    else:
        counts = calls_of_layers(model)
        assert torch.equal(generated(model, inputs, assistant_early_exit=num_layers, **GREEDY), expected)
        assert counts[0] == counts[num_layers - 1] > counts[num_layers]
    assert_same(everything_of(model), before)


@over([case for case in CASES if case[1] != DENSE and case[0] not in RUN_ALL_LAYERS])
def test_drafts_that_are_interrupted_leave_the_model_as_it_was(architecture, variant):
    """transformers changes the model's config for them, and changes it back only if nothing goes wrong."""
    model = ready(architecture, variant)
    before = everything_of(model)

    def interrupt(*args):
        if model.config.num_hidden_layers == 2:
            raise KeyboardInterrupt

    hook = decoder_layers(model)[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        generated(model, {"input_ids": token_ids(1, 14)}, assistant_early_exit=2, **GREEDY)
    hook.remove()
    assert_same(everything_of(model), before)


def test_the_architectures_that_run_all_of_their_layers_are_those_that_are_listed():
    """The others run as many as `config.num_hidden_layers` says at the moment."""
    found = []
    for architecture in SUPPORTED:
        model = dense(architecture)
        counts = calls_of_layers(model)
        model.base_model.config.num_hidden_layers = 2
        with torch.no_grad():
            model(token_ids(1, 4), use_cache=False)
        if counts[2]:
            found.append(architecture)
    assert tuple(found) == RUN_ALL_LAYERS


# Where generation starts


@pytest.mark.parametrize("chunk", [1, 4])
@every_model
def test_a_prompt_in_chunks_gives_the_same_tokens(architecture, variant, chunk):
    model = ready(architecture, variant)
    expected = generated(model, prompts(), **GREEDY)
    assert torch.equal(generated(model, prompts(), prefill_chunk_size=chunk, **GREEDY), expected)


@every_model
def test_embeddings_take_the_place_of_tokens(architecture, variant):
    model = ready(architecture, variant)
    inputs = prompts()
    expected = generated(model, inputs, **GREEDY)
    embeddings = model.get_input_embeddings()(inputs["input_ids"]).detach()
    mask = inputs["attention_mask"]
    alone = generated(model, {"inputs_embeds": embeddings, "attention_mask": mask}, **GREEDY)
    assert torch.equal(alone, expected[:, 14:])
    both = generated(model, {**inputs, "inputs_embeds": embeddings}, **GREEDY)
    assert torch.equal(both, expected)


@every_model
def test_a_text_is_continued_from_its_cache(architecture, variant):
    model = ready(architecture, variant)
    inputs = prompts()
    expected = generated(model, inputs, **{**GREEDY, "max_new_tokens": 2 * NEW})
    first = generated(model, inputs, return_dict_in_generate=True, **GREEDY)
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, NEW, dtype=torch.long)], 1)
    more = {"input_ids": first.sequences, "attention_mask": mask, "past_key_values": first.past_key_values}
    assert torch.equal(generated(model, more, **GREEDY), expected)


@every_model
def test_a_cache_of_the_users_is_filled(architecture, variant):
    model = ready(architecture, variant)
    expected = generated(model, prompts(), **GREEDY)
    for cache in (DynamicCache(), DynamicCache(config=model.config)):
        assert torch.equal(generated(model, prompts(), past_key_values=cache, **GREEDY), expected)
        assert cache.get_seq_length() == 14 + NEW - 1
    assert torch.equal(generated(model, prompts(), cache_implementation="dynamic", **GREEDY), expected)


# Where settings and code come from


@every_model
def test_settings_come_from_a_config_and_are_saved_with_the_model(architecture, variant, tmp_path):
    model = ready(architecture, variant)
    settings = {**GREEDY, "num_beams": 2, "eos_token_id": 17}
    expected = generated(model, prompts(), **settings)
    config = GenerationConfig(**settings)
    assert torch.equal(generated(model, prompts(), generation_config=config), expected)
    model.generation_config = config
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=model.dtype)
    loaded.set_experts_implementation("eager")
    assert loaded.generation_config.num_beams == 2
    assert torch.equal(generated(loaded, prompts()), expected)


LOOP = """
import torch

def generate(model, input_ids, steps=2, **kwargs):
    for _ in range(steps):
        inputs = model.prepare_inputs_for_generation(input_ids, use_cache=False)
        token = model(**inputs).logits[:, -1:].argmax(-1)
        input_ids = torch.cat([input_ids, token], 1)
    return input_ids
"""


@every_model
def test_a_loop_of_the_users_own_generates(architecture, variant, tmp_path):
    """As a function, and as a folder with a file."""
    model = ready(architecture, variant)
    ids = token_ids()
    expected = generated(model, {"input_ids": ids}, **{**GREEDY, "max_new_tokens": 3})
    namespace: dict = {}
    exec(LOOP, namespace)

    def function(model, input_ids, **kwargs):
        return namespace["generate"](model, input_ids, steps=3)

    (tmp_path / "custom_generate").mkdir()
    (tmp_path / "custom_generate" / "generate.py").write_text(LOOP)
    assert torch.equal(model.generate(input_ids=ids, custom_generate=function, **GREEDY), expected)
    folder = {"custom_generate": str(tmp_path), "trust_remote_code": True, "steps": 3}
    assert torch.equal(model.generate(input_ids=ids, **folder, **GREEDY), expected)


@every_routed_model
def test_generate_has_the_signature_and_the_words_of_transformers(architecture, variant):
    model = promised(architecture, variant)
    assert inspect.signature(type(model).generate) == inspect.signature(GenerationMixin.generate)
    assert model.generate.__doc__ == GenerationMixin.generate.__doc__


# What is refused


def everything_of(model):
    """What a call that fails must leave as it was."""
    return {
        "config": model.config.to_dict(),
        "generation_config": model.generation_config.to_dict(),
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "training": [module.training for module in model.modules()],
        "logits": logits_of(model),
    }


def assert_same(after, before):
    weights, expected = after.pop("weights"), before.pop("weights")
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor.nan_to_num(), expected[name].nan_to_num()), name
    assert torch.equal(after.pop("logits"), before.pop("logits"))
    assert after == before


CACHES = ("static", "offloaded", "offloaded_static", "quantized", "sliding_window")

REFUSED = {
    **{name: ({"cache_implementation": name}, f"'{name}' cannot: use the default cache") for name in CACHES},
    "output_attentions": ({"output_attentions": True}, "output_attentions needs every layer to run, and generate()"),
}


def assert_refused(error):
    """One sentence of ours, on one line."""
    assert type(error.value) is ValueError
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("way", REFUSED)
@every_routed_model
def test_what_a_routed_model_cannot_generate_with_is_refused_and_changes_nothing(architecture, variant, way):
    settings, sentence = REFUSED[way]
    model = ready(architecture, variant)
    model.set_attn_implementation("eager")
    before = everything_of(model)
    for num_beams in (1, 2):
        with pytest.raises(ValueError, match=sentence.replace("(", r"\(").replace(")", r"\)")) as error:
            generated(model, prompts(), **settings, **GREEDY, num_beams=num_beams, return_dict_in_generate=True)
        assert_refused(error)
    assert_same(everything_of(model), before)


@every_routed_model
def test_continuous_batching_is_refused_and_changes_nothing(architecture, variant):
    model = ready(architecture, variant)
    before = everything_of(model)
    with pytest.raises(ValueError, match="'continuous batching' cannot: use the default cache") as error:
        model.generate_batch([[5, 6, 7]])
    assert_refused(error)
    assert_same(everything_of(model), before)


@every_routed_model
def test_a_static_cache_object_is_refused_and_changes_nothing(architecture, variant):
    model = ready(architecture, variant)
    before = everything_of(model)
    cache = StaticCache(config=model.config, max_cache_len=32)
    with pytest.raises(ValueError, match="'StaticCache' cannot: use the default cache") as error:
        generated(model, prompts(), past_key_values=cache, **GREEDY)
    assert_refused(error)
    assert_same(everything_of(model), before)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
def test_dense_models_take_what_routed_ones_refuse(architecture):
    """The control: these settings are right in themselves."""
    model = ready(architecture, DENSE)
    model.set_attn_implementation("eager")
    inputs = {"input_ids": token_ids()}
    expected = generated(model, inputs, **GREEDY)
    assert torch.equal(generated(model, inputs, cache_implementation="static", **GREEDY), expected)
    out = generated(model, inputs, output_attentions=True, return_dict_in_generate=True, **GREEDY)
    assert len(out.attentions) == NEW


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_attentions_are_had_by_the_way_that_the_refusal_names(architecture):
    """`generate()` is causal within look-ahead too, so that its refusal must not lead there alone."""
    model = ready(architecture, "predictor")
    model.set_attn_implementation("eager")
    with mixdepth.lookahead(model):
        with pytest.raises(ValueError, match=r"generate\(\) skips layers: leave it out, and call model\(tokens"):
            generated(model, prompts(), output_attentions=True, **GREEDY)
        tokens = generated(model, prompts(), **GREEDY)
        with torch.no_grad():
            attentions = model(tokens, output_attentions=True).attentions
    assert len(attentions) == 4


def test_router_logits_of_experts_are_had_by_the_way_that_the_refusal_names():
    model = ready("mixtral", "predictor")
    with pytest.raises(ValueError, match=r"output_router_logits needs every layer to run, and generate\(\)"):
        generated(model, prompts(), output_router_logits=True, **GREEDY)
    tokens = generated(model, prompts(), **GREEDY)
    with mixdepth.lookahead(model), torch.no_grad():
        assert len(model(tokens, output_router_logits=True).router_logits) == 4


MOVED = {
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "group beams": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
    "constrained": {"num_beams": 2, "force_words_ids": [[5]]},
    "layers against each other": {"dola_layers": "low"},
}


@pytest.mark.parametrize("mode", MOVED)
@every_rule_on_llama
def test_modes_that_transformers_has_moved_out_fail_as_for_a_dense_model(architecture, variant, mode):
    """Their code lies on the hub, and is asked for by name."""
    model = ready(architecture, variant)
    before = everything_of(model)
    with pytest.raises(ValueError, match="requires `trust_remote_code=True`"):
        generated(model, prompts(), **GREEDY, **MOVED[mode])
    assert_same(everything_of(model), before)


WRONG = {
    "several rows with an assistant": {"prompt_lookup_num_tokens": 3},
    "an unknown setting": {"temprature": 2},
    "more returns than beams": {"num_beams": 2, "num_return_sequences": 3},
    "a window of no tokens": {"min_p": 2.0, "do_sample": True},
}


@pytest.mark.parametrize("mistake", WRONG)
@every_rule_on_llama
def test_a_mistake_is_answered_and_changes_nothing(architecture, variant, mistake):
    model = ready(architecture, variant)
    before = everything_of(model)
    with pytest.raises((ValueError, TypeError)):
        generated(model, prompts(), **{**GREEDY, **WRONG[mistake]})
    assert_same(everything_of(model), before)
