"""Tables as a kind of record: the rows of Parquet, JSON lines and CSV files, by number and without conversion."""
