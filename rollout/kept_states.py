"""Owns the target's states of tokens that an idle drafter has skipped: a bounded pool, rows by request.

Shape suffixes: R rows of the pool, N rows of one call, H width of a state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch

MAX_BYTES = 256 * 1024 * 1024
"""Most memory of the pool, on the device. EAGLE-3 at a hidden size of 4,096 in bf16: 10,000 tokens."""


class KeptStates:
    """Token ids, positions and hidden states of skipped tokens; the oldest rows of all give way.

    Attributes:
        num_evicted: Rows that gave way since the start.
    """

    def __init__(
        self,
        num_rows_a_request: int,
        max_num_requests: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Room for `num_rows_a_request` rows of each of so many requests, if they fit into MAX_BYTES."""
        row_bytes = max(width * dtype.itemsize, 1) + 12
        num_rows = max(min(num_rows_a_request * max_num_requests, MAX_BYTES // row_bytes), max_num_requests)
        self.num_evicted = 0
        self._num_rows_a_request = num_rows_a_request
        self._ids_R = torch.empty(num_rows, dtype=torch.int32, device=device)
        self._positions_R = torch.empty(num_rows, dtype=torch.int64, device=device)
        self._states_RH = torch.empty((num_rows, width), dtype=dtype, device=device)
        self._free = list(range(num_rows))
        self._rows: dict[str, deque[int]] = {}
        # Rows as they were taken; some of them are free again.
        self._order: deque[tuple[str, int]] = deque()

    def __bool__(self) -> bool:
        return bool(self._rows)

    def keep(
        self,
        request_ids: Sequence[str],
        ids_N: torch.Tensor,
        positions_N: torch.Tensor,
        states_NH: torch.Tensor,
    ) -> None:
        """Keep one token of each request, the one after those kept of it before."""
        rows = [self._take(request_id) for request_id in request_ids]
        rows_N = torch.tensor(rows, dtype=torch.int64, device=self._ids_R.device)
        self._ids_R[rows_N] = ids_N.to(torch.int32)
        self._positions_R[rows_N] = positions_N
        self._states_RH[rows_N] = states_NH

    def rows_of(self, request_id: str) -> Sequence[int]:
        """The request's rows, in the order of its tokens."""
        return self._rows.get(request_id, ())

    def read(self, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token ids, positions and states of rows."""
        rows_N = torch.tensor(rows, dtype=torch.int64, device=self._ids_R.device)
        return self._ids_R[rows_N], self._positions_R[rows_N], self._states_RH[rows_N]

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests that have ended, or whose tokens the drafter has got."""
        for request_id in request_ids:
            self._free += self._rows.pop(request_id, ())

    def clear(self) -> None:
        """Forget everything: the policy has changed."""
        self.drop(tuple(self._rows))
        self._order.clear()

    def _take(self, request_id: str) -> int:
        rows = self._rows.setdefault(request_id, deque())
        if len(rows) >= self._num_rows_a_request:
            self._free.append(rows.popleft())
            self.num_evicted += 1
        while not self._free:
            owner, row = self._order.popleft()
            owned = self._rows.get(owner)
            if owned and owned[0] == row:
                self._free.append(owned.popleft())
                self.num_evicted += 1
        row = self._free.pop()
        rows.append(row)
        self._order.append((request_id, row))
        if len(self._order) > 4 * len(self._ids_R):
            self._forget_freed()
        return row

    def _forget_freed(self) -> None:
        """Keep the order as long as the pool, not as the run."""
        live = {(request_id, row) for request_id, rows in self._rows.items() for row in rows}
        latest = {entry: index for index, entry in enumerate(self._order) if entry in live}
        self._order = deque(sorted(latest, key=latest.__getitem__))
