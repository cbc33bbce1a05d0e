"""Where stock vLLM is wrapped. Imports rlspec's core, never drafter_updates."""
