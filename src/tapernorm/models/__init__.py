"""The decoder of the paper's pre-training track, its config, cache and decoding."""
