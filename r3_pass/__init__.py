"""Record and replay the expert routing of any MoE model as a compiler pass of torch.compile.

compiled = torch.compile(model, backend=r3_pass.backend())
session = r3_pass.runtime.attach(engine)                       # or attach(compiled, num_slots=...)

backend = r3_pass.backend(mode="replay")                       # in the trainer
with backend.replay(routes): ...                               # around forward and backward
"""

from r3_pass import passes, registry, routes, runtime, stitch, verify
from r3_pass.backend import backend
from r3_pass.errors import (
    BufferLayoutError,
    InvalidRoutes,
    MissingRoutes,
    NoRouterFound,
    PartialCapture,
    R3Error,
    RefusedConfiguration,
    StaleRoutes,
    UnsupportedEngine,
)
from r3_pass.explain import explain
from r3_pass.version import __version__

__all__ = [
    "BufferLayoutError",
    "InvalidRoutes",
    "MissingRoutes",
    "NoRouterFound",
    "PartialCapture",
    "R3Error",
    "RefusedConfiguration",
    "StaleRoutes",
    "UnsupportedEngine",
    "__version__",
    "backend",
    "explain",
    "passes",
    "registry",
    "routes",
    "runtime",
    "stitch",
    "verify",
]
