"""Owns what a person sees in the terminal: progress, tables and errors."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from rlspec.errors import RlspecError, missing_extra
from rlspec.types import Rollout


@contextmanager
def progress(rollouts: Iterable[Rollout], total: int, label: str) -> Iterator[Iterator[Rollout]]:
    """Pass rollouts through under a progress bar with counts, tokens and time left."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError as error:
        raise missing_extra("rich", "report", "progress and tables") from error
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total, tokens=0)

        def shown() -> Iterator[Rollout]:
            num_tokens = 0
            for rollout in rollouts:
                num_tokens += len(rollout.completion_token_ids)
                bar.update(task, advance=1, tokens=num_tokens)
                yield rollout

        yield shown()


def print_table(title: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Print a table: a name and one value a column."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError as error:
        raise missing_extra("rich", "report", "progress and tables") from error
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    for name, values in rows:
        table.add_row(name, *values)
    Console(width=None if sys.stdout.isatty() else 110).print(table)


def print_rows(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table of texts, wrapped where the terminal is narrow."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError as error:
        raise missing_extra("rich", "report", "progress and tables") from error
    table = Table(*headers, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 160, markup=False).print(table)


def print_error(error: RlspecError) -> None:
    """Print an error for its user: what was given, what is allowed, what to do."""
    print(f"rlspec: {type(error).__name__}: {error}", file=sys.stderr)
