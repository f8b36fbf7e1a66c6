"""The record numbers of a rank's batches, computed many at a time."""

import threading
from contextlib import suppress

import numpy as np

from millstream.collection import Collection, Numbers
from millstream.errors import MillstreamError
from millstream.loader.order import Order
from millstream.loader.ranks import Layout

CHUNK = 1 << 16  # positions whose record numbers are computed at once


def window_of(position: int, order: Order) -> int:
    """The window of a position, about: the one with the short block may end earlier."""
    return position // (order.block * order.window)


class Positions:
    """What an order and a layout say of each batch from position `start` on. Safe to use from threads."""

    def __init__(self, order: Order, layout: Layout, start: int) -> None:
        self._order, self._layout, self._start = order, layout, start
        self._chunk: tuple[int, Numbers] = (-1, np.empty(0, np.int64))
        self._lock = threading.Lock()
        self._windows_asked = -1
        self._asking: threading.Thread | None = None

    def of(self, step: int) -> Numbers:
        """The record numbers of a batch."""
        positions = self._layout.positions(self._start, step)
        if not len(positions):
            return positions
        first, last = int(positions.min()) // CHUNK, int(positions.max()) // CHUNK
        if first != last:
            return self._order[positions]
        with self._lock:
            if self._chunk[0] != first:
                self._chunk = first, self._order[first * CHUNK : (first + 1) * CHUNK]
            return self._chunk[1][positions - first * CHUNK]

    def read_ahead(self, step: int, collection: Collection) -> None:
        """Ask for the blocks of this and the next window, once, when a batch is the first in its window."""
        order = self._order
        if order.mode != "window":
            return
        batch = self._layout.batch_size * self._layout.world
        first, last = (window_of(self._start + at * batch, order) for at in (step, step + 1))
        with self._lock:
            since = first if self._windows_asked < 0 else self._windows_asked + 1
            asked = range(since, last + 2)
            self._windows_asked = max(self._windows_asked, last + 1)
            if not asked:
                return
            self.close()  # one at a time
            # Asking takes as long as the disk takes: for what is needed later, somebody else asks.
            self._asking = threading.Thread(target=self._ask, args=(asked, collection), name="millstream-read-ahead")
            self._asking.start()

    def close(self) -> None:
        """Wait until what was asked for is on its way."""
        if self._asking is not None:
            self._asking.join()

    def _ask(self, windows: range, collection: Collection) -> None:
        order = self._order
        with suppress(MillstreamError):  # whoever reads the records will say what is wrong
            for window in windows:
                blocks = order.blocks_of(window)
                if len(blocks[0]):
                    collection.will_need(*blocks)
                if window - 3 >= window_of(self._start, order):  # some thread may still read the last but one
                    collection.release(*order.blocks_of(window - 3))
