"""What is used of torch_geometric, and the command that installs it where it is not there. It has no types."""

import warnings
from typing import TYPE_CHECKING, Any

from millstream.errors import MissingExtra

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it still uses torch.jit
        from torch_geometric.nn import GINEConv as _GINEConv  # pyright: ignore
        from torch_geometric.nn import MessagePassing as _MessagePassing  # pyright: ignore
        from torch_geometric.utils import scatter as _scatter  # pyright: ignore
except ImportError as error:
    raise MissingExtra(f"graphs need torch_geometric ({error}): pip install 'millstream[graph]'") from None

if TYPE_CHECKING:
    from torch import Tensor, nn

    class MessagePassing(nn.Module):
        def __init__(self, *, aggr: str) -> None: ...
        def propagate(self, edge_index: Tensor, **inputs: Tensor) -> Tensor: ...
else:
    MessagePassing = _MessagePassing

GINEConv: Any = _GINEConv
scatter: Any = _scatter
