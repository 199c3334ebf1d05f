"""All hand-written routers and look-alikes, by name."""

from __future__ import annotations

from altered_routers import ALTERED_ROUTERS
from dispatches import DISPATCHES
from hostile_routers import HOSTILE_ROUTERS
from lookalikes import LOOKALIKES
from more_routers import MORE_ROUTERS
from refusals import REFUSALS
from routers import ROUTERS
from tiny import Case

LISTS = (ROUTERS, MORE_ROUTERS, HOSTILE_ROUTERS, ALTERED_ROUTERS, DISPATCHES, REFUSALS, LOOKALIKES)

ALL_ROUTERS: dict[str, Case] = {name: case for cases in LISTS for name, case in cases.items()}
