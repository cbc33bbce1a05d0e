"""Deciding when and how much to speculate: pure functions over plain facts."""
