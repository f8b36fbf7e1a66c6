"""Packs: reads at two bits per base in one file with random access, and how it is written and read."""
