"""FASTA and FASTQ files: containers, scanning, headers, and the index that finds a record by number."""
