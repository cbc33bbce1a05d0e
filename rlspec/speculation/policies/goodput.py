"""Owns the goodput chooser: the K that is expected to give the most tokens a second."""

from __future__ import annotations

from rlspec.speculation.policies.base import Outcome, Outlook


class GoodputChooser:
    """K = argmax over k of tokens[k] / step_seconds(k); the smaller k on ties.

    Source: SmartSpec (arXiv 2406.14066), goodput = expected generated tokens per second as a function of
    batch, acceptance and K. Assumption: the outlook's expectations are right on average for the steps to
    come, and the batch stays. Its errors are the outlook's, so what learns is the outlook, not this class.
    """

    explores = False

    def choose(self, outlook: Outlook) -> int:
        """The K of the best goodput; `max` keeps the first, so the smaller, of equals."""
        return max(range(outlook.max_draft_tokens + 1), key=outlook.goodput)

    def observe(self, outcome: Outcome) -> None:
        """Nothing to learn: the outlook does."""
