"""Detectors of hallucinated answers: nets, baselines, and the list of them by name."""
