"""One rank of the processes that test_ring.py starts: runs every case in groups of 1 to 4 and saves what it got."""

import contextlib
import io
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import matchkernel as mk
from matchkernel import distributed
from matchkernel.engines import _torch_private

Tensor = torch.Tensor
GROUPS = {1: [2], 2: [1, 3], 3: [0, 1, 3], 4: [0, 1, 2, 3]}
"""Which processes form the ring of each size: not always the first ones, so that ranks in the group differ."""
Index = tuple[Tensor, Tensor]


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def learned(*values: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values, dtype=torch.float64))


@dataclass(frozen=True)
class Case:
    """One call of attend on a sequence that the ranks hold in shards; `layout` says which tokens a rank has."""

    kernel: Callable[[], mk.MatchKernel | None] = lambda: None
    normalizer: Callable[[], mk.Normalizer | None] = lambda: None
    causal: bool = False
    layout: str = "contiguous"
    n: int = 23
    m: int | None = None
    dtype: torch.dtype = torch.float64
    q_lead: tuple[int, ...] = (2, 4)
    k_lead: tuple[int, ...] = (2, 2)
    size: float = 1.0
    offset: float = 0.0
    plain: bool = False
    twice: bool = False
    hidden: int = 0
    """How many of the last keys come after every query, and are NaN."""
    blind: int = 0
    """How many of the first queries come before every key, and are NaN."""
    worlds: tuple[int, ...] = (1, 2, 3, 4)

    def inputs(self) -> list[Tensor]:
        """q, k, v and the gradient of the output, of the whole sequence."""
        m = self.n if self.m is None else self.m
        shapes = (*self.q_lead, self.n, 8), (*self.k_lead, m, 8), (*self.k_lead, m, 6)
        q, k, v = (torch.randn(s, generator=generator(i), dtype=torch.float64) for i, s in enumerate(shapes))
        q, k = self.size * q + self.offset, self.size * k + self.offset
        if self.hidden:
            k[..., m - self.hidden :, :] = float("nan")
            v[..., m - self.hidden :, :] = float("nan")
        if self.blind:
            q[..., : self.blind, :] = float("nan")
        out = torch.broadcast_shapes(self.q_lead, (*self.k_lead[:-1], 1)) if self.k_lead else self.q_lead
        upstream = torch.randn((*out, self.n, 6), generator=generator(9), dtype=torch.float64)
        return [x.to(self.dtype) for x in (q, k, v, upstream)]

    def whole(self) -> dict[str, Tensor]:
        """Positions of the whole sequence, where they are not the default ones."""
        if not self.hidden:
            return {}
        m = self.n if self.m is None else self.m
        return {"query_position": torch.arange(self.n), "key_position": torch.arange(m)}

    def shard(self, rank: int, world: int) -> tuple[Index, dict[str, Tensor]]:
        """This rank's queries and keys, and their positions where attend has to be told."""
        m = self.n if self.m is None else self.m
        own = tuple(_tokens(self.layout, tokens, rank, world) for tokens in (self.n, m))
        if self.layout in ("dealt", "scrambled") or self.hidden:
            shift = 0 if self.hidden else m - self.n
            return own, {"query_position": own[0] + shift, "key_position": own[1]}
        return own, {}


def _tokens(layout: str, n: int, rank: int, world: int) -> Tensor:
    if layout == "dealt":
        return distributed.positions(n, rank, world)
    if layout == "scrambled":
        return torch.randperm(n, generator=generator(n))[n * rank // world : n * (rank + 1) // world]
    if layout == "one has none":
        # The second rank, and the only one of a ring of one has all.
        edges = [0, n, n, n, n] if world == 1 else [0, n // 3, n // 3, n // 3 + n // 2, n]
        edges = [*edges[:world], n]
        return torch.arange(edges[rank], edges[rank + 1])
    return torch.arange(n * rank // world, n * (rank + 1) // world)


def favor() -> mk.MatchKernel:
    return mk.FavorFeatures(8, 16, generator=generator())


def bilinear() -> mk.MatchKernel:
    return mk.Bilinear(8, generator=generator()).double()


TEMPERATURES = (0.5, 1.0, 2.0, 0.7)
CASES = {
    "scaled dot": Case(),
    "scaled dot, float32": Case(dtype=torch.float32),
    "scaled dot, bfloat16": Case(dtype=torch.bfloat16),
    "scaled dot, float16, dealt": Case(dtype=torch.float16, causal=True, layout="dealt"),
    "one rank has none": Case(layout="one has none"),
    "causal, contiguous": Case(causal=True),
    "causal, dealt": Case(causal=True, layout="dealt"),
    "causal, dealt, float32": Case(causal=True, layout="dealt", dtype=torch.float32),
    "causal, one rank has none": Case(causal=True, layout="one has none"),
    "causal, scrambled": Case(causal=True, layout="scrambled"),
    "causal, scrambled, more queries": Case(m=11, causal=True, layout="scrambled", blind=12),
    "scrambled, later than every query": Case(n=13, m=16, causal=True, layout="scrambled", hidden=3),
    "fewer tokens than ranks": Case(n=3, causal=True, layout="dealt"),
    "more keys": Case(n=11, m=23),
    "causal, more keys": Case(n=11, m=23, causal=True),
    "causal, more queries": Case(n=23, m=11, causal=True),
    "later than every query": Case(n=13, m=16, causal=True, hidden=3),
    "large scores": Case(size=12.0, causal=True, layout="dealt"),
    "no leading dimensions": Case(q_lead=(), k_lead=(), causal=True),
    "keys for all batches": Case(q_lead=(2, 3), k_lead=(3,)),
    "plain operations": Case(plain=True, causal=True, layout="dealt", normalizer=mk.SinkSoftmax),
    "plain operations, scrambled": Case(plain=True, causal=True, layout="scrambled", dtype=torch.float32),
    "Gaussian far away": Case(lambda: mk.Gaussian(2.0), causal=True, layout="dealt", offset=10.0),
    "Gaussian, learned": Case(lambda: mk.Gaussian(learned(1.0, 2.0, 3.0, 4.0)), lambda: mk.SinkSoftmax(learned(0.3))),
    "Rotary, dealt": Case(lambda: mk.Rotary(8), causal=True, layout="dealt"),
    "Rotary": Case(lambda: mk.Rotary(8)),
    "ALiBi": Case(lambda: mk.ScaledDot() + mk.ALiBi(4), mk.SinkSoftmax, causal=True, layout="dealt"),
    "Bilinear": Case(bilinear, causal=True),
    "negative multiple": Case(lambda: -0.5 * mk.Dot(), causal=True, layout="dealt"),
    "temperature, a number": Case(normalizer=lambda: mk.Softmax(0.5), causal=True),
    "temperature": Case(normalizer=lambda: mk.Softmax(learned(*TEMPERATURES)), causal=True, layout="dealt"),
    "scalable": Case(normalizer=lambda: mk.ScalableSoftmax(learned(*TEMPERATURES)), causal=True, layout="dealt"),
    "scalable, not causal": Case(normalizer=mk.ScalableSoftmax),
    "twice": Case(mk.Gaussian, lambda: mk.SinkSoftmax(0.3), causal=True, layout="dealt", twice=True, n=9),
    "twice, one has none": Case(bilinear, twice=True, n=9, layout="one has none"),
    "elu": Case(mk.EluFeatures),
    "elu, causal": Case(mk.EluFeatures, causal=True),
    "elu, causal, chunks": Case(mk.EluFeatures, causal=True, n=520, dtype=torch.float32, worlds=(2, 3)),
    "elu, one has none": Case(mk.EluFeatures, mk.SinkSoftmax, layout="one has none"),
    "elu, causal, one has none": Case(mk.EluFeatures, mk.SinkSoftmax, causal=True, layout="one has none"),
    "FAVOR+": Case(favor, dtype=torch.float32),
    "FAVOR+, causal, large": Case(favor, causal=True, size=8.0),
    "Fourier, signed": Case(lambda: mk.FourierFeatures(8, 64, 4.0, generator=generator()), causal=True),
    "cosFormer": Case(lambda: mk.CosFeatures(32), causal=True),
    "features, twice": Case(mk.EluFeatures, causal=True, twice=True, n=9),
}


def step(case: Case, inputs: list[Tensor], upstream: Tensor, **more: Any) -> dict[str, Tensor]:
    """Output, gradients, gradients of parameters, and where asked for derivatives of a sum of gradients."""
    kernel, normalizer = case.kernel(), case.normalizer()
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    parameters = [p for part in (kernel, normalizer) if part is not None for p in part.parameters()]
    out = mk.attend(*inputs, kernel, normalizer=normalizer, causal=case.causal, **more)
    grads = torch.autograd.grad(out, [*inputs, *parameters], upstream, create_graph=case.twice)
    found = {"out": out, **dict(zip("qkv", grads, strict=False))}
    found |= {f"parameter {i}": grad for i, grad in enumerate(grads[3:])}
    if case.twice:
        weighed = sum((grad * grad.detach().cos()).sum() for grad in grads[:3])
        found |= {f"{x} twice": grad for x, grad in zip("qkv", torch.autograd.grad(weighed, inputs), strict=True)}
    return {name: x.detach() for name, x in found.items()}


def run(case: Case, rank: int, world: int, ring: mk.Ring) -> dict[str, Tensor]:
    q, k, v, upstream = case.inputs()
    (own_q, own_k), places = case.shard(rank, world)
    inputs = [q[..., own_q, :], k[..., own_k, :], v[..., own_k, :]]
    available = _torch_private.available
    if case.plain:
        _torch_private.available = lambda device: False
    try:
        return step(case, inputs, upstream[..., own_q, :], engine=ring, **places)
    finally:
        _torch_private.available = available


def disagreements(rank: int, ring: mk.Ring) -> dict[str, str]:
    """What each rank is told where the last one calls differently."""
    x, odd = torch.randn(2, 5, 8), rank == 3
    calls: dict[str, Callable[[], object]] = {
        "width": lambda: mk.attend(*([x[..., :4] if odd else x] * 3), engine=ring),
        "heads": lambda: mk.attend(*([x[:1] if odd else x] * 3), engine=ring),
        "dtype": lambda: mk.attend(*([x.double() if odd else x] * 3), engine=ring),
        "causal": lambda: mk.attend(x, x, x, causal=odd, engine=ring),
        "kernel": lambda: mk.attend(x, x, x, mk.Gaussian() if odd else None, engine=ring),
        "normalizer": lambda: mk.attend(x, x, x, normalizer=mk.SinkSoftmax() if odd else None, engine=ring),
        "gradients": lambda: mk.attend(x.clone().requires_grad_(odd), x, x, engine=ring),
        "positions": lambda: mk.attend(x, x, x, query_position=torch.arange(5) if odd else None, engine=ring),
        "order": lambda: mk.attend(
            x, x, x, mk.EluFeatures(), causal=True, engine=ring,
            query_position=torch.arange(5) - 5 * rank, key_position=torch.arange(5) - 5 * rank,
        ),
    }  # fmt: skip
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = "no error"
        except ValueError as error:
            found[name] = str(error)
    return found


def explained(ring: mk.Ring) -> dict[str, Any]:
    """explain(), and the bytes that two lengths send."""
    found: dict[str, Any] = {}
    for name, kernel in (("dot", None), ("elu", mk.EluFeatures())):
        for n in (8, 16):
            x = torch.randn(1, 2, n, 8)
            before = ring.sent
            mk.attend(x, x, x, kernel, engine=ring)
            found[f"{name} {n}"] = ring.sent - before
        found[name] = str(mk.explain(x, x, x, kernel, causal=True, engine=ring))
    return found


def readme() -> str:
    """What the README's block prints, run as it stands there: by torchrun."""
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    block = re.search(r"<!-- ring -->\n```python\n(.*?)```", text, re.DOTALL)
    assert block, "README.md has no <!-- ring --> followed by a python block"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block[1], "README.md", "exec"), {})
    return printed.getvalue()


def begin(rank: int, world: int, folder: Path) -> None:
    import torch.distributed as dist

    store, limit = f"file://{folder}/store", timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=limit)


def everything(rank: int, folder: Path) -> None:
    import torch.distributed as dist

    found: dict[Any, Any] = {"readme": readme()}
    begin(rank, 4, folder)
    for world, members in GROUPS.items():
        group = dist.new_group(members)
        if rank not in members:
            continue
        ring = mk.Ring(group, timeout=60)
        for name, case in CASES.items():
            if world in case.worlds:
                found[world, name] = run(case, members.index(rank), world, ring)
    found["disagreements"] = disagreements(rank, mk.Ring(timeout=60))
    found["explained"] = explained(mk.Ring(timeout=60))
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def dying(rank: int, folder: Path) -> None:
    """First a rank that does not come, within a group of its own; then one that is killed from outside, in mid-step."""
    import torch.distributed as dist

    def until_it_fails(ring: mk.Ring, x: Tensor) -> str:
        try:
            while True:
                out = mk.attend(x, x, x, causal=True, engine=ring)
                out.sum().backward()
                (folder / f"{rank}.alive").touch()
        except distributed.RingError as error:
            return str(error)

    pair = dist.new_group([0, 1])
    x = torch.randn(1, 2, 256, 16).requires_grad_()
    if rank == 0:
        start = time.monotonic()
        late = until_it_fails(mk.Ring(pair, timeout=1.5), x)
        (folder / "late").write_text(f"{time.monotonic() - start} {late}")
        (folder / "0.alive").unlink(missing_ok=True)
    dist.barrier()
    said = until_it_fails(mk.Ring(timeout=3), x)
    (folder / f"{rank}.said").write_text(f"{time.time()} {said}")
    # The group is of no use any more, and closing it would wait for the dead.
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "everything":
        everything(int(os.environ["RANK"]), Path(sys.argv[2]))
    else:
        own, everybody = int(sys.argv[3]), int(sys.argv[4])
        begin(own, everybody, Path(sys.argv[2]))
        dying(own, Path(sys.argv[2]))
