"""Moves captured rows from a running model to its requests: slots, steps, export, accumulation; looks into no graph."""
