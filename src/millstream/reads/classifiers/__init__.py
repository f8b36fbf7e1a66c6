"""Read classifiers: k-mer models and nets, and the list of them by name."""
