"""Device code and its launchers: each takes tensors and a config, and knows nothing of what is above it."""
