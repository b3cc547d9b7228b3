"""What the processes that tests start find on their path."""

import os
from pathlib import Path

HERE = Path(__file__).parent
CHILD_PATH = os.pathsep.join([str(HERE), str(HERE.parents[1])])
"""Their PYTHONPATH: `sitecustomize.py` of this folder, and the repository."""
