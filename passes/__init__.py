"""Pure graph work: decide what is routing, rewrite the graph. No engine in sight.

Imports `r3_pass.registry` and nothing else of this project.
"""

if __name__ != "r3_pass.passes":
    raise ImportError("import r3_pass.passes, not passes: a second copy would register its operators twice")

from r3_pass.passes.custom_pass import RecordPass
from r3_pass.passes.match import match
from r3_pass.passes.record import rewrite
from r3_pass.passes.site import Accepted, Match, Rejected

__all__ = ["Accepted", "Match", "RecordPass", "Rejected", "match", "rewrite"]
