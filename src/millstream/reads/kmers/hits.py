"""What the k-mers of a read, or of a piece of one, say of each class that it may be of."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from millstream.core.kernels import inlined, kernel
from millstream.reads.kmers.sets import KmerSets, Numbers, Small, slot_of, tag_of
from millstream.reads.syncmers import Syncmers

BEST = 4  # classes of a read that are looked at
FEATURES = 9
RANDOM = 0.0025  # of reads of random DNA may have as many k-mers of the table as a read must have to be classified
LONGEST = 2000  # bases of a read whose k-mers are counted as they are; those of a longer one as if it had so many
LOW_31 = (1 << 31) - 1
LOGS = np.log1p(np.arange(LONGEST + 1)).astype(np.float32)
STRANGERS = 1e-5  # the least share of k-mers of two classes that matters

Floats = NDArray[np.float32]


class ChosenKmers(NamedTuple):
    """`kmers` of all reads, their `places` in them, and where those of each read start."""

    kmers: Numbers
    places: Small
    starts: Small


class Pieces(NamedTuple):
    """Bases `begin` to `end` of these reads, as if of other strains than those of the table.

    One base in `gap` is mutated, by draws from `key`, or none if it is infinite. Class `hidden` is left out of all
    sets; -1 for none. `is_tested` leaves out what classes have only in blocks that are left out.
    """

    read: Numbers
    begin: Numbers
    end: Numbers
    gap: NDArray[np.float64]
    key: Numbers
    hidden: Numbers
    is_tested: bool


class Hits(NamedTuple):
    """The classes with the most k-mers of a piece, -1 for none, and what is seen of each."""

    classes: Small  # [piece, BEST]
    features: Floats  # [piece, BEST, FEATURES]


def whole_reads(lengths: Numbers) -> Pieces:
    """Reads as they are."""
    size = lengths.size
    nothing = np.full(size, -1)
    return Pieces(
        np.arange(size), np.zeros(size, np.int64), lengths, np.full(size, np.inf), nothing, nothing, is_tested=False
    )


def find_hits(chosen: ChosenKmers, pieces: Pieces, sets: KmerSets, *, by: Syncmers, num_classes: int) -> Hits:
    """For every piece; `by` is how k-mers were chosen."""
    size = pieces.read.size
    found = Hits(np.empty((size, BEST), np.int32), np.zeros((size, BEST, FEATURES), np.float32))
    chance = float(sets.form[1] * sets.form[2]) / (by.share * 4**by.k / 2)  # canonical k-mers are half of all
    strange = (-np.log10(np.maximum(sets.kin, STRANGERS)) / 2).astype(np.float32)
    _look(chosen, pieces, sets, strange, LOGS, by.k, num_classes, chance, found)
    return found


class Scoring(NamedTuple):
    """The weights of a network of one hidden layer, which scores a class by its features; no class has a score of 0."""

    inner: Floats  # [width, FEATURES]
    inner_bias: Floats
    outer: Floats  # [width]
    outer_bias: Floats  # [1]

    def likely(self, found: Hits) -> Floats:
        """[piece, BEST]: the probability of each class; 0 where there is none. The rest is that of no class."""
        out = np.zeros(found.classes.shape, np.float32)
        _score(found.classes, found.features, self.inner, self.inner_bias, self.outer, self.outer_bias, out)
        return out


@inlined
def _member(member: int, hidden: int, is_tested: bool) -> int:
    """The class of a member of a set; -1 if it is left out."""
    if member < 0:
        member = -1 if is_tested else ~member
    return -1 if member == hidden else member


@inlined
def _least_hits(expected: float) -> int:
    """So many that few random reads have them if they have so many on average (Poisson, or normal)."""
    if expected > 50:
        return int(expected + 4 * np.sqrt(expected))
    count, term = 1, np.exp(-expected)
    above = 1 - term
    while above > RANDOM:
        term *= expected / count
        above -= term
        count += 1
    return count


@inlined
def _log(count: float, logs: Floats) -> float:
    return logs[min(int(count + 0.5), LONGEST)]


@kernel
def _look(
    chosen: ChosenKmers,
    pieces: Pieces,
    sets: KmerSets,
    strange: Floats,
    logs: Floats,
    k: int,
    num_classes: int,
    chance: float,
    found: Hits,
) -> None:
    kmers, places, table, starts, members = chosen.kmers, chosen.places, sets.table, sets.starts, sets.members
    bits, every = sets.form[0], sets.form[1]
    low = (1 << bits) - 1
    hits, alone, weight = np.zeros(num_classes, np.int64), np.zeros(num_classes, np.int64), np.zeros(num_classes)
    touched = np.empty(num_classes, np.int64)
    place_of = np.zeros(starts.size, np.int32)  # of a set among those of the piece, from 1; 0 for the others
    entries = np.empty(1024, np.int32)  # of the k-mers of the piece; then the places of their sets, 0 for a miss
    owned, counts, masks = np.empty(1024, np.int64), np.empty(1024, np.int64), np.empty(1024, np.int64)  # by place
    covered, end = np.empty(BEST, np.int64), np.empty(BEST, np.int64)
    for piece in range(pieces.read.size):
        read, begin, stop = pieces.read[piece], pieces.begin[piece], pieces.end[piece]
        first = chosen.starts[read]
        last = chosen.starts[read + 1] if read + 1 < chosen.starts.size else kmers.size
        while first < last and places[first] < begin:
            first += 1
        while last > first and places[last - 1] + k > stop:
            last -= 1
        if last - first > entries.size:
            size = 2 * (last - first)
            entries = np.empty(size, np.int32)
            owned, counts, masks = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64)
        gap, key, hidden = pieces.gap[piece], pieces.key[piece], pieces.hidden[piece]
        mutated = begin - 1  # the first mutated base that is not passed
        num_sets = num_touched = total = known = 0
        for i in range(first, last):  # nothing depends on what is loaded, so that loads overlap
            entries[i - first] = table[slot_of(kmers[i], table.size)]
        for i in range(first, last):
            kmer, entry = kmers[i], entries[i - first]
            entries[i - first] = 0
            if kmer & (every - 1):
                continue
            total += 1
            if gap < np.inf:
                while mutated < places[i]:
                    key = (key * 48271) % LOW_31
                    mutated += 1 + int(-np.log(key / LOW_31) * gap)
                if mutated < places[i] + k:
                    continue
            tag, slot = tag_of(kmer, bits), slot_of(kmer, table.size)
            while entry != 0 and entry >> bits != tag:
                slot += 1
                if slot == table.size:
                    slot = 0
                entry = table[slot]
            if entry == 0:
                continue
            number = entry & low
            if place_of[number] == 0:
                owned[num_sets], counts[num_sets] = number, 0
                num_sets += 1
                place_of[number] = num_sets
            entries[i - first] = place_of[number]
            counts[place_of[number] - 1] += 1
        for at in range(num_sets):
            number, visible = owned[at], 0
            place_of[number] = 0
            for j in range(starts[number], starts[number + 1]):
                visible += _member(members[j], hidden, pieces.is_tested) >= 0
            known += counts[at] if visible else 0
            for j in range(starts[number], starts[number + 1]):
                label = _member(members[j], hidden, pieces.is_tested)
                if label < 0:
                    continue
                if hits[label] == 0:
                    touched[num_touched] = label
                    num_touched += 1
                hits[label] += counts[at]
                alone[label] += counts[at] if visible == 1 else 0
                weight[label] += counts[at] / visible
        best, least = found.classes[piece], _least_hits(chance * total)
        for rank in range(BEST):
            most_label, most = -1, 0.0
            for j in range(num_touched):
                label = touched[j]
                if hits[label] >= least:
                    value = hits[label] + weight[label] / (total + 1)
                    if value > most or (value == most and label < most_label):
                        most_label, most = label, value
            best[rank] = most_label
            if most_label >= 0:
                hits[most_label] = -hits[most_label]
            covered[rank] = end[rank] = 0
        if best[0] >= 0:
            for at in range(num_sets):
                masks[at] = 0
                for j in range(starts[owned[at]], starts[owned[at] + 1]):
                    label = _member(members[j], hidden, pieces.is_tested)
                    for rank in range(BEST):
                        masks[at] |= (label >= 0 and label == best[rank]) << rank
            for i in range(first, last):
                if entries[i - first]:
                    mask = masks[entries[i - first] - 1]
                    rank = 0
                    while mask:
                        if mask & 1:
                            covered[rank] += places[i] + k - max(end[rank], places[i])
                            end[rank] = places[i] + k
                        mask >>= 1
                        rank += 1
        length = max(stop - begin, 1)
        scale = min(1.0, LONGEST / length)
        for rank in range(BEST):
            label = best[rank]
            if label < 0:
                break
            own, count = found.features[piece, rank], -hits[label]
            other = -hits[best[0 if rank else 1]] if rank or best[1] >= 0 else 0
            own[0] = _log(float(scale * count), logs)
            own[1] = _log(float(scale * alone[label]), logs)
            own[2] = _log(float(scale * (known - count)), logs)
            own[3] = covered[rank] / length
            own[4] = count / total
            own[5] = 1 - known / total
            own[6] = _log(float(scale * total), logs)
            own[7] = _log(float(scale * other), logs)
            own[8] = strange[label]
        for j in range(num_touched):
            hits[touched[j]] = alone[touched[j]] = 0
            weight[touched[j]] = 0.0


@kernel
def _score(
    classes: Small, features: Floats, inner: Floats, inner_bias: Floats, outer: Floats, outer_bias: Floats, out: Floats
) -> None:
    for piece in range(classes.shape[0]):
        highest = np.float32(0.0)  # the score of no class
        for rank in range(BEST):
            if classes[piece, rank] < 0:
                break
            score = outer_bias[0]
            for unit in range(outer.size):
                value = inner_bias[unit]
                for place in range(FEATURES):
                    value += inner[unit, place] * features[piece, rank, place]
                score += outer[unit] * max(value, np.float32(0.0))
            out[piece, rank] = score
            highest = max(highest, score)
        total = np.exp(-highest)
        for rank in range(BEST):
            if classes[piece, rank] >= 0:
                out[piece, rank] = np.exp(out[piece, rank] - highest)
                total += out[piece, rank]
        for rank in range(BEST):
            out[piece, rank] /= total
