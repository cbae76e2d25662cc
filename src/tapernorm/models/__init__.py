"""Models of the paper."""
