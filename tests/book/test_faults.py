"""Every planted fault is caught, by the cell of the claim that it breaks and by an assertion."""

import pytest

from bookkit import faults
from bookkit.execute import CellFailed, run
from bookkit.notebook import code_cells, read
from bookkit.paths import chapters

CHAPTERS = chapters()
FAULTS = [fault for number in CHAPTERS for fault in faults.load(number)]


def label(fault):
    return f"{fault.chapter:02}-{fault.claim}-{fault.find.strip().splitlines()[0][:30]}"


@pytest.mark.parametrize("fault", FAULTS, ids=label)
def test_the_claims_cell_catches_it(fault):
    path = CHAPTERS[fault.chapter]
    planted, catching = faults.plant(fault, read(path))
    with pytest.raises(CellFailed) as caught:
        run(planted, path, stop_after=catching[-1], skip=faults.idle(fault, planted))
    failed = code_cells(planted)[caught.value.number - 1]
    assert caught.value.ename == "AssertionError", str(caught.value)
    assert failed["id"] in catching, f"caught too early, by another cell:\n{caught.value}"


def test_there_are_faults():
    assert FAULTS
