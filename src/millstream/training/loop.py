"""The training loop: batches of a Loader, an optimizer, and checkpoints; a resumed run ends with the same weights."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from millstream.core.collection import Collection
from millstream.core.console import Progress, ignore_message, say, silent
from millstream.core.features import Feature, fields, fitting_batch
from millstream.core.loader import Loader
from millstream.core.memory import Heap, tree_bytes
from millstream.core.order import mix
from millstream.core.split import LABEL
from millstream.errors import NotFinite
from millstream.training import LoopSettings
from millstream.training.folder import BEST, LATEST, JobKey, damaged_checkpoint, load, save
from millstream.training.log import Log
from millstream.training.task import Net, Outcome, Task, labels_of

SCORED_AT_ONCE = 64
RECORDS = "records"
WEIGHTS_PREFIX, OPTIMIZER = "model.", "optimizer."
T = TypeVar("T")
Parts = Iterable[tuple[bool, dict[str, Any]]]  # micro-batches, and whether each is the last of its step


@dataclass
class Position:
    """The position of training: with the weights, all that the next step depends on. JSON in a checkpoint."""

    epoch: int = 0
    step: int = 0  # over all epochs; determines the random seed and the learning rate
    best: float = -1.0
    best_epoch: int = -1
    done: bool = False
    sums: dict[str, float] = field(default_factory=dict[str, float])  # over the records of this epoch so far
    loader: dict[str, object] | None = None


@dataclass(frozen=True)
class Job:
    """One model to train, with one seed."""

    key: JobKey
    folder: Path
    settings: LoopSettings
    task: Task
    features: Sequence[Feature]
    scoring: Sequence[Feature]  # for records it scores
    memory: int  # for the loader
    source: str  # where the records are, for messages
    at_once: int = SCORED_AT_ONCE  # records per pass through the net; larger batches are split


class Clock:
    """How long a loop takes, and which share of that time it waits for data."""

    def __init__(self) -> None:
        self.waited = 0.0
        self._started = time.perf_counter()
        self._ended: float | None = None

    @property
    def seconds(self) -> float:
        return (self._ended or time.perf_counter()) - self._started

    @property
    def share(self) -> float:
        return self.waited / max(self.seconds, 1e-9)

    def stop(self) -> None:
        self._ended = time.perf_counter()

    def watch(self, batches: Iterable[T]) -> Generator[T]:
        iterator = iter(batches)
        while True:
            begun = time.perf_counter()
            batch = next(iterator, None)
            self.waited += time.perf_counter() - begun
            if batch is None:
                return
            yield batch
            del batch


class Training:
    """Trains a net on `train`, scores it on `val`, and restores the weights of its best epoch."""

    def __init__(
        self, job: Job, fabric: Any, net: Net, *, log: Log, progress: Progress, stop: Callable[[], bool]
    ) -> None:
        self.job, self.fabric, self.bare = job, fabric, net
        self.log, self.progress, self.stop = log, progress, stop
        given = job.settings
        self.lr, self.epochs = given.lr or net.lr, given.epochs
        self.net, self.optimizer = fabric.setup(net, net.optimizer(self.lr, given.weight_decay))
        self.at = Position()
        self._saved = time.monotonic()
        self._heap = Heap(job.memory // 4)

    def run(self, train: Collection, val: Collection) -> bool:
        """Train. Returns whether it finished; if not, the next run resumes from the checkpoint."""
        job, given = self.job, self.job.settings
        own = given.batch_size // self.fabric.world_size
        part = max(size for size in range(1, own + 1) if own % size == 0 and size <= job.at_once)
        loader = Loader(
            train,
            batch_size=part,
            features=[*job.features, fields(LABEL)],
            seed=job.key.seed,
            memory=job.memory,
            length_buckets=own // part,  # a step sees the same records
            threads=given.threads,
            rank=self.fabric.global_rank,
            world=self.fabric.world_size,
            pin_memory=self.fabric.device.type == "cuda",
            notify=say if job.key.is_first(given.seed) else ignore_message,
        )
        if (job.folder / LATEST).exists():
            self._resume(loader)
        elif self.bare.needs_preparation:  # a pass over all records, not repeated after a stop
            self._save()
        weight_C = job.task.weights(train).to(self.fabric.device)
        most_steps = max(1, self.bare.most_records // given.batch_size)
        num_steps = min(-(-len(loader) // (own // part)), most_steps)
        self.epochs = min(given.epochs, max(1, most_steps // num_steps))
        self.progress(self.at.step * min(len(train), num_steps * given.batch_size) // num_steps)
        while self.at.epoch < self.epochs and not self.at.done:
            loader.set_epoch(self.at.epoch)
            clock = Clock()
            first = self.at.step
            self.bare.train()
            left = (num_steps * (self.at.epoch + 1) - self.at.step) * (own // part)
            batches = clock.watch(loader)
            for parts in steps_of(batches, min(loader.remaining, left), own // part):
                self._step(parts, weight_C, self.epochs * num_steps)
                self.at.loader = loader.state_dict()
                self._show(clock, min(len(train), num_steps * given.batch_size), num_steps)
                stopped = self.stop()
                if stopped or self._is_due():
                    self._save()
                if stopped:
                    return False
            batches.close()
            clock.stop()
            self._end_epoch(val, clock, (self.at.step - first) * given.batch_size)
        if self.at.best_epoch != self.at.epoch - 1:  # else it has those weights
            self._load_best()
        return True

    def _step(self, parts: Parts, weight_C: Tensor, total: int) -> None:
        """One step of the optimizer, accumulating the gradient over the parts of the batch.

        Every record has the same weight: a short last batch has a proportionally smaller gradient.
        """
        job, step = self.job, self.at.step
        seed_all(mix(job.key.seed, step, self.fabric.global_rank))  # so that checkpoints need no random state
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * learning_share(step, total, job.settings.warmup)
        own = job.settings.batch_size // self.fabric.world_size
        self.bare.warm(min(1.0, step / max(1, total // 5)))
        sums: defaultdict[str, float] = defaultdict(float)
        numbers: list[Tensor] = []
        for is_last, batch in parts:
            batch = self.fabric.to_device(batch)
            count = len(batch[LABEL])
            numbers.append(batch["numbers"])
            with self.fabric.no_backward_sync(self.net, enabled=not is_last):
                loss, terms = self.net(batch, batch[LABEL], weight_C[batch[LABEL]])
                self.fabric.backward(loss * (count / own))
            for name, term in {"loss": loss, **terms}.items():
                sums[name] += count * term.item()
            del batch, loss, terms
        if not math.isfinite(sums["loss"]):
            raise NotFinite(self._not_finite(sums["loss"], torch.cat(numbers)))
        if self.bare.clips:
            self.fabric.clip_gradients(self.net, self.optimizer, max_norm=job.settings.clip, error_if_nonfinite=False)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._heap.trim_malloc()
        for name, value in {**sums, RECORDS: float(sum(map(len, numbers)))}.items():
            self.at.sums[name] = self.at.sums.get(name, 0.0) + value
        self.at.step += 1

    def _end_epoch(self, val: Collection, clock: Clock, num_records: int) -> None:
        at, job = self.at, self.job
        outcome, measures = predict(
            self.bare,
            val,
            job.scoring,
            task=job.task,
            memory=job.memory,
            fabric=self.fabric,
            at_once=job.at_once,
            threads=job.settings.threads,
        )
        found = job.task.judge(labels_of(val, job.task.group_size), outcome)
        means = {name: self._over_ranks(sums / at.sums[RECORDS]) for name, sums in at.sums.items() if name != RECORDS}
        if found > at.best:
            at.best, at.best_epoch = found, at.epoch
            if self.fabric.global_rank == 0:
                save(job.folder / BEST, self.bare.state_dict(), {"epoch": at.epoch, job.task.key: found})
        if self.fabric.global_rank == 0:
            self.log.write(
                "epoch",
                **job.key.about,
                epoch=at.epoch,
                step=at.step,
                **means,
                **{job.task.key: found},
                lr=float(self.optimizer.param_groups[0]["lr"]),
                records_per_s=num_records / max(clock.seconds, 1e-9),
                waiting=clock.share,
                memory=tree_bytes(),
                **measures,
            )
        at.done = at.epoch - at.best_epoch >= job.settings.patience or at.epoch + 1 == self.epochs
        at.epoch, at.sums, at.loader = at.epoch + 1, {}, None
        self._save()
        self.fabric.barrier()

    def _not_finite(self, value: float, records: Tensor) -> str:
        job, at = self.job, self.at
        numbers = ", ".join(map(str, records.cpu().numpy()))
        return (
            f"{job.key}: the loss is {value} at epoch {at.epoch + 1}, step {at.step}, in the batch of "
            f"the records {numbers} of {job.source}. Their inputs are finite; try a smaller lr={self.lr / 10:g}"
        )

    def _over_ranks(self, value: float) -> float:
        if self.fabric.world_size == 1:
            return value
        return float(self.fabric.all_reduce(torch.tensor(value, device=self.fabric.device), reduce_op="mean"))

    def _show(self, clock: Clock, num_records: int, num_steps: int) -> None:
        at = self.at
        done = at.step * num_records // num_steps
        place = f"epoch {at.epoch + 1}/{self.epochs}, loss {at.sums['loss'] / at.sums[RECORDS]:.3f}"
        best = f", best {self.job.task.measure} {at.best:.3f}" if at.best_epoch >= 0 else ""
        self.progress(done, f"{place}{best}, {clock.share:.0%} waiting for data")

    def _is_due(self) -> bool:
        steps, minutes = self.job.settings.checkpoint_steps, self.job.settings.checkpoint_minutes
        late = time.monotonic() - self._saved >= minutes * 60
        return late or (steps is not None and self.at.step % steps == 0)

    def _save(self) -> None:
        self._saved = time.monotonic()
        if self.fabric.global_rank == 0:
            tensors = {**self.bare.state_dict(prefix=WEIGHTS_PREFIX), **pack_optimizer(self.optimizer)}
            save(self.job.folder / LATEST, tensors, asdict(self.at))

    def _load_best(self) -> None:
        """The weights of the best epoch, from the folder of the first process: others may be on another machine."""
        file = self.job.folder / BEST
        found = load(file)[0] if self.fabric.global_rank == 0 and file.exists() else None
        found = self.fabric.broadcast(found) if self.fabric.world_size > 1 else found
        if found is not None:
            self.bare.load_state_dict(found)

    def _resume(self, loader: Loader) -> None:
        tensors, about = load(self.job.folder / LATEST)
        try:
            self.bare.load_state_dict(weights_of(tensors))
            unpack_optimizer(self.optimizer, tensors)
            self.at = Position(**about)  # pyright: ignore[reportArgumentType]
        except (KeyError, RuntimeError, TypeError, ValueError) as error:  # of another version of millstream
            raise damaged_checkpoint(self.job.folder / LATEST, str(error).partition("\n")[0]) from None
        if self.at.loader is not None:
            loader.load_state_dict(self.at.loader)


def predict(
    net: Net,
    collection: Collection,
    features: Sequence[Feature],
    *,
    task: Task,
    memory: int,
    fabric: Any,
    at_once: int = SCORED_AT_ONCE,
    threads: int | None = None,
    progress: Progress = silent,
) -> tuple[Outcome, dict[str, float]]:
    """The predictions for every record, in the collection's order, and the means of what the net measures.

    Ranks share the work, and each gets all predictions. If records belong together in groups, or have parts, every rank
    does all the work.
    """
    group = task.group_size
    shares = group == 1 and not task.is_ragged and fabric.world_size > 1
    at_most = max(at_once * net.passes // group, 1) * group
    loader = Loader(
        collection,
        batch_size=-(-fitting_batch(collection, features, memory=memory, at_most=at_most) // group) * group,
        features=list(features),
        order="none",
        memory=memory,
        threads=threads,
        rank=fabric.global_rank if shares else 0,
        world=fabric.world_size if shares else 1,
        tail="pad",
        notify=ignore_message,
    )
    found: defaultdict[str, list[Tensor]] = defaultdict(list)
    numbers: list[Tensor] = []
    sums: defaultdict[str, float] = defaultdict(float)
    heap = Heap(memory // 4)
    net.eval()
    seen = 0
    progress(seen)
    with torch.inference_mode():
        for batch in loader:
            on_device = fabric.to_device(batch)
            for name, values in task.answer(net, on_device).items():
                found[name].append(values)
            numbers.append(on_device["numbers"] if shares else on_device["numbers"][:0])
            heap.trim_malloc()
            progress(seen := seen + len(on_device["numbers"]) * (fabric.world_size if shares else 1))
            for name, value in net.measures(on_device).items():
                sums[name] += float(value)
    whole = {name: torch.cat(values) for name, values in found.items()}
    means = {name: value / max(len(loader), 1) for name, value in sums.items()}
    if not shares:
        return {name: values.cpu().numpy() for name, values in whole.items()}, means
    gathered = fabric.all_gather(torch.cat(numbers)).reshape(-1).cpu().numpy()
    first = np.unique(gathered, return_index=True)  # padding may repeat records
    places = first[1][np.searchsorted(first[0], collection.record_numbers(np.arange(len(collection))))]
    all_values = {name: fabric.all_gather(values).reshape(-1).cpu().numpy() for name, values in whole.items()}
    return {name: values[places] for name, values in all_values.items()}, means


def weights_of(found: Mapping[str, T]) -> dict[str, T]:
    """The weights of the net, from the tensors of a checkpoint or their shapes."""
    return {
        name.removeprefix(WEIGHTS_PREFIX): value for name, value in found.items() if name.startswith(WEIGHTS_PREFIX)
    }


def pack_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of every parameter, keyed by number and name."""
    state = cast("dict[int, dict[str, Tensor]]", optimizer.state_dict()["state"])
    return {f"{OPTIMIZER}{number}.{name}": value for number, values in state.items() for name, value in values.items()}


def unpack_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith(OPTIMIZER):
            number, key = name.removeprefix(OPTIMIZER).split(".")
            state.setdefault(int(number), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]


def learning_share(step: int, total: int, warmup: float) -> float:
    """The learning rate as a share of its peak: linear warm-up, then cosine decay to a tenth."""
    rising = max(1, round(total * warmup))
    if step < rising:
        return (step + 1) / rising
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - rising) / max(1, total - rising)))


def steps_of(parts: Iterator[T], num_parts: int, per_step: int) -> Iterator[Iterator[tuple[bool, T]]]:
    """The parts of each step; take them in order."""
    for first in range(0, num_parts, per_step):
        count = min(per_step, num_parts - first)
        yield ((place == count - 1, part) for place, part in enumerate(islice(parts, count)))
