"""`millstream demo`: its two halves, a fictional world of facts, and two small language models."""
