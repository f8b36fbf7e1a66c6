"""What a model sees of a record, computed on the fly: `ms.features.layers`, `token_stats`, `graphs`, `tokens`, ..."""

from millstream.core.features import each, fields
from millstream.reads.features import tokens
from millstream.traces.features import layers, token_stats
from millstream.traces.graphs import graphs

__all__ = ["each", "fields", "graphs", "layers", "token_stats", "tokens"]
