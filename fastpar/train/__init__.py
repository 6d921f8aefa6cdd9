"""Training loop, run folder, guards, launcher, text generation."""
