"""Every exception millstream raises on purpose; the command line prints these in one line.

MillstreamError
├── MissingExtra           a package of an extra is not installed
├── BadSetting             a setting is unknown or has a wrong value; exit code 2
├── StoreError
│   ├── NotAStore          the path is not a trace store
│   ├── NewerFormat        the store was written by a newer millstream
│   ├── CorruptRecord      bytes of a record are missing or fail their CRC-32C
│   ├── CorruptShard       a shard as a whole is missing or unreadable
│   ├── SchemaMismatch     a record does not fit the store's fields
│   ├── ConfigMismatch     the store belongs to another configuration
│   ├── StoreFull          the disk refused more bytes
│   └── StoreExists        the output already exists
├── SourceError
│   ├── BadSource          an input file is damaged or not of the expected kind
│   ├── BadIndex           an index file is damaged, foreign or of a newer format
│   ├── StaleIndex         the data file changed since it was indexed
│   └── UnsafePickle       an old file would run code
├── DatasetError
│   ├── BadSplit           a split cannot be made, or a file is not a split
│   └── MissingLabel       records have no label
├── LoaderError
│   ├── OverBudget         one batch needs more than the memory budget
│   └── StateMismatch      a saved state belongs to other data, another seed or another order
├── TrainError
│   ├── NotFinite          a loss is NaN or infinite
│   └── MissingFields      the records lack fields that a model needs
│       └── NoDetector     the store lacks fields that a detector needs
├── RemoteError            a server gives no usable answer, or something needs a local path
│   ├── ObjectMissing      there is no such object
│   ├── ObjectChanged      an object was replaced while it was being read
│   └── AccessDenied       the server refuses the credentials
└── EngineError            a cluster cannot be reached, or its workers keep dying

DamageWarning              something is damaged, but a second copy of the data was read
"""


class MillstreamError(Exception):
    """Base of all errors that users can cause or need to know about."""


class MissingExtra(MillstreamError, ImportError):
    """An optional package is not installed; the message has the command that installs it."""


class BadSetting(MillstreamError, ValueError):
    """A setting is unknown, has a wrong value, or conflicts with another."""


class StoreError(MillstreamError):
    """Something about a trace store."""


class NotAStore(StoreError, FileNotFoundError):
    """The path is not a trace store."""


class NewerFormat(StoreError):
    """The store was written in a newer format than this version of millstream reads."""


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
    """The output already exists."""


class SourceError(MillstreamError):
    """Something about an input file."""


class BadSource(SourceError):
    """An input file is damaged or not of the expected kind."""


class BadIndex(SourceError):
    """An index file is damaged, belongs to another file or was written by a newer millstream."""


class StaleIndex(SourceError):
    """The data file is not the one that was indexed."""


class UnsafePickle(SourceError):
    """An old pickle contains something other than tensors and plain containers."""


class DatasetError(MillstreamError):
    """Something about records on their way from a store to a model."""


class BadSplit(DatasetError):
    """A split cannot be made of these records, or a file is not a split."""


class MissingLabel(DatasetError):
    """Records have no label; the message has their number and says how to leave them out."""


class LoaderError(MillstreamError):
    """Something about a loader."""


class OverBudget(LoaderError, MemoryError):
    """One batch needs more than the loader's memory budget; the message says how much."""


class StateMismatch(LoaderError):
    """A saved state belongs to other data, another seed or another order; the message says what differs."""


class TrainError(MillstreamError):
    """Something about training a model."""


class NotFinite(TrainError, ArithmeticError, ValueError):
    """A loss or an input is NaN or infinite; the message names the records."""


class MissingFields(TrainError):
    """The records lack fields that a model needs; the message names them."""


class NoDetector(MissingFields):
    """The store lacks fields that a detector needs; the message names them."""


class RemoteError(MillstreamError):
    """A server gives no usable answer, or something that needs a local path was given a URL."""


class ObjectMissing(RemoteError, FileNotFoundError):
    """There is no such object, or no such bucket."""


class ObjectChanged(RemoteError):
    """An object was replaced while it was being read."""


class AccessDenied(RemoteError):
    """The server refuses the credentials: they are wrong, expired or not enough."""


class EngineError(MillstreamError):
    """A cluster cannot be reached, or its workers keep dying."""


class DamageWarning(UserWarning):
    """Damage was found, but a second copy was read; run `millstream verify` and `millstream repair`."""
