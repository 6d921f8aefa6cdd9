"""torchrun --nproc-per-node 2 torchrun_loop.py runs/mine: sharded, saved, resumed on any ranks."""

import sys
from pathlib import Path

import torch

import fastpar
from fastpar.kernels import make_key


def main(folder: str, zero_stage: int = 2, steps: int = 8) -> list[float]:
    torch.manual_seed(0)  # the same weights on all ranks
    mesh = fastpar.Mesh()  # all ranks of torchrun; alone: one process
    config = fastpar.GPTConfig(vocab_size=256, block_size=64, n_embd=64, n_layer=2, n_head=4)
    model = fastpar.parallelize(fastpar.GPT(config), mesh, zero_stage=zero_stage)
    opt = fastpar.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, max_grad_norm=1.0)
    latest, done, losses = Path(folder, "latest"), 0, []
    if latest.exists():
        done = fastpar.load_checkpoint(latest, model=model, optimizer=opt)["step"]
    saver = fastpar.Saver(folder, model=model, optimizer=opt)
    tokens = torch.randint(256, (64, 65), generator=torch.Generator().manual_seed(1))
    for step in range(done + 1, steps + 1):
        batch = tokens[8 * (step - 1) % 64 :][:8]  # [8, T + 1], of which each rank has its part
        mine = batch.chunk(mesh.dp_size)[mesh.dp_rank].to(mesh.device)
        key = make_key(seed=step, first_sample=mesh.dp_rank * len(mine))  # dropout of one process
        loss = model(mine[:, :-1], mine[:, 1:], rng_key=key)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
        if step % 4 == 0:
            saver.save(step, {})
    saver.settle()
    return losses


if __name__ == "__main__":
    print(main(sys.argv[1]))
