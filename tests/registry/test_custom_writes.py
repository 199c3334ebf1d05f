"""Custom operators between a choice and its experts: what they write into ids, or return in their place, is not in the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import MoE, gate, gathered, permuted, softmax_topk, stack, tokens
from torch import Tensor

import r3_pass

library = torch.library.Library("r3_test_writes", "DEF")


def operator(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema.partition("(")[0]
    library.define(schema)
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"r3_test_writes::{name}", fake, lib=library)


def turn(ids: Tensor, *_: Tensor) -> None:
    ids.copy_((ids + 1) % 8)


operator("write(Tensor(a!) ids) -> ()", turn, lambda ids: None)
operator("write_two(Tensor(a!) ids, Tensor(b!) w) -> ()", turn, lambda ids, w: None)
operator(
    "write_and_count(Tensor(a!) ids) -> Tensor",
    lambda ids: (ids.float().sum(), turn(ids))[0],  # type: ignore[func-returns-value]  # it is called for what it writes
    lambda ids: torch.empty(()),
)
operator("others(Tensor ids) -> Tensor", lambda ids: (ids + 1) % 8, torch.empty_like)
operator("read(Tensor ids) -> Tensor", lambda ids: ids.float().sum(), lambda ids: torch.empty(()))
ops: Any = torch.ops.r3_test_writes


def after(call: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor, Tensor], Tensor]:
    """The same ids, behind a call."""

    def use(ids: Tensor, w: Tensor) -> Tensor:
        call(ids, w)
        return ids

    return use


def clone(ids: Tensor, w: Tensor) -> Tensor:
    copy = ids.clone()
    ops.write(copy)
    return copy


WRITES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "in_place": after(lambda ids, w: ops.write(ids)),
    "through_a_view": after(lambda ids, w: ops.write(ids.view(-1))),
    "into_one_of_two": after(lambda ids, w: ops.write_two(ids, w)),
    "with_a_result": after(lambda ids, w: ops.write_and_count(ids)),
    "into_a_copy": clone,
    "others_returned": lambda ids, w: ops.others(ids),
}


def sites(use: Callable[[Tensor, Tensor], Tensor], dispatch: Any) -> tuple[list[Any], str]:
    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, w = softmax_topk(moe, x)
        return use(ids, w), w

    ((ids,),) = tokens((2, 6))
    report = r3_pass.explain(stack(lambda: MoE(route, dispatch, gate=gate())), ids)
    return list(report.sites), " ".join(entry.reason for entry in report.rejected)


@pytest.mark.parametrize("dispatch", [gathered, permuted], ids=["gathered", "permuted"])
@pytest.mark.parametrize("name", WRITES)
def test_ids_that_a_custom_operator_changes(name: str, dispatch: Any) -> None:
    found, why = sites(WRITES[name], dispatch)
    assert not found and "r3_test_writes::" in why and "the ids that reach experts" in why


@pytest.mark.parametrize("dispatch", [gathered, permuted], ids=["gathered", "permuted"])
def test_a_custom_operator_that_only_reads(dispatch: Any) -> None:
    assert len(sites(after(lambda ids, w: ops.read(ids)), dispatch)[0]) == 2


def test_a_custom_operator_that_writes_behind_the_last_use() -> None:
    def dispatch(moe: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        y = gathered(moe, x, ids, w)
        ops.write(ids)
        return y

    ((ids,),) = tokens((2, 6))
    assert len(r3_pass.explain(stack(lambda: MoE(softmax_topk, dispatch, gate=gate())), ids).sites) == 2
