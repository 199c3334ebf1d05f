"""A small serving engine for MoE models of transformers: one class a file, and its r3_pass adapter in `adapter.py`."""

from engine.adapter import ReferenceAdapter
from engine.engine import Engine
from engine.sequence import Result

__all__ = ["Engine", "ReferenceAdapter", "Result"]
