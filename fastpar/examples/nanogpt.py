"""nanoGPT's train.py, as it is, with fused layers and fastpar.AdamW.

In a checkout of nanoGPT: python nanogpt.py config/train_shakespeare_char.py --device=cpu ...
The same by hand are three lines in train.py, after `optimizer = ...`:

    import fastpar
    fastpar.patch(model, fused_loss=True)
    optimizer = fastpar.AdamW(optimizer.param_groups, lr=learning_rate, betas=(beta1, beta2))
"""

import runpy
import sys

import fastpar

sys.path.insert(0, ".")
from model import GPT  # nanoGPT's

torch_adamw = GPT.configure_optimizers


def configure_optimizers(model, weight_decay, learning_rate, betas, device_type):
    print(fastpar.patch(model, fused_loss=True))
    groups = torch_adamw(model, weight_decay, learning_rate, betas, device_type).param_groups
    return fastpar.AdamW(groups, lr=learning_rate, betas=betas)


GPT.configure_optimizers = configure_optimizers
if __name__ == "__main__":
    sys.argv = ["train.py", *sys.argv[1:]]
    runpy.run_path("train.py", run_name="__main__")
