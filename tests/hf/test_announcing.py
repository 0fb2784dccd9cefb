"""`import mixdepth` makes routed model types known to transformers, whichever of the two is imported first.

Each test runs in a new process, because this one has imported both.
"""

import subprocess
import sys

import pytest
import torch
from tiny import routed

AUTO_CONFIG = "transformers.models.auto.configuration_auto"
IS_KNOWN = "assert 'mixdepth_llama' in transformers.models.auto.configuration_auto.CONFIG_MAPPING"


def run(*lines):
    """Run these lines in a new process, and return what they print."""
    process = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved routed model."""
    folder = tmp_path_factory.mktemp("routed")
    routed(dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("order", ["mixdepth, transformers", "transformers, mixdepth"])
def test_a_routed_folder_loads_in_either_order_of_imports(folder, order):
    printed = run(
        f"import {order}",
        "from transformers import AutoConfig, AutoModelForCausalLM",
        f"config = AutoConfig.from_pretrained({str(folder)!r})",
        f"model = AutoModelForCausalLM.from_pretrained({str(folder)!r})",
        "print(type(config).__name__, type(model).__name__, type(model.config) is type(config))",
    )
    assert printed == "MixdepthLlamaConfig MixdepthLlamaForCausalLM True"


def test_a_routed_folder_loads_where_auto_config_was_imported_before(folder):
    printed = run(
        "from transformers import AutoConfig",
        "import mixdepth",
        f"print(type(AutoConfig.from_pretrained({str(folder)!r})).__name__)",
    )
    assert printed == "MixdepthLlamaConfig"


def test_a_pipeline_loads_a_routed_folder(folder):
    printed = run(
        "import mixdepth",
        "from transformers import PreTrainedTokenizerFast, pipeline",
        "from tokenizers import Tokenizer, models, pre_tokenizers",
        "words = Tokenizer(models.WordLevel({'<unk>': 0, 'one': 5, 'two': 6}, unk_token='<unk>'))",
        "words.pre_tokenizer = pre_tokenizers.Whitespace()",
        "tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token='<unk>')",
        f"generator = pipeline('text-generation', {str(folder)!r}, tokenizer=tokenizer)",
        "generator('one two', max_new_tokens=3)",
        "print(type(generator.model).__name__)",
    )
    assert printed == "MixdepthLlamaForCausalLM"


def test_a_config_is_made_by_its_model_type_before_any_model_was_loaded():
    printed = run(
        "import mixdepth",
        "from transformers import AutoConfig",
        "config = AutoConfig.for_model('mixdepth_llama', hidden_size=64)",
        "print(type(config).__name__, config.hidden_size)",
    )
    assert printed == "MixdepthLlamaConfig 64"


def test_without_transformers_the_import_leaves_one_finder_and_no_module_of_it():
    printed = run(
        "import importlib, sys, mixdepth",
        "importlib.reload(mixdepth)",
        "finders = [finder for finder in sys.meta_path if type(finder).__name__ == 'AutoConfigFinder']",
        "print(len(finders), any(name.startswith('transformers') for name in sys.modules))",
    )
    assert printed == "1 False"


def test_the_module_of_auto_config_keeps_its_own_loader():
    printed = run(
        "import importlib.resources, inspect, mixdepth",
        f"import {AUTO_CONFIG} as module",
        "print(type(module.__spec__.loader).__name__, module.__loader__ is module.__spec__.loader)",
        "assert 'class AutoConfig' in inspect.getsource(module)",
        "assert 'class AutoConfig' in module.__loader__.get_source(module.__name__)",
        "assert importlib.resources.files(module.__package__).joinpath('configuration_auto.py').is_file()",
    )
    assert printed == "SourceFileLoader True"


def test_looking_for_the_module_without_importing_it_does_not_use_the_announcement_up():
    run(
        "import importlib.util, mixdepth",
        f"spec = importlib.util.find_spec({AUTO_CONFIG!r})",
        f"assert spec.loader.get_code({AUTO_CONFIG!r}) is not None",
        f"import transformers, {AUTO_CONFIG}",
        IS_KNOWN,
    )


def test_a_loader_that_has_not_run_can_be_copied_and_pickled():
    run(
        "import copy, importlib.util, pickle, mixdepth",
        f"loader = importlib.util.find_spec({AUTO_CONFIG!r}).loader",
        "for other in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):",
        f"    assert other.get_filename({AUTO_CONFIG!r}) == loader.get_filename({AUTO_CONFIG!r})",
    )


def test_a_reload_of_the_module_registers_routed_models_again():
    run(
        "import importlib, mixdepth, transformers",
        f"import {AUTO_CONFIG} as module",
        "importlib.reload(module)",
        IS_KNOWN,
    )


def test_another_import_hook_in_front_or_behind_is_asked():
    run(
        "import sys",
        "class Hook:",
        "    def __init__(self): self.asked = []",
        "    def find_spec(self, name, path, target=None): self.asked.append(name)",
        "behind, in_front = Hook(), Hook()",
        "sys.meta_path.insert(0, behind)",
        "import mixdepth",
        "sys.meta_path.insert(0, in_front)",
        f"import transformers, {AUTO_CONFIG}",
        f"assert {AUTO_CONFIG!r} in in_front.asked and {AUTO_CONFIG!r} in behind.asked",
        IS_KNOWN,
    )


def test_a_second_copy_of_the_package_does_not_send_the_search_in_circles():
    run(
        "import sys, mixdepth",
        "for name in [name for name in sys.modules if name.startswith('mixdepth')]: del sys.modules[name]",
        "import mixdepth",
        "assert sum(type(finder).__name__ == 'AutoConfigFinder' for finder in sys.meta_path) == 2",
        f"import transformers, {AUTO_CONFIG}",
        IS_KNOWN,
    )


def test_threads_that_import_it_at_once_find_routed_models():
    # transformers as a whole cannot be imported by several threads at once, with or without this package.
    run(
        "import threading, mixdepth",
        "problems = []",
        "barrier = threading.Barrier(3)",
        "def work():",
        "    barrier.wait()",
        "    try:",
        f"        import transformers, {AUTO_CONFIG}",
        f"        {IS_KNOWN}",
        "    except BaseException as error:",
        "        problems.append(repr(error))",
        "threads = [threading.Thread(target=work) for _ in range(3)]",
        "for thread in threads: thread.start()",
        "for thread in threads: thread.join()",
        "assert not problems, problems",
    )


def test_a_module_of_transformers_runs_as_a_script_after_the_import():
    run(
        "import runpy, mixdepth",
        f"names = runpy.run_module({AUTO_CONFIG!r})",
        "assert 'AutoConfig' in names",
    )
