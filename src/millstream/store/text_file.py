"""Text files that appear when they are whole, gzipped if their name says so."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

try:
    from isal import isal_zlib as _zlib  # six times as fast
except ImportError:
    import zlib as _zlib

from millstream.errors import StoreExists
from millstream.store.layout import publishing, sync_folder

Write = Callable[[bytes | memoryview], object]

_LEVEL = 2
_NOTHING_LEFT = "Nothing was left behind; free some space, or choose another place"


def gzipping() -> Any:
    """Deflates what it is given, behind the header of a gzip member."""
    return cast(Any, _zlib).compressobj(_LEVEL, 8, 31)


@contextmanager
def writing_text(out: Path) -> Generator[Write]:
    """Write under a temporary name, which becomes `out` when all is written."""
    if out.exists():
        raise StoreExists(f"{out}: already there. Choose another name, or remove it")
    with publishing(out, _NOTHING_LEFT) as file:
        if out.name.endswith(".gz"):
            deflate = gzipping()
            yield lambda text: file.write(deflate.compress(text))
            file.write(deflate.flush())
        else:
            yield file.write
    sync_folder(out.parent)
