"""Lets the tests here import `batches`, and gives the first call of a kernel the time to compile."""

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
settings.register_profile("kernels", deadline=None)
settings.load_profile("kernels")
