"""Exact k-mers: which classes have them, what a read has of them, and the classes it may be of. Without torch."""
