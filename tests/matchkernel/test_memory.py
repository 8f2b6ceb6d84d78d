"""Peak memory of one step in a fresh process: O(n) where an engine streams, for every mask that promises it."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from peak import measurable, peaks

pytestmark = measurable

TABLE = 2 * 4096 * 4096 * 4 / 2**20
"""MiB of one n × m table of float32 for 2 heads: 128. One tensor of n tokens has 2."""


@pytest.mark.parametrize(
    ("setting", "width", "limit"),
    [
        # The output, its gradient and three more: 10 MiB, and what the operator works in.
        ("", 64, 20),
        ("causal=True, mask=torch.arange(n) < n - 5, normalizer=mk.ScalableSoftmax()", 64, 32),
        # Encodings, padding and the column that carries the log-sum-exp's gradient are copies, but of n rows.
        ("causal=True, normalizer=mk.SinkSoftmax(0.2), kernel=mk.Cosine(0.3)", 32, 64),
    ],
)
def test_a_step_forms_no_table(setting: str, width: int, limit: float) -> None:
    assert peaks(setting, 4096, value_width=width)[0] < limit <= TABLE / 2


def test_the_measure_sees_a_table_where_there_is_one() -> None:
    assert peaks("engine='reference'", 2048)[0] > TABLE / 4 * 2


def test_the_reference_holds_the_three_tables_that_its_cost_says() -> None:
    (held,) = peaks("engine='reference'", 4096, gradients=False)
    assert 3.0 * TABLE < held < 3.2 * TABLE


@pytest.mark.parametrize(
    "setting",
    [
        "kernel=mk.Additive(64, 2)",
        "kernel=Own(), causal=True, mask=torch.arange(n) < n - 5",
        "kernel=mk.Gaussian(8.0), normalizer=mk.Sparsemax()",
    ],
)
def test_tiles_hold_no_table(setting: str) -> None:
    """Twice as many tokens, twice the memory, and what a tile takes: far below a table."""
    short, long = peaks(f"engine=mk.Tiled(compile=False), {setting}", 2048, 4096, value_width=8)
    assert long / short <= 2.3
    assert long < TABLE / 2, "the reference takes several"
