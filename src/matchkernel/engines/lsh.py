"""The LSH engine: a query attends to the keys that a hash puts into its bucket, in at least one of a few rounds."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from ..hashing import HASHES, Hash
from ..lazy import lazy
from ..masks import Visibility
from . import _torch_private
from ._buckets import Round, attend_round
from ._dot_softmax import encoded, finished, fold, form, refuse, with_logsumexp
from .problem import Cost, Problem, product_flops, traffic
from .sparse import LEAST


@dataclass(frozen=True, eq=False)
class LSH:
    """Each query attends to the permitted keys that share its bucket in at least one round, and to no other.

    out_i = Σ_{j ∈ C_i} α_ij v_j,  C_i = {j : h_r(q_i) = h_r(k_j) for some r},  α_i = normalizer(s_i over C_i)

    buckets: of each round, even for the cross-polytope hash, a power of two for the sign hash. rounds: 1 by default;
    more of them find more of the close pairs, at that many times the cost. hash: "cross-polytope" (Reformer's, default)
    or "sign". generator: for the directions, drawn once when this is made and the same in every call and head.

    q and k themselves are hashed, before the kernel encodes them: direction counts, and neither length nor position. A
    pair that shares several buckets is counted once. In causal order a query sees its own key whatever the buckets say.
    The hash has no gradient; output and gradients are exact for the pairs that meet, and `mask` gives them. Reformer
    itself differs: it ties q to k, cuts the sorted tokens into chunks of one size and looks one chunk back, so that a
    large bucket loses pairs, and weighs a pair by how many rounds it was met in.
    For a DotKernel under a softmax, positions by default, masks over the keys alone.
    Cost: O(rounds · n · m (d + d_v) / buckets) time where buckets are even, O((n + m)(d + d_v + rounds d_v)) memory; a
    hash that puts everything into one bucket takes n · m time, and no table.
    Source: Kitaev, Kaiser & Levskaya 2020 (Reformer), section 2; Andoni et al. 2015 for the hash.
    """

    buckets: int
    rounds: int = 1
    hash: str = "cross-polytope"
    generator: torch.Generator | None = field(default=None, repr=False)

    name = "lsh"
    exact = False

    def __post_init__(self) -> None:
        if self.hash not in HASHES:
            raise ValueError(f"LSH(hash={self.hash!r}): expected one of {', '.join(map(repr, HASHES))}")
        if isinstance(self.rounds, bool) or not isinstance(self.rounds, int) or self.rounds < 1:
            raise ValueError(f"LSH(rounds={self.rounds!r}): expected an integer of at least 1")
        HASHES[self.hash](self.buckets)
        object.__setattr__(self, "_seed", int(torch.randint(2**62, (), generator=self.generator)))

    def hashes(self, *tensors: Tensor) -> list[Tensor]:
        """The buckets (rounds, …, tokens) of tensors (…, tokens, width), all of one width."""
        hash_of: Hash = HASHES[self.hash](self.buckets)
        seed: int = getattr(self, "_seed")  # noqa: B009
        generator = torch.Generator().manual_seed(seed)
        width = tensors[0].shape[-1]
        drawn = [hash_of.draw(width, generator) for _ in range(self.rounds)]
        with torch.no_grad():
            return [
                torch.stack([hash_of(wide, directions.to(wide)) for directions in drawn])
                for wide in (x.detach().to(torch.promote_types(x.dtype, torch.float32)) for x in tensors)
            ]

    def mask(self, q: Tensor, k: Tensor, causal: bool = False) -> Tensor:
        """Who meets whom, bool (…, n, m), for q (…, n, d) and k (…, m, d): a table, for tests and drawings."""
        if q.shape[-1] != k.shape[-1]:
            raise ValueError(f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}: expected one width for the hash")
        query, key = self.hashes(q, k)
        if q.dim() > 2 and k.dim() > 2 and k.shape[-3] not in (1, q.shape[-3]):
            key = key.repeat_interleave(q.shape[-3] // k.shape[-3], -2)
        table = (query.unsqueeze(-1) == key.unsqueeze(-2)).any(0)
        if not causal:
            return table
        n, m = table.shape[-2:]
        ahead = torch.arange(m, device=q.device) - torch.arange(m - n, m, device=q.device).unsqueeze(-1)
        return table & (ahead < 0) | (ahead == 0)

    def refuse(self, problem: Problem) -> str | None:
        place = problem.visibility
        if (reason := refuse(problem)) is not None:
            return reason
        if not with_logsumexp(problem.q.device):
            return "rounds are merged by the log-sum-exp, which only torch's private CPU call returns"
        if _torch_private.transforming():
            return "vmap, jvp and the other function transforms need plain operations"
        if problem.q.shape[-1] != problem.k.shape[-1]:
            return f"queries of width {problem.q.shape[-1]} and keys of {problem.k.shape[-1]} have no hash in common"
        if not place.aligned:
            return "positions of one's own put no order on the rows"
        if not place.by_key:
            return "the mask has a row per query"
        return None

    def declines(self, problem: Problem) -> str | None:
        return "it approximates"

    def compiles(self, problem: Problem) -> bool:
        return False

    def run(self, problem: Problem) -> Tensor:
        place = problem.visibility
        batch = (problem.batch[:-1].numel(), problem.batch[-1] if problem.batch else 1)
        query, key = self.hashes(*(fold(x, problem) for x in (problem.q, problem.k)))
        # Batch and heads as one: (rounds, batch · heads, tokens).
        query, key = query.flatten(1, 2), key.flatten(1, 2)
        allowed = place.by_mask
        keys = None if allowed is None else _every_head(allowed, problem)
        rounds = [
            Round(query[r], key[r], tuple((query[e], key[e]) for e in range(r)), place, keys, groups_of(query, key))
            for r in range(self.rounds)
        ]
        counts, seen = zip(*(round.census() for round in rounds), strict=True)
        own = _own(place, keys, len(query[0]))
        met = Met.of(place, torch.stack(counts).sum(0) + own, torch.stack(seen).any(0), problem)
        if place.causal:
            met = met.with_own(own, problem)
        q, k, v, scale = encoded(replace(problem, visibility=met))
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        bias = None if place.bias is None else _every_head(place.bias.detach(), problem).to(q.dtype)
        outs, sums = [], []
        for round, count in zip(rounds, counts, strict=True):
            out, logsumexp = attend_round(q, k, v, bias, round, scale)
            outs.append(out)
            sums.append(torch.where(count > 0, logsumexp, LEAST))
        if place.causal:
            out, logsumexp = _to_itself(q, k, v, bias, place, scale, groups_of(query, key))
            outs.append(out)
            sums.append(torch.where(own, logsumexp.to(sums[0].dtype), LEAST))
        total = torch.stack(sums).logsumexp(0)
        whole = sum(out * (part - total).exp().unsqueeze(-1) for out, part in zip(outs, sums, strict=True))
        assert isinstance(whole, Tensor)
        whole, total = (x.reshape(*batch, *x.shape[1:]) for x in (whole, total))
        return finished(whole, total, replace(problem, visibility=met))

    def cost(self, problem: Problem) -> Cost:
        place, size = problem.visibility, problem.q.element_size()
        met = self.rounds * (-(-place.keys // self.buckets) + 1) * place.queries * problem.batch.numel()
        pairs = min(problem.pairs, met)
        rows = problem.batch.numel() * place.queries
        width = max(problem.q.shape[-1], problem.v.shape[-1])
        held = rows * (width * size + 4) * (self.rounds + 1) + (problem.q.numel() + problem.k.numel()) * size
        return Cost(product_flops(replace(problem, kernel=form(problem)), pairs), traffic(problem), held)

    def reason(self, problem: Problem) -> str:
        times = "one round" if self.rounds == 1 else f"one of {self.rounds} rounds"
        return (
            f"exact for the keys that the {self.hash} hash puts into a query's bucket of {self.buckets} in {times}; "
            "others are not seen"
        )


@dataclass(frozen=True)
class Met(Visibility):
    """What a hash leaves: how many keys each query meets (…, n), and which keys are met (…, m)."""

    counts: Tensor
    seen: Tensor

    @staticmethod
    def of(place: Visibility, counts: Tensor, seen: Tensor, problem: Problem) -> Met:
        given = {f.name: getattr(place, f.name) for f in fields(Visibility)}
        return Met(**given, counts=counts.reshape(*problem.batch, -1), seen=seen.reshape(*problem.batch, -1))

    def with_own(self, own: Tensor, problem: Problem) -> Met:
        """With the keys that queries see because they are their own."""
        n, m = self.queries, self.keys
        mine = torch.zeros(own.shape[0], m, dtype=torch.bool, device=own.device)
        few = min(n, m)
        mine[:, m - few :] = own[:, n - few :]
        return replace(self, seen=self.seen | mine.reshape(*problem.batch, -1))

    @lazy
    def visible(self) -> Tensor:
        return self.counts.unsqueeze(-1)

    @lazy
    def query_sees(self) -> Tensor | None:
        return self.counts > 0

    @lazy
    def key_seen(self) -> Tensor | None:
        return self.seen


def groups_of(query: Tensor, key: Tensor) -> int:
    """How many heads of queries (rounds, heads, n) share one of keys (rounds, key heads, m)."""
    return query.shape[1] // key.shape[1]


def _every_head(mask: Tensor, problem: Problem) -> Tensor:
    """A mask over the keys (…, 1, m | 1) as (batch · heads, m)."""
    m = problem.visibility.keys
    return mask.expand(*problem.batch, 1, m).reshape(-1, m)


def _own(place: Visibility, keys: Tensor | None, heads: int) -> Tensor:
    """Whether each query sees the key at its own position beside its buckets, (heads, n)."""
    n = place.queries
    at = place.query_position
    if not place.causal:
        return torch.zeros(heads, n, dtype=torch.bool, device=at.device)
    real = (at >= 0).expand(heads, n)
    return real if keys is None else real & keys[:, at.clamp_min(0)]


def _to_itself(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, place: Visibility, scale: float, groups: int
) -> tuple[Tensor, Tensor]:
    """Each query and its own key alone: the value, and the score."""
    at = place.query_position.clamp_min(0)
    key, value = (x.index_select(1, at).repeat_interleave(groups, 0) for x in (k, v))
    wide = torch.promote_types(q.dtype, torch.float32)
    score = scale * (q.to(wide) * key.to(wide)).sum(-1)
    return value, score if bias is None else score + bias.index_select(1, at)
