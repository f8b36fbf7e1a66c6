"""What the k-mers of a read, or of a piece of one, say of each class that it may be of."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from millstream.core.kernels import inlined, kernel
from millstream.reads.classifiers.kmer_sets import KmerSets, Numbers, Small, slot_of, tag_of
from millstream.reads.syncmers import Syncmers

BEST = 4  # classes of a read that are looked at
FEATURES = 11
RANDOM = 0.0025  # of reads of random DNA may have as many k-mers of the table as a read must have to be classified
LONGEST = 2000  # bases of a read whose k-mers are counted as they are; those of a longer one as if it had so many
LOW_31 = (1 << 31) - 1


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
    features: NDArray[np.float32]  # [piece, BEST, FEATURES]


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
    _look(chosen, pieces, sets, by.k, num_classes, chance, found)
    return found


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


@kernel
def _look(
    chosen: ChosenKmers, pieces: Pieces, sets: KmerSets, k: int, num_classes: int, chance: float, found: Hits
) -> None:
    kmers, places, table, starts, members = chosen.kmers, chosen.places, sets.table, sets.starts, sets.members
    bits, every = sets.form[0], sets.form[1]
    low = (1 << bits) - 1
    hits, alone, covered = np.zeros(num_classes), np.zeros(num_classes), np.zeros(num_classes)
    weight, end = np.zeros(num_classes), np.zeros(num_classes, np.int64)
    touched = np.empty(num_classes, np.int64)
    entries = np.empty(1024, np.int32)
    for piece in range(pieces.read.size):
        read, begin, stop = pieces.read[piece], pieces.begin[piece], pieces.end[piece]
        first = chosen.starts[read]
        last = chosen.starts[read + 1] if read + 1 < chosen.starts.size else kmers.size
        while first < last and places[first] < begin:
            first += 1
        while last > first and places[last - 1] + k > stop:
            last -= 1
        if last - first > entries.size:
            entries = np.empty(2 * (last - first), np.int32)
        gap, key, hidden = pieces.gap[piece], pieces.key[piece], pieces.hidden[piece]
        mutated = begin - 1  # the first mutated base that is not passed
        num_touched = total = known = 0
        for i in range(first, last):  # nothing depends on what is loaded, so that loads overlap
            entries[i - first] = table[slot_of(kmers[i], table.size)]
        for i in range(first, last):
            kmer, place = kmers[i], places[i]
            if kmer & (every - 1):
                continue
            total += 1
            if gap < np.inf:
                while mutated < place:
                    key = (key * 48271) % LOW_31
                    mutated += 1 + int(-np.log(key / LOW_31) * gap)
                if mutated < place + k:
                    continue
            entry = entries[i - first]
            if entry == 0:
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
            count = 0
            for j in range(starts[number], starts[number + 1]):
                count += _member(members[j], hidden, pieces.is_tested) >= 0
            known += count > 0
            for j in range(starts[number], starts[number + 1]):
                label = _member(members[j], hidden, pieces.is_tested)
                if label < 0:
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
        best, least = found.classes[piece], _least_hits(chance * total)
        for rank in range(best.size):
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
        scale = min(1.0, LONGEST / max(stop - begin, 1))
        for rank in range(best.size):
            label = best[rank]
            if label < 0:
                break
            own, count = found.features[piece, rank], -hits[label]
            other = -hits[best[0 if rank else 1]] if rank or best[1] >= 0 else 0.0
            own[0] = np.log1p(scale * count)
            own[1] = np.log1p(scale * alone[label])
            own[2] = np.log1p(scale * (known - count))
            own[3] = np.log1p(scale * weight[label])
            own[4] = covered[label] / max(stop - begin, 1)
            own[5] = count / total
            own[6] = 1 - known / total
            own[7] = np.log1p(scale * total)
            own[8] = np.log1p(scale * other)
            own[9] = np.log1p(scale * covered[label]) / 4
            own[10] = (count - other) / (count + other)
        for j in range(num_touched):
            hits[touched[j]] = alone[touched[j]] = covered[touched[j]] = weight[touched[j]] = 0
