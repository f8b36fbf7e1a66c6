"""The engine: records by number, the order of an epoch, loading, memory and files. Knows no kind of record."""
