"""Reading and writing files: safetensors in pieces, refusals, folders of steps."""
