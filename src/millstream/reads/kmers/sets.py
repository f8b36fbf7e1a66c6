"""From labelled k-mers to a table: each k-mer that was seen often enough, and the set of classes it was seen in."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from millstream.core.kernels import inlined, kernel
from millstream.core.order import mix_words
from millstream.errors import BadSetting

Numbers = NDArray[np.int64]
Small = NDArray[np.int32]
FULL, STILL_FULL = 0.75, 0.65  # of the slots of the counts; and after k-mers seen once are dropped
LOAD = 0.8  # of the slots of the table
SLOT_BYTES = 24  # of the counts, with those of the copies that are made of them
LEAST_SLOTS = 1 << 12
MOST_COUNT = 255
IS_KEPT = 1 << 8  # of an entry of the counts: seen where nothing is left out; its count is below
CLASS_SHIFT = 9
SLOT_SHIFT = 30  # of a hash: the bits above place it, those below tell it from others
THIN_BITS, TAG_BITS, ENTRY_BITS = 8, 22, 31  # of a hash: the lowest thin k-mers out, those above are its tag
MANY = 1  # the set of a k-mer of so many classes, or of so rare a set, that it says nothing
MOST_SETS, MOST_MEMBERS, LARGEST_SET = 1 << 18, 1 << 22, 64
COVERAGE = {3: 8.0, 2: 4.0}  # k-mers must be seen so often, if those that are have at least this count on average
LEAST_SHARE = 0.2  # of all that was counted: fewer are repeats
LOW_32 = 0xFFFFFFFF
SPREAD = 0x9E3779B1


class KmerSets(NamedTuple):
    """Open addressing: an entry is a tag of its k-mer and the number of its set; 0 is an empty slot.

    Set i is `members[starts[i]:starts[i + 1]]`: the number of a class, or its complement if the class has the k-mer
    only where it is left out. `form`: the bits of set numbers, one in how many k-mers is kept, how many there are.
    `kin`: the largest share of the k-mers of a class that another class has, too.
    """

    table: Small
    starts: Small
    members: Small
    form: Numbers
    kin: NDArray[np.float32]


PARTS = ("table", "starts", "members", "form", "kin")  # its fields


class KmerCounts:
    """Counts k-mers by class, in bounded memory.

    When it is full, k-mers seen once in a class are dropped if coverage is so high that most of them are errors; if
    that is not enough, every other k-mer is dropped, of all classes, until the rest fit. `expected` is how many there
    will be in all, if known: coverage is low at first.
    """

    def __init__(self, num_classes: int, memory: int, expected: int | None = None) -> None:
        self.num_classes, self.every = num_classes, 1
        self._expected, self._added = expected, 0
        self._kmers = np.zeros(max(memory // SLOT_BYTES, LEAST_SLOTS), np.int64)  # of a hash + 1; 0 is an empty slot
        self._counts = np.zeros(self._kmers.size, np.int32)
        self._used = 0

    def add(self, kmers: Numbers, labels: Numbers, is_left_out: NDArray[np.bool_] | None = None) -> None:
        """Count these hashes of k-mers, each of a read of this class."""
        codes = labels << CLASS_SHIFT | IS_KEPT
        if is_left_out is not None:
            codes[is_left_out] ^= IS_KEPT
        done, most = 0, int(FULL * self._kmers.size)
        self._added += kmers.size
        while done < kmers.size:
            more, self._used = _count(
                kmers[done:], codes[done:], self.every, self._kmers, self._counts, self._used, most
            )
            done += more
            if self._used >= most:
                self._shrink()
            if self._used >= most:
                raise BadSetting(f"kmer-exact: {self._used:,} k-mers do not fit. Set more memory=")

    def finish(self) -> KmerSets:
        """The table of all k-mers seen often enough in a class; it counts no more after that."""
        count = _gather(self._kmers, self._counts, self._least())
        kmers, classes = self._kmers[:count], self._counts[:count]
        self._kmers, self._counts, self._used = self._kmers[:0], self._counts[:0], 0
        order = np.argsort(kmers, kind="stable")
        classes, kmers = classes[order], kmers[order]
        del order
        marks = (mix_words(np.arange(2 * self.num_classes), 0, 0) >> np.uint64(2)).astype(np.int64)
        sets, starts = np.zeros(kmers.size, np.int32), np.zeros(MOST_SETS + 1, np.int32)
        members = np.empty(MOST_MEMBERS, np.int32)
        uses = np.zeros(MOST_SETS + 1, np.int64)
        num_kmers, num_sets = _intern(kmers, classes, marks, sets, starts, members, uses)
        bits = max(int(num_sets).bit_length(), ENTRY_BITS - TAG_BITS)
        table = np.zeros(max(int(num_kmers / LOAD), 1) + 1, np.int32)
        _fill(kmers[:num_kmers], sets[:num_kmers], bits, table)
        starts = starts[: num_sets + 1].copy()
        members = members[: starts[-1]].copy()
        form = np.array([bits, self.every, num_kmers], np.int64)
        return KmerSets(table, starts, members, form, _kinship(starts, members, uses, self.num_classes))

    def _least(self) -> Numbers:
        """How often a k-mer must be seen, for each class: more than once where coverage is high."""
        histogram = _histogram(self._kmers, self._counts, self.num_classes)
        counts = np.arange(MOST_COUNT + 1)
        least = np.ones(self.num_classes, np.int64)
        for number in sorted(COVERAGE):
            sums = (histogram[:, number:] * counts[number:]).sum(axis=1)
            mean = sums / np.maximum(histogram[:, number:].sum(axis=1), 1)
            is_deep = (mean >= COVERAGE[number]) & (sums >= LEAST_SHARE * (histogram * counts).sum(axis=1))
            least[is_deep] = number
        return least

    def _shrink(self) -> None:
        least = self._least()
        if self._expected:  # of errors few are seen twice, so that the rest gives the coverage so far
            histogram = _histogram(self._kmers, self._counts, self.num_classes)
            coverage = 3 * histogram[:, 3] / np.maximum(histogram[:, 2], 1) * self._expected / self._added
            least[coverage >= COVERAGE[2]] = 2
        self._used -= _drop(self._kmers, self._counts, least, self.every)
        while self._used > STILL_FULL * self._kmers.size and self.every < 1 << THIN_BITS:
            self.every *= 2
            self._used -= _drop(self._kmers, self._counts, least, self.every)


@inlined
def slot_of(kmer: int, size: int) -> int:
    """Where to look for a k-mer first in a table of this size."""
    return ((kmer >> SLOT_SHIFT) * size) >> 32


@inlined
def tag_of(kmer: int, bits: int) -> int:
    """What tells a k-mer from others in its slot, beside set numbers of this many bits."""
    return (kmer >> THIN_BITS) & ((1 << (ENTRY_BITS - bits)) - 1) & ((1 << TAG_BITS) - 1)


@inlined
def _slot_in(kmer: int, label: int, size: int) -> int:
    """The same for the counts of a class: those of one k-mer are far apart, or many classes would crowd."""
    return ((((kmer >> SLOT_SHIFT) ^ (label * SPREAD)) & LOW_32) * size) >> 32


@kernel
def _count(
    kmers: Numbers, codes: Numbers, every: int, known: Numbers, counts: Small, used: int, most: int
) -> tuple[int, int]:
    """How many of the k-mers were counted before `most` slots were in use, and how many are."""
    for i in range(kmers.size):
        kmer, label = kmers[i], codes[i] >> CLASS_SHIFT
        if kmer & (every - 1):
            continue
        slot = _slot_in(kmer, label, known.size)
        while known[slot] != 0 and (known[slot] != kmer + 1 or counts[slot] >> CLASS_SHIFT != label):
            slot += 1
            if slot == known.size:
                slot = 0
        if known[slot] == 0:
            if used >= most:
                return i, used
            known[slot] = kmer + 1
            counts[slot] = codes[i] + 1
            used += 1
        else:
            counts[slot] = (counts[slot] | (codes[i] & IS_KEPT)) + (counts[slot] & MOST_COUNT < MOST_COUNT)
    return kmers.size, used


@kernel
def _drop(known: Numbers, counts: Small, least: Numbers, every: int) -> int:
    """Empty the slots of k-mers seen once where that is not enough, and of those that are thinned out; how many."""
    dropped = slot = 0
    size = known.size
    while slot < size:
        count = counts[slot]
        is_kept = (count & MOST_COUNT > 1 or least[count >> CLASS_SHIFT] < 2) and (known[slot] - 1) & (every - 1) == 0
        if known[slot] == 0 or is_kept:
            slot += 1
            continue
        dropped += 1
        hole, at = slot, slot
        while True:  # fill the hole with the next entry that would be found there; it is looked at next
            at = at + 1 if at + 1 < size else 0
            if known[at] == 0:
                break
            home = _slot_in(known[at] - 1, counts[at] >> CLASS_SHIFT, size)
            is_behind = hole < home <= at if hole < at else hole < home or home <= at
            if not is_behind:
                known[hole], counts[hole] = known[at], counts[at]
                hole = at
        known[hole] = 0
    return dropped


@kernel
def _gather(known: Numbers, counts: Small, least: Numbers) -> int:
    """Move the k-mers seen often enough in a class to the front, each with its class as in a set; how many."""
    kept = 0
    for slot in range(known.size):
        label = counts[slot] >> CLASS_SHIFT
        if known[slot] != 0 and counts[slot] & MOST_COUNT >= least[label]:
            known[kept], counts[kept] = known[slot] - 1, label if counts[slot] & IS_KEPT else ~label
            kept += 1
    return kept


@kernel
def _histogram(known: Numbers, counts: Small, num_classes: int) -> Numbers:
    """[class, count]: the number of k-mers."""
    found = np.zeros((num_classes, MOST_COUNT + 1), np.int64)
    for slot in range(known.size):
        if known[slot] != 0:
            found[counts[slot] >> CLASS_SHIFT, counts[slot] & MOST_COUNT] += 1
    return found


@kernel
def _intern(
    kmers: Numbers, classes: Small, marks: Numbers, sets: Small, starts: Small, members: Small, uses: Numbers
) -> tuple[int, int]:
    """Sorted k-mers, one per class they are in -> each once, with the number of its set; how many of both there are.

    Sets are known by the sum of the marks of their classes. `uses`: how many k-mers have a set.
    """
    places = np.zeros(4 * MOST_SETS, np.int64)  # open addressing: mark + 1 of a set ...
    numbers = np.zeros(4 * MOST_SETS, np.int32)  # ... and its number
    num_kmers = first = 0
    num_sets = MANY + 1  # 0: no k-mer
    while first < kmers.size:
        last, mark = first, 0
        while last < kmers.size and kmers[last] == kmers[first]:
            own = classes[last]
            mark = (mark + marks[2 * own if own >= 0 else 2 * ~own + 1]) & ((1 << 62) - 1)
            last += 1
        found = MANY
        if last - first <= LARGEST_SET:
            slot = mark % places.size
            while places[slot] != 0 and places[slot] != mark + 1:
                slot = (slot + 1) % places.size
            if places[slot] != 0:
                found = numbers[slot]
            elif num_sets < MOST_SETS and starts[num_sets] + last - first <= members.size:
                begin = starts[num_sets]
                members[begin : begin + last - first] = np.sort(classes[first:last])
                starts[num_sets + 1] = begin + last - first
                places[slot], numbers[slot], found = mark + 1, num_sets, num_sets
                num_sets += 1
        kmers[num_kmers] = kmers[first]
        sets[num_kmers] = found
        uses[found] += 1
        num_kmers += 1
        first = last
    return num_kmers, num_sets


def _kinship(starts: Small, members: Small, uses: Numbers, num_classes: int) -> NDArray[np.float32]:
    classes = np.where(members < 0, ~members, members)
    order = np.argsort(classes, kind="stable")
    owners = np.repeat(np.arange(starts.size - 1), np.diff(starts))[order]  # the sets of each class
    ends = np.cumsum(np.bincount(classes, minlength=num_classes))
    kin = np.zeros(num_classes, np.float32)
    _share_most(starts, classes, uses, owners, ends, kin)
    return kin


@kernel
def _share_most(
    starts: Small, classes: Small, uses: Numbers, owners: Numbers, ends: Numbers, kin: NDArray[np.float32]
) -> None:
    shared = np.zeros(kin.size, np.int64)
    for label in range(kin.size):
        shared[:] = 0
        for at in range(ends[label - 1] if label else 0, ends[label]):
            number = owners[at]
            for j in range(starts[number], starts[number + 1]):
                shared[classes[j]] += uses[number]
        own, shared[label] = max(shared[label], 1), 0
        kin[label] = shared.max() / own


@kernel
def _fill(kmers: Numbers, sets: Small, bits: int, table: Small) -> None:
    """Put k-mers, each once, into an empty table."""
    for i in range(kmers.size):
        slot = slot_of(kmers[i], table.size)
        while table[slot] != 0:
            slot += 1
            if slot == table.size:
                slot = 0
        table[slot] = (tag_of(kmers[i], bits) << bits) | sets[i]
