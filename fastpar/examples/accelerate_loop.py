"""accelerate launch accelerate_loop.py [--stock]: a patched GPT-2, AdamW that clips itself."""

import sys

import torch
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel

import fastpar


def main(stock: bool = False) -> list[float]:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    if stock:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    else:
        fastpar.patch(model, fused_loss=True)
        optimizer = fastpar.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    tokens = torch.randint(256, (64, 64), generator=torch.Generator().manual_seed(1))
    accelerator = Accelerator(gradient_accumulation_steps=2)
    loader, losses = torch.utils.data.DataLoader(tokens, batch_size=4), []
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=x, labels=x).loss
            accelerator.backward(loss)
            if stock and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(main("--stock" in sys.argv))
