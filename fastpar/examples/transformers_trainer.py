"""transformers' Trainer with a patched GPT-2, the loss without logits and fastpar.AdamW.

python transformers_trainer.py            --stock: the same without fastpar
"""

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import fastpar


def main(stock: bool = False, **settings) -> Trainer:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=0))
    tokens = torch.randint(256, (64, 64), generator=torch.Generator().manual_seed(1))
    given = {"max_steps": 8, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    given |= {"learning_rate": 1e-3, "weight_decay": 0.1, "logging_steps": 1, **settings}
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), save_strategy="no", report_to="none", **given
    )
    optimizer = None  # the Trainer makes torch's
    if not stock:
        fastpar.patch(model, fused_loss=True)
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        vectors = [p for p in model.parameters() if p.dim() < 2]  # biases and norms: no decay
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0}]
        optimizer = fastpar.AdamW(groups, lr=arguments.learning_rate)
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer, None))
    trainer.train()
    return trainer


if __name__ == "__main__":
    main("--stock" in sys.argv)
