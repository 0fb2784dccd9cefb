"""The config of a routed model is a config: every reader of transformers takes its file, and copies are equal."""

import copy
import json
import logging
import pickle

import pytest
import transformers
from promised import ARCHITECTURES, DENSE, every_model, every_routed_model, promised
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import mixdepth


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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_dense_class_does_not_take_a_routed_folder_in_silence(architecture, tmp_path, caplog, monkeypatch):
    promised(architecture, "predictor").save_pretrained(tmp_path)
    config_class = CONFIG_MAPPING[architecture]
    dense_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    transformers.logging.set_verbosity_warning()
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    said = ""
    try:
        dense_class.from_pretrained(tmp_path)
    except Exception as error:
        said = str(error)
    said += caplog.text
    assert "mixdepth" in said


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_dense_class_takes_a_dense_folder_without_a_word(architecture, tmp_path, caplog, monkeypatch):
    model = promised(architecture, DENSE)
    model.save_pretrained(tmp_path)
    transformers.logging.set_verbosity_warning()
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    type(model).from_pretrained(tmp_path)
    assert caplog.text == ""
