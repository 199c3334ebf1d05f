"""Add a routing form: a router that thresholds instead of selecting, spelled by no operator that r3_pass knows.

    python examples/add_form.py

Four steps, for any spelling that is not recognised:

1. Look: `print(r3_pass.explain(model, *inputs))` lists the candidates. Nothing there means that no known form claims the operator.
2. Write `find(flow, node)`: say for one operator what it selects over and where its ids are, None for all other nodes. That the
   scores come from a router, and that the ids choose parameters, is proved for every form alike; a form need not do it.
3. Register it, before the model is compiled.
4. Prove it: `session.self_test(...)`, or compare `session.read(...)` with what the eager model chose, as below.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, fx, nn

import r3_pass
from r3_pass.registry import RoutingForm, Selection
from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.operators import argument, spelling

TOKENS, HIDDEN, EXPERTS = 12, 16, 8


# A router that ranks by counting: expert e's rank is the number of experts with a higher score, and the ids of the best two are
# taken by a custom operator. No topk, no sort.
@torch.library.custom_op("examples::best_two", mutates_args=())
def best_two(scores: Tensor) -> Tensor:
    rank = (scores.unsqueeze(-2) > scores.unsqueeze(-1)).sum(-1)
    return torch.stack([(rank == place).int().argmax(-1) for place in (0, 1)], -1)


@best_two.register_fake
def _(scores: Tensor) -> Tensor:
    return scores.new_empty((*scores.shape[:-1], 2), dtype=torch.int64)


class Moe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN) * HIDDEN**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        ids = best_two(scores)
        return x + torch.einsum("td,tkdf,tk->tf", x, self.experts[ids], scores.gather(-1, ids))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Moe() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def find(flow: DataFlow, node: fx.Node) -> Selection | None:
    """Step 2."""
    if spelling(node) != "examples::best_two":
        return None
    scores = flow.operand(node, argument(node, 0, "scores"))
    return Selection(node, scores, -1, (node,)) if scores is not None else None


def main(arguments: list[str] | None = None) -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args(arguments)
    torch.manual_seed(0)
    model, x = Model().eval(), torch.randn(TOKENS, HIDDEN)

    before = r3_pass.explain(model, x)
    print(f"before: {len(before.sites)} sites")
    r3_pass.registry.register(RoutingForm("best_two", find, source="examples/add_form.py"))

    backend = r3_pass.backend("aot_eager")
    compiled = torch.compile(model, backend=backend)
    session = r3_pass.runtime.attach(compiled, num_slots=64)
    with torch.no_grad(), session.step(range(TOKENS)):
        compiled(x)
    rows = session.read(range(TOKENS))
    print(f"after:  {[(s.layer, s.form, s.num_experts, s.top_k) for s in backend.report().sites]}")

    hidden = x
    for number, layer in enumerate(model.layers):
        assert (best_two(layer.gate(hidden).softmax(-1)).numpy() == rows[:, number]).all(), f"layer {number} differs"
        hidden = layer(hidden)
    print(f"{rows.shape[0]} tokens x {rows.shape[1]} layers equal to the eager router")


if __name__ == "__main__":
    main()
