"""Owns the plain values that an adaptive policy is made of; `config_speculation.py` has their defaults."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """Limits of a controller, as they travel to the scheduler's process.

    Attributes:
        max_draft_tokens: The largest K.
        switch_margin: Expected gain in tokens a second, a fraction, that another K above 0 must have.
        max_slowdown: Share longer than plain decoding at which the floor ends speculation for a while.
        exploration_fraction: Share of the engine's seconds that exploration may lose.
        catch_up_tokens: Tokens a request that the drafter catches up on at most when K rises from 0; 0 for a
            drafter that keeps nothing of the tokens before, or that is never idle.
    """

    max_draft_tokens: int
    switch_margin: float
    max_slowdown: float
    exploration_fraction: float
    catch_up_tokens: int
