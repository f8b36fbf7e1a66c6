"""Reads: sequences of FASTA and FASTQ files."""
