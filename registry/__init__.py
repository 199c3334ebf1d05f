"""What routing looks like: reading a graph, and one file for each form of routing.

Imports nothing else of this project.
"""

if __name__ != "r3_pass.registry":
    raise ImportError("import r3_pass.registry, not registry: a second copy would hold its own list of forms")

from r3_pass.registry.form import RoutingForm, Selection
from r3_pass.registry.forms import forms, register, registered

__all__ = ["RoutingForm", "Selection", "forms", "register", "registered"]
