"""Every exception millstream raises on purpose; the command line prints these in one line.

MillstreamError
├── MissingExtra           a package of an extra is not installed
├── BadSetting             a setting is unknown or has a wrong value; exit code 2
├── StoreError
│   ├── NotAStore          the path is no trace store
│   ├── NewerFormat        the store was written by a newer millstream
│   ├── CorruptRecord      bytes of a record are missing or fail their CRC-32C
│   ├── CorruptShard       a shard as a whole is missing or unreadable
│   ├── SchemaMismatch     a record does not fit the store's fields
│   ├── ConfigMismatch     the store belongs to another configuration
│   ├── StoreFull          the disk refused more bytes
│   └── StoreExists        the output is already there
├── SourceError
│   ├── BadSource          an input file is broken or of another kind
│   ├── BadIndex           an index file is damaged, foreign or of a newer format
│   ├── StaleIndex         the data file changed since it was indexed
│   └── UnsafePickle       an old file asks for code to be run
├── DatasetError
│   ├── BadSplit           a split cannot be made, or its file is none
│   └── MissingLabel       records have no label
├── LoaderError
│   ├── OverBudget         one batch needs more memory than was given
│   └── StateMismatch      a saved position belongs to other data, another seed or another order
├── TrainError
│   ├── NotFinite          a loss is NaN or infinite
│   └── NoDetector         a store has no fields for the detector that was asked for
└── EngineError            a cluster cannot be reached, or its workers keep dying

DamageWarning              something is damaged, but the data could be read from its second copy
"""


class MillstreamError(Exception):
    """Base of all errors that a user can cause or has to know about."""


class MissingExtra(MillstreamError, ImportError):
    """A package that only some uses need is not installed; the message names the command that installs it."""


class BadSetting(MillstreamError, ValueError):
    """A setting is unknown, has a wrong value, or does not go with another."""


class StoreError(MillstreamError):
    """Something about a trace store."""


class NotAStore(StoreError, FileNotFoundError):
    """The path holds no trace store."""


class NewerFormat(StoreError):
    """The store was written in a format newer than this millstream reads."""


class CorruptRecord(StoreError):
    """A record's bytes are missing or fail their checksum; the message names shard, record and field."""


class CorruptShard(StoreError):
    """A whole shard is missing or unreadable."""


class SchemaMismatch(StoreError):
    """A record does not fit the store's fields; the message names field, expected and found."""


class ConfigMismatch(StoreError):
    """The store was written under another configuration."""


class StoreFull(StoreError):
    """The disk (or a quota, or a file size limit) refused more bytes; nothing already appended is lost."""


class StoreExists(StoreError):
    """The output path already holds something."""


class SourceError(MillstreamError):
    """Something about an input file."""


class BadSource(SourceError):
    """An input file is broken or of another kind than it should be."""


class BadIndex(SourceError):
    """An index file is damaged, belongs to another file or was written by a newer millstream."""


class StaleIndex(SourceError):
    """The data file is not the one that was indexed."""


class UnsafePickle(SourceError):
    """An old pickle asks for something that is not a tensor or a plain container."""


class DatasetError(MillstreamError):
    """Something about records on their way from a store to a model."""


class BadSplit(DatasetError):
    """A split cannot be made of these records, or a file is no split."""


class MissingLabel(DatasetError):
    """Records have no label; the message counts them and says how to leave them out."""


class LoaderError(MillstreamError):
    """Something about a loader."""


class OverBudget(LoaderError, MemoryError):
    """One batch needs more memory than the loader was given; the message says how much would do."""


class StateMismatch(LoaderError):
    """A saved position belongs to other data, another seed or another order; the message says what differs."""


class TrainError(MillstreamError):
    """Something about training a detector."""


class NotFinite(TrainError, ArithmeticError):
    """A loss is NaN or infinite; the message names the records of the batch."""


class NoDetector(TrainError):
    """The store has no fields for a detector that was asked for; the message says which are missing."""


class EngineError(MillstreamError):
    """A cluster cannot be reached, or its workers keep dying."""


class DamageWarning(UserWarning):
    """Damage was found and worked around; run `millstream verify` and `millstream repair`."""
