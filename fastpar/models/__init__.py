"""GPT-2, and weights of transformers and nanoGPT in and out."""
