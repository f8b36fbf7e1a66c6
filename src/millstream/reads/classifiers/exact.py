"""`kmer-exact`: the classes that the k-mers of a read were seen in, and how sure that makes it of one, or of none."""

from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from millstream.core.kernels import kernel
from millstream.core.split import LABEL
from millstream.reads.classifiers.kmer_sets import MANY, KmerCounts, Numbers, Small, slot_of, tag_of
from millstream.reads.classifiers.nets import NEVER, ReadNet
from millstream.reads.syncmers import Syncmers
from millstream.training.task import Batch

# B batch, C classes, K k-mers of all reads, M classes that a read may be of, F what is seen of each of them, W width

BEST = 4  # classes of a read that are looked at
WIDTH = 16
HIDDEN = 0.1  # of training reads: their class is left out, as if they were of a region that no training strain has
MOST_MUTATED = 0.06  # of the bases of a training read, as if it were of another strain
SHORTEST = 50  # of the piece of a training read, in bases
LONGEST = 300
FEATURES = 11
LOW_31 = (1 << 31) - 1


class KmerExact(ReadNet):
    """`kmer-exact`: a table from each k-mer to the classes it was seen in; a k-mer that was not seen is a miss.

    `prepare` counts the k-mers of all reads once. Gradients fit a small network that scores the classes of a read by
    what the k-mers say of each, all by the same weights. One more class, the last, is none of them. To learn when that
    is right, it trains on reads as of other strains: mutated, and one in ten as of a region that its class lacks, with
    its class left out of all sets. All that remains are k-mers that other classes share.
    """

    lr = 0.01
    clips = False
    most_records = 400_000  # only a few parameters are fitted
    BUFFERS = ("table", "set_starts", "set_classes", "form")

    def __init__(self, chosen: Syncmers, num_classes: int, memory: int, num_bases: int | None = None) -> None:
        super().__init__(num_classes + 1, num_classes)
        self.chosen, self.memory, self.num_bases = chosen, memory, num_bases
        self.inner = nn.Linear(FEATURES, WIDTH)
        self.outer = nn.Linear(WIDTH, 1)
        for name, size in zip(self.BUFFERS, (1, MANY + 2, 0, 2), strict=True):
            self.register_buffer(name, torch.zeros(size, dtype=torch.int64 if name == "form" else torch.int32))

    @property
    def needs_preparation(self) -> bool:
        return True

    def prepare(self, batches: Iterable[Batch]) -> None:
        """Count the k-mers of all batches by class, and make the table."""
        expected = None if self.num_bases is None else int(self.num_bases * self.chosen.share)
        counts = KmerCounts(self.num_classes, self.memory, expected)
        for batch in batches:
            per_read = torch.diff(batch["starts"], append=batch["starts"].new_tensor([len(batch["kmers"])]))
            labels = torch.repeat_interleave(batch[LABEL].long(), per_read.long())
            counts.add(batch["kmers"].numpy(), labels.numpy())
        made = counts.finish()
        for name, values in zip(self.BUFFERS, (made.table, made.starts, made.members, made.form), strict=True):
            setattr(self, name, torch.as_tensor(values))

    def forward(self, batch: Batch, target_B: Tensor, weight_B: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        size = len(target_B)
        is_hidden_B = torch.rand(size) < HIDDEN
        rate_B = torch.rand(size) * MOST_MUTATED
        lengths_B = batch["lengths"].long()
        most_B = lengths_B.clamp(max=LONGEST)
        least_B = most_B.clamp(max=SHORTEST)
        pieces_B = torch.where(torch.rand(size) < 0.5, most_B, least_B + (torch.rand(size) * (most_B - least_B)).long())
        begins_B = (torch.rand(size) * (lengths_B - pieces_B + 1)).long()
        seen = self._seen(
            batch,
            torch.where(is_hidden_B, target_B.cpu(), -1),
            torch.where(rate_B > 0, -1 / torch.log1p(-rate_B), torch.inf).double(),
            torch.randint(1, LOW_31, (size,)),
            begins_B,
            pieces_B,
        )
        logits_BC = self._scores(*seen, size)
        is_found_B = logits_BC.gather(1, target_B[:, None])[:, 0] > NEVER  # never if it is hidden
        loss = self.loss(logits_BC, torch.where(is_found_B, target_B, self.num_classes), weight_B)
        return loss, {self.loss_name: loss.detach()}

    def logits(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """[B, C + 1]: the last is that of no class."""
        size = len(batch["starts"])
        nothing_B = torch.full((size,), -1)
        forever_B = torch.full((size,), torch.inf, dtype=torch.float64)
        begins_B = torch.zeros(size, dtype=torch.int64)
        seen = self._seen(batch, nothing_B, forever_B, nothing_B, begins_B, batch["lengths"].long())
        return self._scores(*seen, size), {}

    def num_rows(self, batch: Batch) -> int:
        return len(batch["starts"])

    def is_supported(self, batch: Batch, logits_BC: Tensor) -> Tensor:
        """[B]: whether some class is more probable than none of them."""
        return logits_BC[:, : self.num_classes].max(dim=1).values > logits_BC[:, self.num_classes]

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """The table takes the size of the one that is loaded."""
        for name in self.BUFFERS:
            if name in state_dict:
                setattr(self, name, torch.empty_like(state_dict[name], device=self.outer.weight.device))
        return super().load_state_dict(state_dict, strict, assign)

    def _seen(
        self, batch: Batch, hidden_B: Tensor, gap_B: Tensor, key_B: Tensor, begin_B: Tensor, length_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[B, M]: the classes with the most evidence; -1 for none. [B, M, F]: what speaks for each."""
        kmers, places, starts = (batch[name].cpu().numpy() for name in ("kmers", "places", "starts"))
        table, set_starts, set_classes, form = (
            cast(Tensor, getattr(self, name)).cpu().numpy() for name in self.BUFFERS
        )
        classes_BM = np.empty((len(starts), BEST), np.int64)
        features_BMF = np.empty((len(starts), BEST, FEATURES), np.float32)
        _look(
            kmers,
            places,
            starts,
            hidden_B.cpu().numpy(),
            gap_B.cpu().numpy(),
            key_B.cpu().numpy(),
            begin_B.cpu().numpy(),
            length_B.cpu().numpy(),
            table,
            set_starts,
            set_classes,
            form,
            self.chosen.k,
            self.num_classes,
            classes_BM,
            features_BMF,
        )
        device = self.outer.weight.device
        return torch.as_tensor(classes_BM, device=device), torch.as_tensor(features_BMF, device=device)

    def _scores(self, classes_BM: Tensor, features_BMF: Tensor, size: int) -> Tensor:
        score_BM = self.outer(functional.gelu(self.inner(features_BMF)))[:, :, 0]
        # The last column but one is no class; the last takes the places without a candidate.
        logits_BC = score_BM.new_full((size, self.num_classes + 2), NEVER)
        logits_BC[:, self.num_classes] = 0.0
        place_BM = torch.where(classes_BM < 0, self.num_classes + 1, classes_BM)
        return logits_BC.scatter(1, place_BM, score_BM)[:, : self.num_classes + 1]


@kernel
def _look(
    kmers: Numbers,
    places: Small,
    read_starts: Small,
    hidden: Numbers,
    gaps: NDArray[np.float64],
    keys: Numbers,
    begins: Numbers,
    lengths: Numbers,
    table: Small,
    starts: Small,
    members: Small,
    form: Numbers,
    k: int,
    num_classes: int,
    best: Numbers,
    features: NDArray[np.float32],
) -> None:
    """Look up the k-mers of each read that lie in its piece, without its mutations and without its hidden class."""
    bits, every = form[0], form[1]
    low = (1 << bits) - 1
    hits, alone, covered = np.zeros(num_classes), np.zeros(num_classes), np.zeros(num_classes)
    weight, end = np.zeros(num_classes), np.zeros(num_classes, np.int64)
    touched = np.empty(num_classes, np.int64)
    most = kmers.size - read_starts[-1] if read_starts.size else 0
    if read_starts.size > 1:
        most = max(most, np.diff(read_starts).max())
    entries = np.empty(most, np.int32)
    for read in range(read_starts.size):
        last = read_starts[read + 1] if read + 1 < read_starts.size else kmers.size
        begin, stop = begins[read], begins[read] + lengths[read]
        mutates = gaps[read] < np.inf
        key, mutated = keys[read], begin - 1  # the first mutated base that is not passed
        num_touched = total = known = 0
        for i in range(read_starts[read], last):  # nothing depends on what is loaded, so that loads overlap
            entries[i - read_starts[read]] = table[slot_of(kmers[i], table.size)]
        for i in range(read_starts[read], last):
            kmer, place = kmers[i], places[i]
            if place < begin or place + k > stop or kmer & (every - 1):
                continue
            total += 1
            if mutates:
                while mutated < place:
                    key = (key * 48271) % LOW_31
                    mutated += 1 + int(-np.log(key / LOW_31) * gaps[read])
                if mutated < place + k:
                    continue
            tag, slot = tag_of(kmer, bits), slot_of(kmer, table.size)
            entry = entries[i - read_starts[read]]
            while entry != 0 and entry >> bits != tag:
                slot += 1
                if slot == table.size:
                    slot = 0
                entry = table[slot]
            if entry == 0:
                continue
            first, after = starts[entry & low], starts[(entry & low) + 1]
            count = after - first
            for j in range(first, after):
                count -= members[j] == hidden[read]
            known += count > 0
            for j in range(first, after):
                label = members[j]
                if label == hidden[read]:
                    continue
                if hits[label] == 0:
                    touched[num_touched] = label
                    num_touched += 1
                    end[label] = place
                hits[label] += 1
                alone[label] += count == 1
                weight[label] += 1 / count
                covered[label] += place + k - max(end[label], place)
                end[label] = place + k
        for rank in range(best.shape[1]):
            chosen, most = -1, 0.0
            for j in range(num_touched):
                label = touched[j]
                if hits[label] > 0:
                    value = hits[label] + weight[label] / (total + 1)
                    if value > most or (value == most and label < chosen):
                        chosen, most = label, value
            best[read, rank] = chosen
            if chosen >= 0:
                features[read, rank, 0] = hits[chosen]
                hits[chosen] = -hits[chosen]
        for rank in range(best.shape[1]):
            own = features[read, rank]
            chosen = best[read, rank]
            if chosen < 0:
                own[:] = 0
                continue
            other = -hits[best[read, 0 if rank else 1]] if rank or best[read, 1] >= 0 else 0.0
            own[1] = np.log1p(alone[chosen])
            own[2] = np.log1p(known - own[0])
            own[3] = np.log1p(weight[chosen])
            own[4] = covered[chosen] / max(stop - begin, 1)
            own[5] = own[0] / total
            own[6] = 1 - known / total
            own[7] = np.log1p(total)
            own[8] = np.log1p(other)
            own[9] = np.log1p(covered[chosen]) / 4
            own[10] = (own[0] - other) / (own[0] + other)
            own[0] = np.log1p(own[0])
        for j in range(num_touched):
            hits[touched[j]] = alone[touched[j]] = covered[touched[j]] = weight[touched[j]] = 0
