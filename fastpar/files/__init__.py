"""Safe reading and writing of files: JSON, safetensors, run folders."""
