"""The forms that are known, in order, and the way to add one.

`FORMS` is a tuple, not a registry that imports fill: what is in it is what this file lists. `register` adds a form for
the process; `registered` adds it for a `with` block, for tests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from r3_pass.registry.form import RoutingForm
from r3_pass.registry.product_keys import PRODUCT_KEYS
from r3_pass.registry.sampled import SAMPLED
from r3_pass.registry.sort import SORT
from r3_pass.registry.table import TABLE
from r3_pass.registry.top1 import TOP1
from r3_pass.registry.topk import TOPK

FORMS: tuple[RoutingForm, ...] = (TOPK, TOP1, SORT, SAMPLED, TABLE, PRODUCT_KEYS)

_added: list[RoutingForm] = []


def forms() -> tuple[RoutingForm, ...]:
    """All routing forms, the built-in ones first."""
    return FORMS + tuple(_added)


def register(form: RoutingForm) -> RoutingForm:
    """Add a routing form; models compiled from now on are matched with it too.

    Returns: the form, so that it can be used as the last line of the file that defines it.
    Raises: ValueError if a form of that name exists.
    """
    if any(known.name == form.name for known in forms()):
        raise ValueError(f"a routing form named {form.name!r} exists already: give the new one its own name")
    _added.append(form)
    return form


@contextlib.contextmanager
def registered(form: RoutingForm) -> Iterator[RoutingForm]:
    """`register` for the length of a `with` block."""
    register(form)
    try:
        yield form
    finally:
        _added.remove(form)
