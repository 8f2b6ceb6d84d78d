"""A random decoder, small enough for tests that are not about what a trained one has learned."""

import torch

import matchkernel as mk
from matchkernel.dissect import Architecture, Decoder, Tokens


class Letters:
    """A letter is a piece."""

    marks = frozenset()

    def __call__(self, text):
        ids = torch.tensor([ord(letter) - ord("a") for letter in text], dtype=torch.long)
        return Tokens(text, ids, list(text), [(i, i + 1) for i in range(len(text))])


def make_decoder():
    """A random one, small and in float64: rotation, and two heads for each set of keys."""
    size = Architecture(
        name="tiny", layers=2, heads=4, kv_heads=2, d_model=20, d_head=6, d_feedforward=16, vocabulary=26, positions=30,
        norm_eps=1e-5, source="nowhere", licence="none",
    )  # fmt: skip
    model = Decoder(size, Letters(), mk.Rotary(6, base=30.0)).double()
    g = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=g, dtype=torch.float64) * 0.6 + (parameter.ndim == 1))
    return model
