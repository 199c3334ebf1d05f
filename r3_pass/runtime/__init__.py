"""Serving: connect an engine's steps to the slot buffer, and get each request's `routed_experts`.

Moves bytes; never looks into a graph.
"""

from r3_pass.runtime.attach import attach
from r3_pass.runtime.idle import IdleSession
from r3_pass.runtime.plan import plan
from r3_pass.runtime.saved import SavedRows
from r3_pass.runtime.segments import Segment, SegmentBatch
from r3_pass.runtime.session import Session
from r3_pass.runtime.stages import StageRows, merge_stages

__all__ = [
    "IdleSession",
    "SavedRows",
    "Segment",
    "SegmentBatch",
    "Session",
    "StageRows",
    "attach",
    "merge_stages",
    "plan",
]
