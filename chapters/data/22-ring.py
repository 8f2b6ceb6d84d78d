"""One process of the ring in chapter 22: `python 22-ring.py RANK WORLD FOLDER`, or all at once by torchrun.

    torchrun --nproc-per-node 4 22-ring.py FOLDER

Reads FOLDER/inputs.pt, which the chapter writes, and leaves FOLDER/RANK.pt.
"""

import math
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import matchkernel as mk
from matchkernel.distributed import RingError, deal, positions

Tensor = torch.Tensor
VICTIM = 2


def ring(q, k, v, rank, world):
    out, L, trace = torch.zeros_like(v), torch.full((len(q),), -math.inf, dtype=q.dtype), []
    block = torch.cat([k, v], dim=-1)
    for step in range(world):
        if step < world - 1:
            coming = torch.empty_like(block)
            sending = dist.isend(block, (rank + 1) % world)
            receiving = dist.irecv(coming, (rank - 1) % world)
        k, v = block.chunk(2, dim=-1)
        scores = q @ k.T / q.shape[-1] ** 0.5
        part, part_L = scores.softmax(dim=-1) @ v, scores.logsumexp(dim=-1)
        out = torch.lerp(out, part, torch.sigmoid(part_L - L)[:, None])
        L = torch.logaddexp(L, part_L)
        trace.append({"k": k, "max": scores.amax(dim=-1), "part": part_L, "so far": L})
        if step < world - 1:
            sending.wait()
            receiving.wait()
            block = coming
    return out, trace


def shards(whole: dict[str, Tensor], rank: int, world: int) -> dict[str, Tensor]:
    return {name: x.chunk(world, dim=-2)[rank] for name, x in whole.items()}


def library(whole: dict[str, Tensor], rank: int, world: int) -> dict[str, object]:
    """Output and gradients by mk.Ring: shards as they follow one another, and dealt in causal order."""
    found: dict[str, object] = {}
    place = positions(whole["q"].shape[-2], rank, world)
    dealt = {name: deal(x, rank, world) for name, x in whole.items()}
    options = {"causal": True, "query_position": place, "key_position": place}
    for name, mine, more in (("contiguous", shards(whole, rank, world), {}), ("dealt", dealt, options)):
        engine = mk.Ring(timeout=60)
        inputs = [mine[x].detach().requires_grad_() for x in "qkv"]
        out = mk.attend(*inputs, engine=engine, **more)
        forward = engine.sent
        gradients = torch.autograd.grad(out, inputs, mine["dO"])
        found[name] = {"out": out.detach(), "gradients": gradients}
        found[f"{name}, bytes"] = forward, engine.sent - forward
    return found


def messages(world: int) -> dict[tuple[str, int], int]:
    """Bytes that this rank sends in one forward pass over n tokens: 4 heads of width 16, float32."""
    found = {}
    for n in (256, 1024, 4096):
        for name, kernel in (("keys and values", None), ("state", mk.EluFeatures())):
            engine, x = mk.Ring(timeout=60), torch.zeros(4, n // world, 16)
            mk.attend(x, x, x, kernel, engine=engine)
            found[name, n] = engine.sent
    return found


def until_one_dies(rank: int) -> tuple[str, float]:
    """What this rank hears when another is killed between two calls, and after how many seconds of its last call."""
    x = torch.ones(1, 8, 4)
    try:
        while True:
            start = time.monotonic()
            mk.attend(x, x, x, engine=mk.Ring(timeout=5))
            if rank == VICTIM:
                time.sleep(1.0)  # by then the others are waiting in their next call
                os.kill(os.getpid(), signal.SIGKILL)
    except RingError as error:
        return str(error), time.monotonic() - start


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        rank, world, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(sys.argv[1])
    else:
        rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{folder.resolve()}/store", rank=rank, world_size=world)
    whole = torch.load(folder / "inputs.pt")
    mine = shards(whole, rank, world)
    out, trace = ring(mine["q"], mine["k"], mine["v"], rank, world)
    found = {"out": out, "trace": trace, "library": library(whole, rank, world), "messages": messages(world)}
    torch.save(found, folder / f"{rank}.pt")
    torch.save(until_one_dies(rank), folder / f"{rank}.error.pt")
    # A group with a dead member cannot be taken down in an orderly way.
    os._exit(0)
