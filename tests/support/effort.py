"""How hard randomised tests try. `MILLSTREAM_THOROUGH=1` runs every example, for releases and for nights."""

import os

PATIENCE_S = 600  # for whatever ends a wait as soon as it happens: on a busy machine seconds become minutes
THOROUGH = os.environ.get("MILLSTREAM_THOROUGH") == "1"


def num_examples(thorough: int) -> int:
    """A quarter of the examples of a thorough run; at least six, and never more than a thorough run has."""
    return thorough if THOROUGH else min(thorough, max(6, thorough // 4))
