"""Lets the tests here import `making_run` and `made_results`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
