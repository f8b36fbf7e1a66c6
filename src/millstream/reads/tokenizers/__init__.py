"""Sequences -> token ids: bases, k-mers, BPE and Hugging Face tokenizers."""
