"""The config of a routed model is a config: every reader of transformers takes its file, and copies are equal."""

import copy
import json
import logging
import pickle

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassFieldValidationError
from promised import ARCHITECTURES, DENSE, every_model, every_routed_model, logits_of, promised
from tiny import token_ids
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import mixdepth
from mixdepth.data.tokenizers import byte_tokenizer
from mixdepth.hf.classes import OTHER_AUTO_CLASSES, routed_classes


def settings_of(config):
    """What the config says, but for what loading writes into it."""
    return {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}


@pytest.fixture
def saved(architecture, variant, tmp_path):
    model = promised(architecture, variant)
    model.save_pretrained(tmp_path)
    return model.config, tmp_path


@every_model
def test_every_reader_of_a_configs_file_gets_the_same_config(saved):
    config, folder = saved
    kind = type(config)
    texts, _ = PreTrainedConfig.get_config_dict(folder)
    readers = {
        "from_json_file": lambda: kind.from_json_file(folder / "config.json"),
        "from_pretrained": lambda: kind.from_pretrained(folder),
        "from_pretrained by keyword": lambda: kind.from_pretrained(pretrained_model_name_or_path=folder),
        "from_pretrained of the file": lambda: kind.from_pretrained(folder / "config.json"),
        "AutoConfig": lambda: AutoConfig.from_pretrained(folder),
        "AutoConfig of the file": lambda: AutoConfig.from_pretrained(str(folder / "config.json")),
        "from_dict": lambda: kind.from_dict(texts),
        "from_dict of to_dict": lambda: kind.from_dict(config.to_dict()),
        "keywords": lambda: kind(**config.to_dict()),
        "for_model": lambda: AutoConfig.for_model(**config.to_dict()),
    }
    for name, read in readers.items():
        assert type(read()) is kind, name
        assert settings_of(read()) == settings_of(config), name


@every_model
def test_a_config_writes_a_file_that_it_reads(saved, tmp_path):
    config, _ = saved
    for use_diff in (True, False):
        file = tmp_path / f"{use_diff}.json"
        config.to_json_file(file, use_diff=use_diff)
        read = type(config).from_json_file(file)
        assert settings_of(read) == settings_of(config)
        assert read.to_json_string(use_diff) == config.to_json_string(use_diff)


@every_model
def test_a_configs_file_holds_values_of_the_kind_that_the_dense_class_declares(saved, architecture):
    """Programs that are not transformers read it too: `use_cache` is true or false, for one."""
    _, folder = saved
    entries = json.loads((folder / "config.json").read_text())
    dense_entries = CONFIG_MAPPING[architecture]().to_dict()
    for name, value in entries.items():
        if isinstance(dense_entries.get(name), bool):
            assert isinstance(value, bool), name
    assert isinstance(entries.get("use_cache", True), bool)


@every_model
def test_copies_and_pickles_of_a_config_are_equal_and_independent(saved):
    config, _ = saved
    for twin in (copy.deepcopy(config), copy.copy(config), pickle.loads(pickle.dumps(config))):
        assert type(twin) is type(config)
        assert settings_of(twin) == settings_of(config)
        use_cache = config.use_cache
        twin.use_cache = not use_cache
        assert config.use_cache is use_cache


@every_model
def test_what_a_user_changes_in_a_config_is_saved(saved, tmp_path):
    config, _ = saved
    config.use_cache = False
    config.id2label = {0: "x"}
    config.note = "my own"
    config.save_pretrained(tmp_path / "changed")
    read = AutoConfig.from_pretrained(tmp_path / "changed")
    assert read.use_cache is False
    assert read.id2label == {0: "x"}
    assert read.note == "my own"


@every_model
def test_settings_given_by_name_overwrite_those_of_the_file(saved):
    config, folder = saved
    read, unused = AutoConfig.from_pretrained(folder, use_cache=False, unknown=3, return_unused_kwargs=True)
    assert read.use_cache is False
    assert unused == {"unknown": 3}
    model = AutoModelForCausalLM.from_pretrained(folder, use_cache=False)
    assert model.config.use_cache is False
    assert model.config.num_hidden_layers == config.num_hidden_layers


@every_model
def test_readers_of_other_files_take_the_folder(saved):
    """Tokenizers and generation read config.json by the base class."""
    config, folder = saved
    assert PreTrainedConfig.from_pretrained(folder).architectures == config.architectures
    assert GenerationConfig.from_pretrained(folder).eos_token_id == 2
    assert GenerationConfig.from_model_config(config).eos_token_id == 2


@every_routed_model
def test_a_model_that_is_built_from_a_read_config_is_routed(saved, variant):
    config, folder = saved
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    assert isinstance(model, mixdepth.hf.RoutedCausalLM)
    assert model.depth_config == mixdepth.DepthConfig.from_dict(config.depth)


REFUSAL = "routed: import mixdepth and load with AutoModelForCausalLM"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_dense_class_refuses_a_routed_folder_and_says_how_it_is_loaded(architecture, tmp_path):
    promised(architecture, "predictor").save_pretrained(tmp_path)
    config_class = CONFIG_MAPPING[architecture]
    for kind in (config_class, MODEL_FOR_CAUSAL_LM_MAPPING[config_class]):
        with pytest.raises(StrictDataclassFieldValidationError, match=REFUSAL):
            kind.from_pretrained(tmp_path)


def test_every_dense_config_class_refuses_a_routed_file(tmp_path):
    for architecture in mixdepth.supported_architectures():
        config_class, _ = routed_classes(architecture)
        config_class(depth=mixdepth.DepthConfig().to_dict()).save_pretrained(tmp_path / architecture)
        with pytest.raises(StrictDataclassFieldValidationError, match=REFUSAL):
            CONFIG_MAPPING[architecture].from_pretrained(tmp_path / architecture)


@pytest.fixture
def saved_by_an_earlier_version(tmp_path):
    """A model and its folder, whose config.json has the sentence in the place of `use_cache`."""

    def save(architecture, use_cache):
        model = promised(architecture, "predictor")
        model.save_pretrained(tmp_path)
        file = tmp_path / "config.json"
        entries = json.loads(file.read_text())
        del entries["for_dense_classes"]
        file.write_text(json.dumps({**entries, "use_cache": REFUSAL, "routed_use_cache": use_cache}))
        return model, tmp_path

    return save


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_folders_of_earlier_versions_are_loaded(architecture, use_cache, saved_by_an_earlier_version):
    model, folder = saved_by_an_earlier_version(architecture, use_cache)
    for config in (AutoConfig.from_pretrained(folder), type(model.config).from_json_file(folder / "config.json")):
        assert config.use_cache is use_cache
        assert not hasattr(config, "routed_use_cache")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.config.use_cache is use_cache
    assert torch.equal(logits_of(loaded), logits_of(model))


def test_a_folder_of_an_earlier_version_is_saved_as_one_of_this_version(saved_by_an_earlier_version, tmp_path):
    _, folder = saved_by_an_earlier_version("llama", True)
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "again")
    entries = json.loads((tmp_path / "again/config.json").read_text())
    assert entries["use_cache"] is True
    assert "routed_use_cache" not in entries
    assert REFUSAL in entries["for_dense_classes"].values()


@pytest.mark.parametrize("kind", OTHER_AUTO_CLASSES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_an_auto_class_for_another_task_refuses_a_routed_model(architecture, kind, tmp_path):
    model = promised(architecture, "predictor")
    model.save_pretrained(tmp_path)
    for make in (lambda: kind.from_pretrained(tmp_path), lambda: kind.from_config(model.config)):
        with pytest.raises(ValueError, match="a routed model is a causal language model: load it with") as error:
            make()
        assert "\n" not in str(error.value)


def test_a_pipeline_for_another_task_says_how_a_routed_model_is_loaded(tmp_path):
    promised("llama", "predictor").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="a routed model is a causal language model: load it with AutoModelForCausal"):
        transformers.pipeline("feature-extraction", model=str(tmp_path))


@every_model
def test_the_base_model_gives_hidden_states_without_a_head(architecture, variant):
    model = promised(architecture, variant)
    if variant == "early_exit":
        with pytest.raises(ValueError, match="early exit needs the whole model"):
            model.base_model(token_ids())
        return
    with torch.no_grad():
        whole = model(token_ids(), output_hidden_states=True)
        assert torch.equal(model.base_model(token_ids()).last_hidden_state, whole.hidden_states[-1])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_dense_class_takes_a_dense_folder_without_a_word(architecture, tmp_path, caplog, monkeypatch):
    model = promised(architecture, DENSE)
    model.save_pretrained(tmp_path)
    transformers.logging.set_verbosity_warning()
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    type(model).from_pretrained(tmp_path)
    assert caplog.text == ""
