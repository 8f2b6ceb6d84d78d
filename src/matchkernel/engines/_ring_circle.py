"""The processes of a ring: what they tell each other, and what is raised when one of them does not answer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
"""Keys and values of one rank, or their gradients."""

LETTER = 4096
"""Bytes in which a rank describes its call to the others."""


class RingError(RuntimeError):
    """Another process of the ring died, left, or did not answer in time. The process group is of no use afterwards."""


class Circle:
    """This process among those of a group: rank r sends to r + 1 and receives from r − 1.

    `timeout`, in seconds, bounds each wait of its own. On CPU the wait itself is bounded; on a GPU waiting is left to
    the stream, and to the process group's own timeout. `count` is told the bytes of each message.
    """

    def __init__(self, group: Any, timeout: float, device: torch.device, count: Callable[[int], None]) -> None:
        import torch.distributed as dist

        self.group, self.timeout, self.device = group, timeout, device
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        whole = dist.group.WORLD if group is None else group
        assert whole is not None
        self.after, self.before = (
            dist.get_global_rank(whole, (self.rank + step) % self.world) for step in (1, self.world - 1)
        )
        self.count = count

    def exchange(self, give: Pair, take: Pair, what: str) -> Callable[[], None]:
        """Start sending `give` to the next rank and receiving `take` from the one before; the answer waits for both.

        All are contiguous, and none may be touched in between. What is empty is not sent.
        """
        import torch.distributed as dist

        operations = []
        for x in give:
            if x.numel():
                operations.append(dist.P2POp(dist.isend, x, self.after, self.group))
                self.count(x.numel() * x.element_size())
        operations += [dist.P2POp(dist.irecv, x, self.before, self.group) for x in take if x.numel()]
        who = f"{what}: waiting for rank {(self.rank - 1) % self.world} or rank {(self.rank + 1) % self.world}"
        works = self._heard(who, lambda: dist.batch_isend_irecv(operations)) if operations else []

        def wait() -> None:
            for work in works:
                self._wait(who, work)

        return wait

    def gather(self, x: Tensor) -> list[Tensor]:
        """x of every rank, all of one shape, in the order of the ranks."""
        import torch.distributed as dist

        x, all_of_them = x.contiguous(), [torch.empty_like(x) for _ in range(self.world)]
        if x.numel():
            self.count((self.world - 1) * x.numel() * x.element_size())
            who = "gathering from all ranks"
            work = self._heard(who, lambda: dist.all_gather(all_of_them, x, group=self.group, async_op=True))
            self._wait(who, work)
        return all_of_them

    def total(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks, the same on each."""
        import torch.distributed as dist

        x = x.clone(memory_format=torch.contiguous_format)
        if x.numel():
            # What a ring of P processes sends for a sum: 2 (P − 1)/P of the message.
            self.count(2 * (self.world - 1) * x.numel() * x.element_size() // self.world)
            who = "adding up over all ranks"
            work = self._heard(who, lambda: dist.all_reduce(x, group=self.group, async_op=True))
            self._wait(who, work)
        return x

    def describe(self, description: dict[str, Any]) -> list[dict[str, Any]]:
        """What every rank says of its call."""
        letter = json.dumps(description, ensure_ascii=False).encode()
        assert len(letter) <= LETTER
        page = torch.zeros(LETTER, dtype=torch.uint8)
        page[: len(letter)] = torch.frombuffer(bytearray(letter), dtype=torch.uint8)
        return [json.loads(bytes(x.cpu().tolist()).rstrip(b"\0")) for x in self.gather(page.to(self.device))]

    def _wait(self, who: str, work: Any) -> None:
        if self.device.type == "cpu":
            self._heard(who, lambda: work.wait(timedelta(seconds=self.timeout)))
        else:
            self._heard(who, work.wait)

    def _heard(self, who: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            raise RingError(
                f"Ring, rank {self.rank} of {self.world}, {who}: no answer within {self.timeout:g} s or the connection "
                f"is gone. A process died, raised, or never made this call. torch said: {error}"
            ) from error


def alike(descriptions: list[dict[str, Any]]) -> None:
    """Raise the same error on every rank where their calls do not fit together."""
    first = descriptions[0]
    for rank, other in enumerate(descriptions):
        for what, value in first.items():
            if other[what] != value:
                raise ValueError(
                    f"the ranks of the ring disagree about {what}: {value!r} on rank 0, {other[what]!r} on rank {rank}"
                )


def valid_timeout(timeout: object) -> float:
    """The timeout in seconds; ValueError for what is not a number above 0."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
        raise ValueError(f"Ring(timeout={timeout!r}): expected seconds, a finite number above 0")
    return float(timeout)
