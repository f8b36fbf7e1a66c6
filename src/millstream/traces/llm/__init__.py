"""Running a causal language model: prompts, generation, replay, and the activations it captures."""
