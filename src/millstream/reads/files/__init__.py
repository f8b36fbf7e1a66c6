"""FASTA and FASTQ files: containers, the scanner, headers, and the index that finds a record by number."""
