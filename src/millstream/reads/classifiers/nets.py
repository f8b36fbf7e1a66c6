"""Nets that classify reads: what they share, `kmer-linear` over k-mers, `cnn` over bases, the others over tokens."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from millstream.core.split import LABEL
from millstream.reads.evidence import LEAST, LEAST_VOTE
from millstream.reads.features import OTHER, QUALITIES, KmerBag
from millstream.reads.mapping import CLASS, PROBABILITY, prediction_column
from millstream.reads.windows import WINDOWS
from millstream.training.task import Batch, Moments, Net, records_at_once

# B batch, C classes, G taxa of a rank, K k-mers of all reads, T tokens or bases, S starts of motifs,
# P positions after pooling, W width, V windows of all reads

TOKENS = ("input_ids", "attention_mask")
PLAUSIBLE = ("plausible_class", "plausible_probability")
VALUES = 1 << 19  # of a table per step: each step makes several copies of them, some in float64
NEVER = -1e4  # the bias of a class without training reads
LEAST_KMERS = 3.0  # of the class, in a read that is assigned to it
LEAST_DEVIATIONS = 3.0  # of the score of random DNA of the same length, by which the score of a class must exceed 0
SYMBOLS = 6  # padding, A C G T, N
MOTIF, POOLED, INNER = 6, 4, 5  # sizes of the convolutions and the pooling
HIGH_QUALITY = 40  # a Phred value
FEW, MANY = 8, 64  # reads: smaller batches use running statistics, updated over about this many reads
HEAD_WIDTH = 16  # minimum width of an attention head


class ReadNet(Net):
    """`logits` [B, C] of the classes; one more, the last, if it knows reads of no class."""

    at_most = 4096
    loss_name = "cross_entropy"
    clades: Sequence[NDArray[np.int64]] = ()  # further levels to learn: the taxon of each class

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__(width)
        self.num_classes = num_classes

    def is_supported(self, batch: Batch, logits_BC: Tensor) -> Tensor:
        """[B]: whether there is evidence for the most probable class of a read; if not, it is unclassified."""
        return torch.ones(len(logits_BC), dtype=torch.bool, device=logits_BC.device)

    def loss(self, logits: Tensor, target_B: Tensor, weight_B: Tensor) -> Tensor:
        """Cross-entropy of the class, or its mean with those of `clades`: a taxon is as probable as its classes."""
        log_BC = logits.float().log_softmax(dim=1)
        loss_B = -log_BC.gather(1, target_B[:, None])[:, 0]
        for of_class in self.clades:
            taxon_C = torch.as_tensor(of_class, device=logits.device)
            is_other_BC = taxon_C != taxon_C[target_B][:, None]
            loss_B = loss_B - log_BC.masked_fill(is_other_BC, -torch.inf).logsumexp(dim=1)
        return (loss_B * weight_B).mean() / (1 + len(self.clades))


class TokenNet(ReadNet):
    """Takes `input_ids` [B, T] and `attention_mask`; a read of blank tokens only is unclassified."""

    blank_ids: Sequence[int] = ()  # tokens of N, and special tokens
    passes = 16  # of the reads of a batch while scoring, sorted by length

    def is_supported(self, batch: Batch, logits_BC: Tensor) -> Tensor:
        ids_BT, mask_BT = batch["input_ids"], batch["attention_mask"].bool()
        return (mask_BT & ~torch.isin(ids_BT, ids_BT.new_tensor(self.blank_ids))).any(dim=1)


@dataclass(frozen=True)
class ReadPredictions:
    """A net's logits -> the class of each read, or of each read pair (`mates=2`), and its taxon at each rank.

    `ranks` has the taxon of each class, by number, at each rank; -1 for none. With `plausible`, also the classes that
    are the most probable, [B, plausible] or as many as there are, from the highest.
    """

    ranks: Mapping[str, NDArray[np.int64]]
    mates: int = 1
    plausible: int = 0

    def __call__(self, net: Net, batch: Batch) -> dict[str, Tensor]:
        """The most probable class and its probability; and the same for the taxa of each rank, summed over classes.

        All probabilities are 0 for a read that cannot be classified. Those of mates are multiplied: each sees another
        part of the genome.
        """
        assert isinstance(net, ReadNet)
        found_BC, is_supported_B = _with_none(net, batch)
        if self.mates > 1:
            pair_B = torch.arange(len(found_BC), device=found_BC.device) // self.mates
            found_BC, is_supported_B = _vote(found_BC, is_supported_B, pair_B, len(found_BC) // self.mates)
        found_BC = found_BC[:, : net.num_classes]
        probability_B, class_B = found_BC.max(dim=1)
        found = {CLASS: class_B.int(), PROBABILITY: probability_B * is_supported_B}
        if self.plausible:
            found |= dict(zip(PLAUSIBLE, self._plausible(found_BC, probability_B, class_B), strict=True))
        for name, of_class in self.ranks.items():
            taxon_C = torch.as_tensor(of_class, device=found_BC.device)
            sums_BG = found_BC.new_zeros(len(found_BC), int(of_class.max()) + 2)
            sums_BG.index_add_(1, taxon_C + 1, found_BC)  # the first column is for classes without a taxon
            rank_probability_B, taxon_B = sums_BG[:, 1:].max(dim=1)
            column = prediction_column(name)
            found |= {column: taxon_B.int(), f"{column}_{PROBABILITY}": rank_probability_B * is_supported_B}
        return found

    def _plausible(self, found_BC: Tensor, probability_B: Tensor, class_B: Tensor) -> tuple[Tensor, Tensor]:
        """Most reads have one such class; only those of the others are sorted."""
        count = min(self.plausible, found_BC.shape[1])
        likely_BK = found_BC.new_zeros(len(found_BC), count)
        class_BK = class_B.new_zeros(len(found_BC), count)
        likely_BK[:, 0], class_BK[:, 0] = probability_B, class_B
        (rows,) = torch.nonzero((found_BC >= LEAST * probability_B[:, None]).sum(dim=1) > 1, as_tuple=True)
        likely_BK[rows], class_BK[rows] = found_BC[rows].topk(count, dim=1)
        return class_BK, likely_BK


def probabilities(net: ReadNet, batch: Batch) -> tuple[Tensor, Tensor]:
    """[B, C]: the probability of each class. [B]: whether each read can be classified."""
    found_BC, is_supported_B = _with_none(net, batch)
    return found_BC[:, : net.num_classes], is_supported_B


def _with_none(net: ReadNet, batch: Batch) -> tuple[Tensor, Tensor]:
    """The same, with the probability of no class in the last column, if the net knows it.

    Where reads are in windows, by the mean of their log-probabilities: they are not independent.
    """
    found_VC, is_supported_V = _in_passes(net, batch)
    if WINDOWS not in batch:
        return found_VC, is_supported_V
    counts_B = batch[WINDOWS]
    return _vote(found_VC, is_supported_V, torch.repeat_interleave(counts_B), len(counts_B), is_mean=True)


def _vote(
    found_VC: Tensor, is_supported_V: Tensor, read_V: Tensor, num_reads: int, *, is_mean: bool = False
) -> tuple[Tensor, Tensor]:
    """The product of the probabilities of all rows of a read, or their geometric mean.

    Rows that cannot be classified do not vote.
    """
    num_votes_B = torch.zeros(num_reads, device=found_VC.device).index_add(0, read_V, is_supported_V.float())
    weight_V = (is_supported_V | (num_votes_B == 0)[read_V]).to(found_VC.dtype)
    votes_VC = found_VC.clamp(min=LEAST_VOTE).log() * weight_V[:, None]
    sums_BC = found_VC.new_zeros(num_reads, found_VC.shape[1]).index_add(0, read_V, votes_VC)
    if is_mean:
        sums_BC = sums_BC / found_VC.new_zeros(num_reads).index_add(0, read_V, weight_V)[:, None]
    return sums_BC.softmax(dim=1), num_votes_B > 0


def _in_passes(net: ReadNet, batch: Batch) -> tuple[Tensor, Tensor]:
    """`_of_rows`, for tokens of rows of similar length at a time, so that little padding goes through the net."""
    names = [name for name in batch if name.removeprefix(OTHER) in (*TOKENS, QUALITIES)]
    if not names:
        return _of_rows(net, batch)
    lengths_B = torch.stack([batch[name].sum(dim=1) for name in names if name.endswith(TOKENS[1])]).amax(dim=0)
    sorted_B, order_B = lengths_B.sort(stable=True)
    some = records_at_once(net, batch, len(order_B))
    parts: list[tuple[Tensor, Tensor]] = []
    for first in range(0, len(order_B), some):
        rows = order_B[first : first + some]
        longest = int(sorted_B[first : first + some][-1])
        parts.append(_of_rows(net, {name: batch[name][rows, :longest] for name in names}))
    back_B = order_B.argsort()
    found_BC, is_supported_B = (torch.cat(values)[back_B] for values in zip(*parts, strict=True))
    return found_BC, is_supported_B


def _of_rows(net: ReadNet, batch: Batch) -> tuple[Tensor, Tensor]:
    """[B, C]: the mean over both strands, where the batch has them. [B]: whether each row can be classified."""
    logits_BC = net.logits(batch)[0].float()
    found_BC = logits_BC.softmax(dim=1)
    is_supported_B = net.is_supported(batch, logits_BC)
    other = {name.removeprefix(OTHER): value for name, value in batch.items() if name.startswith(OTHER)}
    if other:
        found_BC = (found_BC + net.logits(other)[0].float().softmax(dim=1)) / 2
    return found_BC, is_supported_B


def seen_tokens(batch: Batch) -> tuple[Tensor, Tensor]:
    """Tokens [B, T], T at least 1, and their mask, in which the first position is always set."""
    ids_BT, mask_BT = batch["input_ids"].long(), batch["attention_mask"].bool()
    if not ids_BT.shape[1]:  # all reads are too short for a token
        ids_BT, mask_BT = functional.pad(ids_BT, (0, 1)), functional.pad(mask_BT, (0, 1))
    return ids_BT, mask_BT | (torch.arange(mask_BT.shape[1], device=mask_BT.device) == 0)


class KmerLinear(ReadNet):
    """`kmer-linear`: the log-frequencies of each k-mer per class, summed over the read.

    Takes `buckets_k` [K] and `starts_k` [B] for each length k. The weights are counted, not learned by gradient
    descent: `prepare` sees all reads once, and a weight is the log count of its bucket in its class, less the mean over
    the k-mers of random DNA, which thus has a score of 0 on average, in classes of any size. Gradients only fit the
    weight of each k (`gain`) and a bias per class. During training a read is excluded from the counts that classify it:
    otherwise long k-mers, which every read shares with itself, would get too much weight.

    A read is unclassified if random DNA of its length may well reach its score, or few of its k-mers are of the class.
    """

    lr = 0.02
    clips = False
    most_records = 400_000  # only a few parameters are fitted

    def __init__(self, bag: KmerBag, num_classes: int) -> None:
        super().__init__(num_classes, num_classes)
        self.bag, self.ks, num_buckets = bag, bag.ks, 1 << bag.bits
        self.gain = nn.Parameter(torch.full((len(self.ks),), 0.3))
        self.bias = nn.Parameter(torch.zeros(num_classes))
        for k in self.ks:
            self.register_buffer(f"table_{k}", torch.zeros(num_buckets, num_classes))
            # Log counts of the k-mers of random DNA: mean and standard deviation. Mean weight of training k-mers: own.
            for name in ("size", "spread", "own"):
                self.register_buffer(f"{name}_{k}", torch.zeros(num_classes))

    @property
    def needs_preparation(self) -> bool:
        return True

    def prepare(self, batches: Iterable[Batch]) -> None:
        """Count the k-mers of all batches by class, and turn the counts into weights."""
        for batch in batches:
            for k in self.ks:
                places = batch[f"buckets_{k}"].long() * self.num_classes + _of_kmers(batch, k)[1]
                self._table(k).view(-1).index_add_(0, places, torch.ones(len(places)))
        self._weigh()

    def logits(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        sums_BC = self.bias
        for place, k in enumerate(self.ks):
            with torch.no_grad():
                found_BC = functional.embedding_bag(
                    batch[f"buckets_{k}"], self._table(k), batch[f"starts_{k}"], mode="sum"
                )
                if self.training:
                    self._exclude_own(found_BC, batch, k)
            sums_BC = sums_BC + self.gain[place] * found_BC
        return sums_BC, {}

    def num_rows(self, batch: Batch) -> int:
        return len(batch["numbers"])

    def is_supported(self, batch: Batch, logits_BC: Tensor) -> Tensor:
        class_B = logits_BC.argmax(dim=1)
        score_B = logits_BC.gather(1, class_B[:, None])[:, 0] - self.bias[class_B]
        kmers_B = variance_B = own_B = torch.zeros_like(score_B)  # own: the score if all k-mers are of the class
        for place, k in enumerate(self.ks):
            count_B, gain = _num_kmers(batch, k), self.gain[place]
            kmers_B = kmers_B + count_B
            variance_B = variance_B + count_B * (gain * self._statistic("spread", k)[class_B]).square()
            own_B = own_B + count_B * gain * self._statistic("own", k)[class_B]
        is_enough_B = (own_B > 0) & (score_B * kmers_B >= LEAST_KMERS * own_B)
        return is_enough_B & (score_B > LEAST_DEVIATIONS * variance_B.sqrt())

    def _weigh(self) -> None:
        """In place, log(1 + count) less its mean over random DNA. Classes without k-mers never win.

        A mean over buckets would be too small: random DNA meets buckets that many k-mers share more often.
        """
        seen_C = torch.zeros(self.num_classes, dtype=torch.bool)
        background = self.bag.background()
        for k in self.ks:
            table = self._table(k)
            counts_C, sums_C = torch.zeros(2, self.num_classes, dtype=torch.float64)
            for part in self._slices(table):
                seen_C |= part.any(dim=0)
                counts = part.clone()
                part.log1p_()
                counts_C += counts.sum(dim=0, dtype=torch.float64)
                sums_C += counts.mul_(part).sum(dim=0, dtype=torch.float64)
            random = Moments()
            for buckets in self._slices(torch.as_tensor(background[k])):
                random.add(table[buckets])
            assert random.count is not None and random.mean is not None and random.spread is not None
            size_C = random.mean[0].float()
            self._statistic("size", k).copy_(size_C)
            self._statistic("spread", k).copy_((random.spread[0] / random.count[0]).sqrt())
            self._statistic("own", k).copy_(sums_C / counts_C.clamp(min=1) - size_C)
            for part in self._slices(table):
                part.sub_(size_C)
        with torch.no_grad():
            self.bias.masked_fill_(~seen_C, NEVER)

    def _exclude_own(self, found_BC: Tensor, batch: Batch, k: int) -> None:
        """Exclude each read from the counts of its own class."""
        read_K, label_K = _of_kmers(batch, k)
        size_C = self._statistic("size", k)
        weight_K = self._table(k)[batch[f"buckets_{k}"].long(), label_K]
        less_K = (weight_K + size_C[label_K]).exp().sub_(1).clamp_(min=1).log_() - size_C[label_K]
        found_BC.view(-1).index_add_(0, read_K * self.num_classes + label_K, less_K - weight_K)

    def _slices(self, rows: Tensor) -> Iterator[Tensor]:
        """Views of rows of a table, or of their numbers, so few that copies take little memory."""
        count = max(VALUES // self.num_classes, 1)
        return (rows[first : first + count] for first in range(0, len(rows), count))

    def _table(self, k: int) -> Tensor:
        return cast(Tensor, getattr(self, f"table_{k}"))

    def _statistic(self, name: str, k: int) -> Tensor:
        return cast(Tensor, getattr(self, f"{name}_{k}"))


def _num_kmers(batch: Batch, k: int) -> Tensor:
    """[B]"""
    starts_B = batch[f"starts_{k}"]
    return torch.diff(starts_B, append=starts_B.new_tensor([len(batch[f"buckets_{k}"])]))


def _of_kmers(batch: Batch, k: int) -> tuple[Tensor, Tensor]:
    """The read of each k-mer, and its label."""
    read_K = torch.repeat_interleave(_num_kmers(batch, k).long())
    return read_K, batch[LABEL].long()[read_K]


class Norm(nn.BatchNorm1d):
    """Batch norm that uses running statistics for small batches, whose own are too noisy."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or len(input) >= FEW:
            return super().forward(input)
        mean_W, var_W = cast(Tensor, self.running_mean), cast(Tensor, self.running_var)
        with torch.no_grad():
            share = len(input) / MANY
            seen = input.transpose(0, 1).flatten(1).float()
            mean_W += share * (seen.mean(1) - mean_W)
            var_W += share * ((seen - mean_W[:, None]).square().mean(1) - var_W)
        return functional.batch_norm(input, mean_W.clone(), var_W.clone(), self.weight, self.bias, eps=self.eps)


class Residual(nn.Module):
    """A residual block of two convolutions; padded positions stay zero."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = Norm(width)
        self.first = nn.Conv1d(width, width, INNER, padding=INNER // 2)
        self.second = nn.Conv1d(width, width, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BWP: Tensor, valid_BP: Tensor) -> Tensor:
        inner = functional.gelu(self.first(self.norm(x_BWP) * valid_BP))
        return x_BWP + self.dropout(self.second(inner)) * valid_BP


class ReadCNN(TokenNet):
    """Takes `input_ids` [B, T] of single bases; 0 is padding. And `qualities` [B, T], if it was built for them.

    Convolutions over six bases, max pooling over four positions, residual blocks, then mean and maximum over the
    read. Normalised over the batch: classes differ by small differences of means.
    """

    lr = 5e-3

    def __init__(
        self, width: int, *, num_classes: int, layers: int, dropout: float, has_qualities: bool = False
    ) -> None:
        super().__init__(width, num_classes)
        self.has_qualities = has_qualities
        self.motifs = nn.Conv1d(SYMBOLS - 1 + has_qualities, width, MOTIF)
        self.norm = Norm(width)
        self.blocks = nn.ModuleList(Residual(width, dropout) for _ in range(layers))
        self.seen = Norm(2 * width)
        self.head = nn.Linear(2 * width, num_classes)

    def logits(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        ids_BT = batch["input_ids"]
        ids_BT = functional.pad(ids_BT, (0, max(MOTIF - ids_BT.shape[1], 0)))
        x_BTL = functional.one_hot(ids_BT.long(), SYMBOLS)[:, :, 1:].to(self.head.weight.dtype)
        if self.has_qualities:
            more_BT1 = functional.pad(batch[QUALITIES], (0, ids_BT.shape[1] - batch[QUALITIES].shape[1]))[:, :, None]
            x_BTL = torch.cat([x_BTL, more_BT1.to(x_BTL.dtype) / HIGH_QUALITY], dim=2)
        x_BWS = self.motifs(x_BTL.transpose(1, 2))
        whole_BS = (ids_BT > 0)[:, MOTIF - 1 :]
        whole_BS = (whole_BS | (torch.arange(whole_BS.shape[1], device=ids_BT.device) == 0))[:, None]
        x_BWP = functional.max_pool1d(x_BWS.masked_fill(~whole_BS, -torch.inf), POOLED, ceil_mode=True)
        is_valid_BP = functional.max_pool1d(whole_BS.to(x_BWP.dtype), POOLED, ceil_mode=True) > 0
        valid_BP = is_valid_BP.to(x_BWP.dtype)
        x_BWP = functional.gelu(self.norm(x_BWP.masked_fill(~is_valid_BP, 0.0))) * valid_BP
        for block in self.blocks:
            x_BWP = cast(Tensor, block(x_BWP, valid_BP))
        mean_BW = x_BWP.sum(2) / valid_BP.sum(2)
        most_BW = x_BWP.masked_fill(~is_valid_BP, -torch.inf).amax(2)
        return self.head(self.seen(torch.cat([mean_BW, most_BW], dim=1))), {}

    def num_rows(self, batch: Batch) -> int:
        return batch["input_ids"].numel()


class ReadLSTM(TokenNet):
    """Takes `input_ids` [B, T] and `attention_mask`."""

    def __init__(self, width: int, *, num_tokens: int, num_classes: int, dropout: float) -> None:
        super().__init__(width, num_classes)
        self.embed = nn.Embedding(num_tokens, width, padding_idx=0)
        self.lstm = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.attend = nn.Sequential(nn.Linear(2 * width, width), nn.Tanh(), nn.Linear(width, 1))
        self.head = nn.Sequential(
            nn.Dropout(dropout), nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, num_classes)
        )

    def logits(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        ids_BT, seen_BT = seen_tokens(batch)
        # packed, otherwise the backward direction would start in the padding
        packed = pack_padded_sequence(self.embed(ids_BT), seen_BT.sum(1).cpu(), batch_first=True, enforce_sorted=False)
        hidden_BTW, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=ids_BT.shape[1])
        weight_BT = self.attend(hidden_BTW)[:, :, 0].masked_fill(~seen_BT, -torch.inf).softmax(dim=1)
        return self.head((hidden_BTW * weight_BT[:, :, None]).sum(1)), {}

    def num_rows(self, batch: Batch) -> int:
        return 2 * batch["input_ids"].numel()


class ReadTransformer(TokenNet):
    """Takes `input_ids` [B, T] and `attention_mask`, of at most `max_length` tokens."""

    lr = 5e-4

    def __init__(
        self, width: int, *, num_tokens: int, max_length: int, num_classes: int, layers: int, dropout: float
    ) -> None:
        super().__init__(width, num_classes)
        self.embed = nn.Embedding(num_tokens, width)
        self.place = nn.Parameter(torch.randn(max_length, width) * 0.02)
        most = width // (64 if width >= 64 else HEAD_WIDTH)
        num_heads = max(heads for heads in range(1, max(most, 1) + 1) if width % heads == 0)
        layer = nn.TransformerEncoderLayer(
            width, num_heads, 4 * width, dropout, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, num_classes)

    def logits(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        ids_BT, seen_BT = (found[:, : len(self.place)] for found in seen_tokens(batch))  # longer reads are truncated
        x_BTW = self.embed(ids_BT) + self.place[: ids_BT.shape[1]]
        x_BTW = self.encoder(x_BTW, src_key_padding_mask=~seen_BT)
        return self.head(mean_over_tokens(x_BTW, seen_BT)), {}

    def num_rows(self, batch: Batch) -> int:
        return 4 * batch["input_ids"].numel()


def mean_over_tokens(x_BTW: Tensor, seen_BT: Tensor) -> Tensor:
    weight_BT1 = seen_BT[:, :, None].to(x_BTW.dtype)
    return (x_BTW * weight_BT1).sum(1) / weight_BT1.sum(1)
