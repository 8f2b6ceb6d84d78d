"""Q4_0, a 4-bit form of stored weights, and a table of vectors that stays in it."""

import torch
from torch import Tensor, nn

BLOCK = 32
"""Numbers in a block."""
BLOCK_BYTES = 18
"""A scale in float16, then 16 bytes of two numbers each."""


def split(stored: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Stored bytes of a matrix with `width` columns → its scales and its nibbles.

    Args:
        stored: (bytes,) uint8, row after row.
        width: columns of the matrix, a multiple of 32.

    Returns:
        scales (rows, width / 32) float32, a copy; nibbles (rows, width / 32, 16) uint8, a view of `stored`.
    """
    if width % BLOCK or stored.numel() % (width // BLOCK * BLOCK_BYTES):
        raise ValueError(
            f"{stored.numel()} bytes are no whole rows of width {width} in blocks of {BLOCK} numbers, "
            f"{BLOCK_BYTES} bytes each"
        )
    blocks = stored.view(-1, width // BLOCK, BLOCK_BYTES)
    return blocks[..., :2].contiguous().view(torch.float16).squeeze(-1).float(), blocks[..., 2:]


def join(scales: Tensor, nibbles: Tensor) -> Tensor:
    """The numbers that are meant: (…, blocks) and (…, blocks, 16) → (…, blocks · 32) in the scales' dtype.

    w = scale · (nibble − 8), with nibble 0…15. Byte j of a block holds number j in its low half and j + 16 in its high
    half. What was rounded off when the weights were stored does not come back: up to half a scale per number.
    """
    numbers = torch.cat([nibbles & 15, nibbles >> 4], dim=-1).to(scales.dtype) - 8
    return (scales.unsqueeze(-1) * numbers).flatten(-2)


class BlockTable(nn.Module):
    """A table of vectors kept in Q4_0, called like `nn.Embedding`; only the rows that are asked for are written out.

    250,037 rows of 384 numbers take 366 MiB in float32; here they take 11 MiB of scales, and the nibbles are left
    where they are given (a file that is mapped into memory is read only where a row is).

    Args:
        stored: (bytes,) uint8, the rows one after another.
        width: numbers in a row, a multiple of 32.

    Raises:
        ValueError: `stored` is no whole number of rows.
    """

    def __init__(self, stored: Tensor, width: int) -> None:
        super().__init__()
        scales, nibbles = split(stored, width)
        # Moved and cast with the model: the scales' dtype is that of the vectors.
        self.register_buffer("scales", scales)
        self.register_buffer("nibbles", nibbles)
        self.scales: Tensor
        self.nibbles: Tensor

    def forward(self, ids: Tensor) -> Tensor:
        """ids (…) int64 → (…, width)."""
        return join(self.scales[ids], self.nibbles[ids])

    def extra_repr(self) -> str:
        rows, blocks = self.scales.shape
        return f"{rows}, {blocks * BLOCK}, Q4_0"
