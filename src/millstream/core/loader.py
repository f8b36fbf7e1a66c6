"""`ms.Loader`: batches of a collection in a global order, made ahead in threads, within a number of bytes."""

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cached_property

from millstream.buffers import Pool
from millstream.collection import Collection, Numbers
from millstream.config import parse_bytes
from millstream.console import format_bytes, say, unsaid
from millstream.dataset.batch import Feature
from millstream.loader.plan import OrderName, batch_budget, plan_order, plan_threads
from millstream.loader.positions import Positions
from millstream.loader.prefetch import Prefetch
from millstream.loader.ranks import Layout, Tail, find_ranks
from millstream.loader.recipe import Recipe
from millstream.loader.state import State


class Loader:
    """Iterates over the batches of one epoch; the next loop is the next epoch.

    A batch is a dict of tensors (and lists of texts) that `features` make of the records, and `numbers`, the records'
    own. `memory` bounds what the loader holds: batches being made and waiting, decoded blocks, buffers. Ranks of a
    torchrun or torch.distributed job read disjoint positions of one global order. `state_dict()` after any batch
    resumes there: in another process, with other threads, ranks or batch size, every remaining record exactly once.

    >>> loader = ms.Loader(traces, batch_size=32, features=ms.features.layers(token="last"), seed=7, memory="2GB")
    >>> for batch in loader:
    ...     state = loader.state_dict()
    """

    def __init__(
        self,
        collection: Collection,
        *,
        batch_size: int,
        features: Feature | Sequence[Feature] | None = None,
        seed: int = 0,
        memory: int | str = "2GB",
        order: OrderName = "auto",
        threads: int | None = None,
        rank: int | None = None,
        world: int | None = None,
        drop_last: bool = False,
        tail: Tail = "drop",
        pin_memory: bool = False,
        notify: Callable[[str], None] = say,
    ) -> None:
        self._memory = parse_bytes(memory)
        self._budget = batch_budget(collection, self._memory, batch_size=batch_size)
        self._plan = plan_order(collection, order, room=self._memory - self._budget)
        self._asked = order
        self._collection = collection.within(self._memory - self._budget)
        self._recipe = Recipe(collection, features, seed=seed)
        rank, world = find_ranks(rank, world)
        self._layout = Layout(len(collection), batch_size, rank, world, drop_last, tail)
        self._seed = seed
        self._threads = threads
        self._pins = pin_memory and _can_pin()
        self._pool = Pool(self._budget)
        self._epoch: int = 0
        self._start = 0  # the position at which the epoch is to begin
        self._samples = 0  # positions all ranks have been given
        self._notify = notify  # told once, where something was left to us

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self._layout.steps()

    @property
    def remaining(self) -> int:
        """Batches the next loop will have: fewer than `len` after a resume within an epoch."""
        return self._layout.steps(self._start)

    @property
    def epoch(self) -> int:
        """The one that the next loop is, counted from 0."""
        return self._epoch

    @property
    def held_bytes(self) -> int:
        """Bytes of batches and buffers held at present."""
        return self._pool.held_bytes

    @property
    def plan(self) -> str:
        """What was chosen and why, in one line."""
        layout, plan = self._layout, self._plan
        batch_bytes = self._batch_bytes()
        threads, why = plan_threads(self._threads, batch_bytes=batch_bytes, budget=self._budget)
        window = f" of {plan.block * plan.window} records" if plan.mode == "window" else ""
        ranks = f", rank {layout.rank} of {layout.world}" if layout.world > 1 else ""
        ranks += f", {layout.left_out} records left out" if layout.left_out else ""
        return (
            f"{layout.n} records, {len(self)} batches of {layout.batch_size} ({format_bytes(batch_bytes)}){ranks}; "
            f"order {plan.mode}{window}: {plan.why}; {threads} threads: {why}; memory {format_bytes(self._memory)}"
        )

    def set_epoch(self, epoch: int) -> None:
        """Let the next loop be this epoch, from its start (or, if it is the one resumed, from where it was)."""
        if epoch != self._epoch:
            self._epoch, self._start, self._samples = epoch, 0, 0

    def state_dict(self) -> dict[str, object]:
        """Where the loop is, as plain JSON: every batch it was given counts as used."""
        return self._state().to_json()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Let the next loop go on where `state_dict` was taken."""
        resumed = self._state().resumed(state, any_order=self._asked == "auto")
        self._plan, self._epoch = resumed.plan, resumed.epoch
        self._start = self._samples = resumed.samples

    def _state(self) -> State:
        return State(self._seed, self._epoch, self._samples, self._layout.n, self._fingerprint, self._plan)

    @cached_property
    def _fingerprint(self) -> str:
        """Looked at once, not in every state: a store of 10,000 shards, or a large subset, takes its time."""
        return self._collection.fingerprint

    def __iter__(self) -> "Generator[dict[str, object]]":
        layout, start, epoch = self._layout, self._start, self._epoch
        collection = self._collection.in_epoch(epoch)
        numbers = Positions(self._plan.order(layout.n, seed=self._seed, epoch=epoch), layout, start)
        threads, _ = plan_threads(self._threads, batch_bytes=self._batch_bytes(), budget=self._budget)
        if layout.rank == 0 and (self._threads is None or self._asked == "auto"):
            self._notify(f"loader: {self.plan}")
            self._notify = unsaid

        wanted_at: dict[int, Numbers] = {}

        def cost(step: int) -> int:
            wanted_at[step] = numbers.of(step)
            return self._recipe.cost(collection, wanted_at[step])

        def make(step: int) -> tuple[dict[str, object], int]:
            wanted = wanted_at.pop(step)
            numbers.read_ahead(step, collection)
            try:
                with self._pool.use():
                    batch, num_bytes = self._recipe.make(collection, wanted, epoch)
            except Exception as error:
                error.add_note(f"in batch {step} of epoch {epoch}")
                self._recipe.blame(collection, wanted, epoch, error)
                raise
            return (_pin(batch) if self._pins else batch), num_bytes

        self._samples = start
        steps = layout.steps(start)
        prefetch = Prefetch(make, cost, steps=steps, threads=threads, ahead=max(threads, 2), budget=self._budget)
        step = 0
        items = prefetch.items()
        try:
            while (batch := next(items, None)) is not None:
                step += 1
                self._samples = layout.samples(start, step)
                yield batch
                del batch  # so that its memory can be used for the next one
        finally:
            items.close()
            numbers.close()
        self._epoch, self._start, self._samples = epoch + 1, 0, 0

    def _batch_bytes(self) -> int:
        """What a batch takes, about: from the mean record."""
        medium = self._collection.medium
        return self._layout.batch_size * (medium.num_bytes // max(self._layout.n, 1))


def _can_pin() -> bool:
    import torch

    if torch.cuda.is_available():
        return True
    say("loader: pin_memory asks for a CUDA device; there is none, so memory is not pinned")
    return False


def _pin(batch: dict[str, object]) -> dict[str, object]:
    import torch

    return {name: value.pin_memory() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
