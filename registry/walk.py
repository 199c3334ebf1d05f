"""Along a graph, each node once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import fx


def walk(start: fx.Node, further: Callable[[fx.Node], Iterable[fx.Node]], most: int | None = None) -> Iterator[fx.Node]:
    """A node, and all that are reached from it: who takes them may stop before the next is looked for.

    Args:
        further: the nodes behind one, asked once it was handed out.
        most: nodes that may be found before it gives up.
    """
    stack, seen = [start], {start}
    while stack and (most is None or len(seen) < most):
        node = stack.pop()
        yield node
        for found in further(node):
            if found not in seen:
                seen.add(found)
                stack.append(found)
