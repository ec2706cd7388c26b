"""A paged key-value cache: pages of a shared pool, handed to requests through a block table."""

import torch
from torch import Tensor


class PagedKvCache:
    """Keys and values of every layer, `[num_pages, page_size, num_kv_heads, head_dim]` each.

    Slot = page * page_size + offset. Pages are taken and given back between rounds, on the
    host.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        shape = (num_pages, page_size, num_kv_heads, head_dim)
        self.num_pages = num_pages
        self.page_size = page_size
        self.device = device
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self._free = list(range(num_pages))

    @property
    def num_free_pages(self) -> int:
        return len(self._free)

    def pages_for(self, num_places: int) -> int:
        return -(-num_places // self.page_size)

    def take(self, lengths: list[int]) -> tuple[Tensor, list[list[int]]]:
        """Pages for requests of the given greatest lengths: the block table int32 [B, P] (-1 where a
        request has no page) and the page lists to give back.

        Pages go round the requests one at a time, so no request's pages are neighbours: what works
        here works after any history of allocations.
        """
        needs = [self.pages_for(length) for length in lengths]
        if sum(needs) > len(self._free):
            raise RuntimeError(f"cache has {len(self._free)} free pages, {sum(needs)} wanted")
        pages: list[list[int]] = [[] for _ in needs]
        for column in range(max(needs, default=0)):
            for request, need in enumerate(needs):
                if column < need:
                    pages[request] += self.take_pages(1)
        table = torch.full((len(needs), max(needs, default=0)), -1, dtype=torch.int32)
        for request, owned in enumerate(pages):
            table[request, : len(owned)] = torch.tensor(owned, dtype=torch.int32)
        return table.to(self.device), pages

    def take_pages(self, count: int) -> list[int]:
        if count > len(self._free):
            raise RuntimeError(f"cache has {len(self._free)} free pages, {count} wanted")
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[list[int]]) -> None:
        for owned in pages:
            self._free.extend(owned)


def slots_of(block_table: Tensor, requests: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Cache slot of position `positions[r]` of request `requests[r]`, int64 [R]. Positions must lie
    inside the request's pages."""
    pages = block_table[requests, positions // page_size].long()
    return pages * page_size + positions % page_size
