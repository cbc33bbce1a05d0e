"""Owns the hindsight oracle: the K of each batch size that measured costs and acceptance choose."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from rlspec.types import StepFacts


def oracle_table(steps: Iterable[StepFacts], max_k: int, max_batch_size: int) -> list[tuple[int, int, int]]:
    """Ranges [first batch size, last, K] for `static_table`, from runs of fixed K that include K = 0.

    Step seconds at K are a line in the batch size, fitted to the medians of each batch size; tokens at K are
    1 + the accepted tokens a request-step that was offered K. Only steps without prompts that drafted as the
    step before them did count.
    """
    seconds: defaultdict[int, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    accepted: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
    before: StepFacts | None = None
    for step in steps:
        k = step.num_draft_tokens
        if before is not None and before.num_draft_tokens == k and step.is_decoding and step.step_index:
            seconds[k][step.batch_size].append(step.step_seconds)
            accepted[k][0] += sum(step.num_accepted)
            accepted[k][1] += step.batch_size
        before = step
    lines = {}
    for k, by_batch in seconds.items():
        sizes = sorted(by_batch)
        medians = [float(np.median(by_batch[size])) for size in sizes]
        weights = [len(by_batch[size]) ** 0.5 / median for size, median in zip(sizes, medians, strict=True)]
        lines[k] = np.polyfit(sizes, medians, 1, w=weights)
    goodput = {
        k: [
            (1.0 + accepted[k][0] / accepted[k][1]) / float(np.polyval(line, size))
            for size in range(1, max_batch_size + 1)
        ]
        for k, line in lines.items()
        if k <= max_k
    }
    table: list[tuple[int, int, int]] = []
    for size in range(1, max_batch_size + 1):
        best = max(goodput, key=lambda k: goodput[k][size - 1])
        if table and table[-1][2] == best:
            table[-1] = (table[-1][0], size, best)
        else:
            table.append((size, size, best))
    return table
