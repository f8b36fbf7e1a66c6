"""Python runs this at its start: the packages named in a variable are as if not installed.

Lightning Fabric and torch_geometric import torchmetrics and transformers where they are, which takes seconds, and these
children have no use for them.
"""

import os
import sys

for name in filter(None, os.environ.get("MILLSTREAM_TESTS_WITHOUT", "").split(",")):
    sys.modules[name] = None  # pyright: ignore[reportArgumentType]
