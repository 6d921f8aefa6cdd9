"""The training loop, its run folder, guards, launcher, sampling."""
