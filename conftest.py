"""What every test run shares: the environment of stored outputs, and notebooks compared as readers see them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "src"))

pytest_plugins = ("bookkit.comparison",)
