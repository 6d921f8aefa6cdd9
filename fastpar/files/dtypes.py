"""The number formats of tensors, and their names here, in safetensors and in transformers."""

import torch

FLOATS = {  # of weights and gradients
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
DTYPES = {**FLOATS, "int8": torch.uint8}  # moments may also be codes of 8 bits
# safetensors' names, in the order in which it stores tensors: by alignment, then by name.
STORED = {
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in STORED.items()}
HF_NAMES = {FLOATS[name]: str(FLOATS[name]).removeprefix("torch.") for name in list(FLOATS)[:3]}
