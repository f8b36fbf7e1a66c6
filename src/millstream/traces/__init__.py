"""Traces: what a causal language model did on one question."""
