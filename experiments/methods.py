"""A row for every method of the library, made by running it: python experiments/methods.py, half a minute of one core.

It writes chapters/data/23-methods.json, the two tables of chapter 23: what an engine, a feature map or a state update
does with the scaled dot product's queries and keys, and what each kernel costs. Nothing in a row is typed in by hand:
  exact      it gives what its own definition gives, computed densely or token by token in float64; `rounding` is by
             how much it missed. False where the only definition is the attention that it approximates.
  softmax    |out − softmax attention| / |softmax attention| over the second half of the tokens, of one head; the median
             over the heads of `real` and of `random` inputs, with what is learned as it starts. Real: all 270 heads of
             SmolLM2 over 256 tokens of Alice, as in chapter 19. Random: standard normal numbers, 9 heads.
  flops      multiplications and additions at n = 4096, one head, d = 64, from `explain`; of `linear_attention` torch's
             own count of its matrix products
  bytes      the most held beside the inputs there, from `explain`; `growth` is the power of n by which it grows up to
             n = 16384, with parameters of the method kept
  causal     True where a changed future changes nothing before it; otherwise the reason for which it is refused
  decoding   what a token at a time needs to give what the parallel form gives: a "state" of fixed size, a "window",
             that is a fixed number of keys, a "cache" of all keys; `held` is its bytes per head at n = 4096, float32
  trains     gradients of q, k, v are finite and not 0; `parameters` is how many numbers it learns
With --check nothing is written: everything but the last digits must come out again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from bookkit.environment import pin

pin()  # before torch loads: the numbers are those of the chapters' own environment

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.functional import normalize  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import matchkernel as mk  # noqa: E402
from bookkit.paths import ROOT  # noqa: E402
from matchkernel.dissect import load  # noqa: E402

STORE = ROOT / "chapters" / "data" / "23-methods.json"
ALICE = ROOT / "chapters" / "data" / "11-texts.json"
HEADS, TOKENS, WIDTH = 9, 256, 64
LONG = 4096
SEEN = 32
"""Keys per query, landmarks and mixed keys of the methods that choose or shrink."""
Triple = tuple[Tensor, Tensor, Tensor]
Run = Callable[..., Tensor]


@dataclass(frozen=True)
class Method:
    """One row: how to run it, and what it is held against."""

    kind: str
    """engine, features or update."""
    make: Callable[[int], Any]
    """The engine, kernel or update for n tokens, drawn from the same seed every time."""
    options: dict[str, Any] = field(default_factory=dict)
    """What else the call of `attend` takes."""
    mask: Callable[[Any, int], Tensor] | None = None
    """Who meets whom, bool (n, n), where the engine's own arguments say so."""
    defined: Callable[[Any, Triple, bool], Tensor] | None = None
    """Its own definition in float64, where it is neither the reference's for the same call nor a mask."""
    approximates: bool = False
    """Whether its only definition is the attention that it stands for."""


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# The methods.


def best_keys(engine: Any, x: Triple, causal: bool) -> Tensor:
    """Full attention with every score but the k best of each row hidden."""
    scores = mk.scores(*x[:2], causal=causal)
    ranked = scores if engine.by is None else mk.scores(*x[:2], engine.by, causal=causal)
    worst = ranked.topk(engine.k, dim=-1).values[..., -1:]
    return mk.attend(*x, causal=causal, mask=ranked >= worst, engine="reference")


def same_bucket(engine: Any, x: Triple, causal: bool) -> Tensor:
    """Full attention with every key hidden that has another hash than the query."""
    return mk.attend(*x, causal=causal, mask=engine.mask(*x[:2], causal), engine="reference")


def bigbird(n: int) -> mk.BlockPattern:
    return mk.BlockPattern.bigbird(n, 8, window=3, global_blocks=1, random=1, generator=generator())


@cache
def alone() -> Any:
    """A process group of this process."""
    from torch import distributed

    if not distributed.is_initialized():
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    return distributed.group.WORLD


def low_rank_indexer() -> mk.MatchKernel:
    """A bilinear form of rank 16, with an identity of which the first 16 numbers of each token are left."""
    kernel = mk.Bilinear(WIDTH, rank=16, generator=generator())
    with torch.no_grad():
        for parameter in kernel.parameters():
            parameter.copy_(torch.eye(*parameter.shape))
    return kernel.double()


ENGINES: dict[str, Method] = {
    "reference": Method("engine", lambda n: "reference"),
    "fused": Method("engine", lambda n: "fused"),
    "tiled": Method("engine", lambda n: mk.Tiled(compile=False)),
    "window": Method(
        "engine", lambda n: mk.Sparse(), {"window": SEEN}, lambda engine, n: engine.mask(n, n, SEEN, causal=True)
    ),
    "dilated window": Method(
        "engine",
        lambda n: mk.Sparse(dilation=2),
        {"window": SEEN},
        lambda engine, n: engine.mask(n, n, SEEN, causal=True),
    ),
    "window and sinks": Method(
        "engine",
        lambda n: mk.Sparse(sinks=4),
        {"window": SEEN - 4},
        lambda engine, n: engine.mask(n, n, SEEN - 4, causal=True),
    ),
    "blocks (BigBird)": Method(
        "engine", lambda n: mk.Blocks(bigbird(n)), {}, lambda engine, n: engine.pattern.mask(n).tril()
    ),
    "top k": Method("engine", lambda n: mk.TopK(SEEN), defined=best_keys),
    "top k, indexed": Method("engine", lambda n: mk.TopK(SEEN, by=low_rank_indexer()), defined=best_keys),
    "LSH": Method("engine", lambda n: mk.LSH(max(2, n // SEEN // 2 * 2), generator=generator()), defined=same_bucket),
    "ring, one process": Method("engine", lambda n: mk.Ring(alone())),
    "Nyström": Method("engine", lambda n: mk.Nystrom(landmarks=SEEN), approximates=True),
    "Linformer": Method("engine", lambda n: mk.Linformer(n, SEEN, generator=generator()).double(), approximates=True),
}

FEATURES: dict[str, Method] = {
    "elu + 1": Method("features", lambda n: mk.EluFeatures()),
    "FAVOR+, 256": Method("features", lambda n: mk.FavorFeatures(WIDTH, 256, generator=generator())),
    "hyperbolic, 128": Method("features", lambda n: mk.HyperbolicFeatures(WIDTH, 128, generator=generator())),
    "trigonometric, 256": Method("features", lambda n: mk.TrigonometricFeatures(WIDTH, 256, generator=generator())),
    "Fourier, 256": Method("features", lambda n: mk.FourierFeatures(WIDTH, 256, 8.0**0.5, generator=generator())),
    "Taylor": Method("features", lambda n: mk.TaylorFeatures()),
    "polynomial": Method("features", lambda n: mk.PolynomialFeatures()),
    "cosFormer": Method("features", lambda n: mk.CosFeatures(n)),
    "DPFP-1": Method("features", lambda n: mk.DPFPFeatures()),
    "Hedgehog": Method("features", lambda n: mk.HedgehogFeatures(WIDTH)),
}

UPDATES: dict[str, Method] = {
    "sum": Method("update", lambda k: None),
    "decay": Method("update", lambda k: mk.Decay(0.97)),
    "gates": Method("update", lambda k: mk.Gates(-(k * k).mean(-1, keepdim=True) / 16)),
    "delta rule": Method("update", lambda k: mk.DeltaRule(k[..., 0].sigmoid())),
    "gated delta rule": Method("update", lambda k: mk.GatedDeltaRule(-(k * k).mean(-1) / 16, k[..., 0].sigmoid())),
}
"""On elu + 1 features; gates and steps are functions of the key, as a model's are functions of the token."""

METHODS = ENGINES | FEATURES | {f"elu + 1, {name}": method for name, method in UPDATES.items()}

KERNELS: dict[str, Callable[[], mk.MatchKernel]] = {
    "dot": mk.Dot,
    "scaled dot": mk.ScaledDot,
    "cosine": lambda: mk.Cosine(nn.Parameter(torch.tensor([0.2]))),
    "bilinear": lambda: mk.Bilinear(WIDTH, generator=generator()),
    "bilinear, rank 8": lambda: mk.Bilinear(WIDTH, rank=8, generator=generator()),
    "additive, 64": lambda: mk.Additive(WIDTH, 64, generator=generator()),
    "Gaussian": lambda: mk.Gaussian(nn.Parameter(torch.tensor([3.0]))),
    "Laplacian": lambda: mk.Laplacian(nn.Parameter(torch.tensor([30.0]))),
    "rational quadratic": lambda: mk.RationalQuadratic(1.0, nn.Parameter(torch.tensor([3.0]))),
    "dot + ALiBi": lambda: mk.ScaledDot() + mk.ALiBi(1),
    "rotary": lambda: mk.Rotary(WIDTH),
    "dot + relative bias": lambda: mk.ScaledDot() + mk.RelativeBias(1, generator=generator()),
    "dot, capped": lambda: mk.Softcap(mk.ScaledDot(), 20.0),
    "mixture": lambda: mk.mixture(mk.ScaledDot(), mk.Gaussian(3.0), log_weights=nn.Parameter(torch.zeros(2))),
}


def attended(method: Method, made: Any, x: Triple, **how: Any) -> Tensor:
    """The output of a method for q, k, v; an update is causal by itself."""
    if method.kind == "update":
        return stepped(made, x)[0]
    if method.kind == "features":
        return mk.attend(*x, made, engine=mk.Linear(chunk=64), **how)
    return mk.attend(*x, engine=made, **method.options | how)


def stepped(make_update: Any, x: Triple, state: mk.LinearState | None = None) -> tuple[Tensor, mk.LinearState]:
    """Linear attention with an update made of these keys. A delta rule is given features of unit length."""
    q, k, v = x
    update = make_update(k)
    if update is None or not update.corrects:
        return mk.linear_attention(q, k, v, mk.EluFeatures(), update, state=state)
    q, k = (normalize(torch.where(y > 0, y + 1, y.clamp(max=0).exp()), dim=-1) for y in (q, k))
    return mk.linear_attention(q, k, v, update=update, state=state)


def made_for(method: Method, n: int, dtype: torch.dtype = torch.float64) -> Any:
    """The engine, kernel or way to make an update for n tokens."""
    if method.kind == "update":
        return method.make
    made = method.make(n)
    return made.to(dtype) if isinstance(made, nn.Module) else made


# What is measured.


@cache
def real() -> Triple:
    """Queries, keys and values of a trained decoder, as they meet: (layers × HEADS, TOKENS, WIDTH), float64."""
    model = load("smollm2")
    text = "\n\n".join(json.loads(ALICE.read_text(encoding="utf-8"))["alice"])
    reading = model.read(model.from_ids(model.tokenize(text).ids[:TOKENS].tolist()))
    q, k, v = (x.flatten(0, 1).double() for x in (reading.queries, reading.keys, reading.values))
    return q, k, v


@cache
def random() -> Triple:
    """Standard normal numbers, as many as one layer has."""
    q, k, v = torch.randn(3, HEADS, TOKENS, WIDTH, generator=generator(1), dtype=torch.float64)
    return q, k, v


def short(x: Triple, n: int) -> Triple:
    return x[0][..., :n, :], x[1][..., :n, :], x[2][..., :n, :]


def apart(out: Tensor, truth: Tensor) -> float:
    return ((out - truth).norm() / truth.norm()).item()


@torch.no_grad()
def distances(method: Method, x: Triple, causal: bool) -> Tensor:
    """How far from softmax attention each head is, over the second half of its tokens, a layer's heads at a time."""
    made, found = made_for(method, TOKENS), []
    for some in zip(*(y.split(HEADS) for y in x), strict=True):
        truth = mk.attend(*some, causal=causal)
        missed = attended(method, made, some, causal=causal) - truth
        found.append(torch.div(*(y[:, TOKENS // 2 :].flatten(1).norm(dim=-1) for y in (missed, truth))))
    return torch.cat(found)


def order(method: Method) -> tuple[bool, str | None]:
    """Whether it keeps a causal order, and why it refuses one."""
    x, n = random(), TOKENS
    made = made_for(method, n)
    try:
        before = attended(method, made, x, causal=True)
    except ValueError as refusal:
        return False, str(refusal).partition("cannot run this call: ")[2]
    cut = n // 2 + 3
    later = tuple(torch.cat([y[..., :cut, :], 30.0 * y[..., cut:, :].flip(-2)], dim=-2) for y in x)
    after = attended(method, made, later, causal=True)  # type: ignore[arg-type]
    moved = (after - before)[..., :cut, :].abs().max().item()
    assert moved <= 1e-12 * before.abs().max().item(), f"the future leaks: {moved:.2g}"
    return True, None


def own_definition(method: Method, causal: bool) -> float | None:
    """By how much it misses what it says it computes, on the random inputs; None for what only approximates."""
    if method.approximates:
        return None
    x = short(random(), 96)
    made = made_for(method, 96)
    out = attended(method, made, x, causal=causal)
    if method.mask is not None:
        truth = mk.attend(*x, causal=causal, mask=method.mask(made, 96), engine="reference")
    elif method.defined is not None:
        truth = method.defined(made, x, causal)
    elif method.kind == "update":
        truth = token_by_token(made, x)
    elif method.kind == "features":
        truth = mk.attend(*x, made, causal=causal, engine="reference")
    else:
        truth = mk.attend(*x, causal=causal, engine="reference", **method.options)
    return apart(out, truth)


def token_by_token(make_update: Any, x: Triple) -> Tensor:
    state, rows = None, []
    for token in zip(*(y.split(1, dim=-2) for y in x), strict=True):
        row, state = stepped(make_update, token, state)
        rows.append(row)
    return torch.cat(rows, dim=-2)


def decoding(method: Method, causal: bool) -> tuple[str | None, int | None]:
    """What a token at a time needs, found by trying: a state, a fixed number of keys, all keys."""
    if not causal:
        return None, None
    n = 96
    x = short(random(), n)
    made = made_for(method, n)
    last = attended(method, made, x, causal=True)[..., -1:, :]
    before, step = short(x, n - 1), (x[0][..., -1:, :], x[1][..., -1:, :], x[2][..., -1:, :])
    if method.kind == "engine":
        kept = torch.ones(n, dtype=torch.bool) if method.mask is None else needed(method, n)
        k, v = (y[..., kept, :] for y in x[1:])
        if method.mask is None:
            again = attended(method, made, (step[0], k, v), causal=True)
        else:
            again = mk.attend(step[0], k, v, mask=method.mask(made, n)[-1, kept])
        fixed = method.mask is not None and len({int(needed(method, m).sum()) for m in range(n, 2 * n, 16)}) == 1
        what, held = ("window", int(kept.sum())) if fixed else ("cache", LONG)
        held *= 2 * WIDTH * 4
    else:
        if method.kind == "update":
            _, state = stepped(made, before)
            again = stepped(made, step, state)[0]
        else:
            _, state = mk.linear_attention(*before, made)
            again = mk.linear_attention(*step, made, state=state)[0]
        what, held = "state", state.nbytes // state.memory.shape[0] * 4 // state.memory.element_size()
    assert apart(again, last) < 1e-9, "a token at a time gives something else"
    return what, held


def needed(method: Method, n: int) -> Tensor:
    """Which of the first n keys the n-th query or one after it sees, bool (n,)."""
    assert method.mask is not None
    return method.mask(made_for(method, TOKENS), TOKENS)[n - 1 :, :n].any(dim=0)


def trains(method: Method, causal: bool) -> bool:
    """Whether gradients reach q, k, v: finite, and not all 0."""
    x = tuple(y.clone().requires_grad_() for y in short(random(), 96))
    attended(method, made_for(method, 96), x, causal=causal).square().sum().backward()  # type: ignore[no-untyped-call, arg-type]
    return all(y.grad is not None and bool(y.grad.isfinite().all() and (y.grad != 0).any()) for y in x)


def costs(method: Method, causal: bool) -> dict[str, Any]:
    """Operations and bytes at LONG, and the power of n with which the bytes grow."""

    def at(n: int) -> tuple[int | None, int | None]:
        x = tuple(torch.empty(1, n, WIDTH) for _ in range(3))
        if method.kind == "update":
            if n > LONG:
                return None, None
            x = tuple(torch.randn(3, 1, n, WIDTH, generator=generator()))
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                attended(method, method.make, x)
            return counter.get_total_flops(), None
        made = made_for(method, n, torch.float32)
        how = {"kernel": made, "engine": mk.Linear()} if method.kind == "features" else {"engine": made}
        said = mk.explain(*x, causal=causal, **method.options | how)
        return said.flops, said.peak_bytes

    (flops, held), (_, later) = at(LONG), at(4 * LONG)
    growth = None if held is None or later is None else round(math.log2(later / held) / 2, 2)
    return {"flops": flops, "bytes": held, "growth": growth}


def parameters(module: object) -> int:
    return sum(p.numel() for p in module.parameters()) if isinstance(module, nn.Module) else 0


INPUTS: dict[str, Callable[[], Triple]] = {"real": real, "random": random}


def row(method: Method, inputs: tuple[str, ...] = tuple(INPUTS)) -> dict[str, Any]:
    """One row of the table of methods; how far it is from softmax attention on some of the inputs."""
    causal, refused = order(method)
    missed = own_definition(method, causal)
    distance = {name: distances(method, INPUTS[name](), causal).quantile(0.5).item() for name in inputs}
    what, held = decoding(method, causal)
    return {
        "kind": method.kind,
        "exact": missed is not None and missed < 1e-9,
        "rounding": missed,
        "softmax": distance,
        **costs(method, causal),
        "causal": causal,
        "refused": refused,
        "decoding": what,
        "held": held,
        "trains": trains(method, causal),
        "parameters": parameters(made_for(method, LONG)),
    }


def kernel_row(kernel: mk.MatchKernel) -> dict[str, Any]:
    """What a kernel costs: who computes it in causal order, and the operations and bytes that `explain` counts."""
    x = tuple(torch.empty(1, LONG, WIDTH) for _ in range(3))
    said = mk.explain(*x, kernel, causal=True)
    return {
        "engine": said.engine,
        "exact": said.exact,
        "flops": said.flops,
        "bytes": said.peak_bytes,
        "flops_per_pair": kernel.flops_per_pair(WIDTH, WIDTH),
        "parameters": parameters(kernel),
    }


def measure() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Table, name and row, one after the other."""
    for name, method in METHODS.items():
        yield "methods", name, row(method)
    for name, make in KERNELS.items():
        yield "kernels", name, kernel_row(make())


def rounded(found: Any) -> Any:
    """The same with three digits, so that another processor's last ones do not show."""
    if isinstance(found, dict):
        return {key: rounded(value) for key, value in found.items()}
    return float(f"{found:.2e}") if isinstance(found, float) else found


def disagreements(store: dict[str, Any], names: tuple[str, ...] | None = None) -> list[str]:
    """What comes out otherwise than it is stored: all rows, or those of some methods without the trained model.

    Distances may be 1 % off; rounding is not compared.
    """
    wrong = []
    some = () if names is None else (("methods", name, row(METHODS[name], ("random",))) for name in names)
    for table, name, found in measure() if names is None else some:
        kept = store[table].get(name)
        if kept is None:
            wrong.append(f"{name} has no row")
            continue
        for key, value in rounded(found).items():
            if key == "softmax":
                same = all(math.isclose(value[on], kept[key][on], rel_tol=0.01) for on in value)
            else:
                same = key == "rounding" or value == kept[key]
            if not same:
                wrong.append(f"{name}: {key} is {value} and was {kept[key]}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="A row for every method of the library.")
    parser.add_argument("--check", action="store_true", help="measure again and write nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.check:
        wrong = disagreements(json.loads(STORE.read_text(encoding="utf-8")))
        print("\n".join(wrong) or f"every row of {STORE.name} came out again")
        return int(bool(wrong))
    tables: dict[str, dict[str, Any]] = {"methods": {}, "kernels": {}}
    for table, name, found in measure():
        tables[table][name] = rounded(found)
        print(name, json.dumps(rounded(found)), flush=True)
    head = {"about": (__doc__ or "").splitlines()[0], "torch": torch.__version__.partition("+")[0], "n": LONG}
    lines = [f' "{key}": {json.dumps(value)}' for key, value in head.items()]
    for title, rows in tables.items():
        inner = ",\n".join(f'  "{name}": {json.dumps(found, ensure_ascii=False)}' for name, found in rows.items())
        lines.append(f' "{title}": {{\n{inner}\n }}')
    STORE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
