"""Questions and a causal language model -> traces."""
