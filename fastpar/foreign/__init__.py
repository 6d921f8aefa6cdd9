"""Foreign models (transformers, nanoGPT): their parts found, checked and replaced."""
