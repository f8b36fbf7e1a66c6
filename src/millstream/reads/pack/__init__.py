"""Packed reads: a compact file format with random access, writing and reading it."""
