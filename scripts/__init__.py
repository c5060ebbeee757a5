"""Tools that run from the checkout, each with `python -m scripts.NAME`."""

import sys
from pathlib import Path

# The adapter's package lies in a folder of its own, so that the image can put it on the path without these tools.
sys.path.append(str(Path(__file__).resolve().parent.parent / "adapter"))
