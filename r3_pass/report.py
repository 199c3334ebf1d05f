"""What was captured, what was rejected and why; and the graphs themselves, in files."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import CodeType

import torch
from torch import fx

from r3_pass.passes.site import Match
from r3_pass.places import ATTENTION, Place
from r3_pass.registry.shapes import value
from r3_pass.structure import in_attention


@dataclasses.dataclass(frozen=True)
class SiteEntry:
    """One captured routing site.

    Attributes:
        layer: decoder layer; None as long as no call has shown which one it is (a graph that serves several layers).
        module: module path of the router.
        num_experts, top_k, form: as the matcher decided.
        graph: number of the graph, in order of compilation; None where no graph shows the router, and the engine's own hook tells.
        proved: False where the ids leave the graph before they reach experts; the model's structure confirms those.
        fused: with `fuse_router`, whether its routing is one operator; None without.
        unfused: why it is not.
    """

    layer: int | None
    module: str
    num_experts: int
    top_k: int
    form: str
    graph: int | None
    proved: bool
    fused: bool | None = None
    unfused: str = ""


@dataclasses.dataclass(frozen=True)
class RejectedEntry:
    """One candidate that is not recorded: the operator, where, why, and whether it does choose experts."""

    node: str
    module: str
    reason: str
    routing: bool
    graph: int


class GraphRecord:
    """What one compilation decided; keeps text, not compiled code."""

    def __init__(self, number: int, found: Match, ended: str) -> None:
        self.number = number
        self.found = found
        self.ended = ended
        self.unfused: tuple[str, ...] = ()
        self.placed: dict[tuple[int, Place], None] = {}
        self.refusals: dict[str, None] = {}
        self.bytecode: CodeType | None = None
        self.before = ""
        self.after = ""

    def keep(self, before: fx.GraphModule, after: fx.GraphModule | None) -> None:
        """Keep the graphs' text for `Report.dump`; the compilers behind may change them."""
        self.before = _readable(before)
        self.after = _readable(after) if after is not None else ""

    def keep_before(self, before: fx.GraphModule) -> None:
        """Where what was compiled is not what Dynamo traced: that is the graph before."""
        if self.before:
            self.before = _readable(before)

    def watch_bytecode(self) -> None:
        """Keep the function that Dynamo is about to make around this graph; called by the backend, while it compiles."""

        def keep(code: CodeType, new_code: CodeType) -> CodeType | None:
            handle.remove()
            self.bytecode = new_code
            return None

        handle = torch._dynamo.convert_frame.register_bytecode_hook(keep)

    def sites(self) -> list[SiteEntry]:
        entries: dict[SiteEntry, None] = {}
        placed: set[int] = set()
        for number, place in tuple(self.placed):
            placed.add(number)
            if place.block is not None:
                entries[self._entry(number, place.block.index, place.module)] = None
        for number, site in enumerate(self.found.sites):
            if number not in placed and not in_attention(site.module):
                entries[self._entry(number, site.layer, site.module)] = None
        return list(entries)

    def _entry(self, number: int, layer: int | None, module: str) -> SiteEntry:
        site = self.found.sites[number]
        fused = not self.unfused[number] if self.unfused else None
        why = self.unfused[number] if self.unfused else ""
        return SiteEntry(layer, module, site.num_experts, site.top_k, site.form, self.number, site.proved, fused, why)

    def rejected(self) -> list[RejectedEntry]:
        entries = [RejectedEntry(r.node, r.module, r.reason, r.routing, self.number) for r in self.found.rejected]
        placed = {number for number, _ in tuple(self.placed)}
        for number, site in enumerate(self.found.sites):
            if number not in placed and in_attention(site.module):
                entries.append(RejectedEntry(site.selections[0].name, site.module, ATTENTION, False, self.number))
        for number, place in tuple(self.placed):
            if place.block is None:
                site = self.found.sites[number]
                entries.append(RejectedEntry(site.selections[0].name, place.module, place.reason, False, self.number))
        return entries


class Report:
    """One entry for each routing candidate of the graphs compiled so far.

    `print(report)` shows a row for each layer.

    Attributes:
        replayed: forwards of each layer that took given routes.
        fallback_rows: rows of each layer that were bad and went to the live router (`on_bad_row="live"`).
    """

    def __init__(
        self,
        graphs: tuple[GraphRecord, ...],
        replayed: dict[int, int] | None = None,
        fallback_rows: dict[int, int] | None = None,
        hooked: Sequence[SiteEntry] = (),
    ) -> None:
        self._graphs = graphs
        self._hooked = hooked
        self.replayed = replayed or {}
        self.fallback_rows = fallback_rows or {}

    @property
    def sites(self) -> list[SiteEntry]:
        """Captured sites, by layer; a site that was compiled again for other shapes stands here once."""
        unique: dict[tuple[object, ...], SiteEntry] = {}
        for record in self._graphs:
            for entry in record.sites():
                key = (entry.layer, entry.module, entry.num_experts, entry.top_k, entry.form)
                unique.setdefault(key, entry)
        found = [*unique.values(), *self._hooked]
        return sorted(found, key=lambda e: (e.layer is None, e.layer or 0, e.graph or 0))

    @property
    def rejected(self) -> list[RejectedEntry]:
        """Candidates that are not recorded, in graph order, each once."""
        unique: dict[tuple[object, ...], RejectedEntry] = {}
        for record in self._graphs:
            for entry in record.rejected():
                unique.setdefault((entry.module, entry.node, entry.reason), entry)
        return list(unique.values())

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def table(self) -> list[tuple[str, ...]]:
        """Rows of text, the first one the heading: layer, module, form, experts, top-k, graph; with `fuse_router`, fused."""
        rows: list[tuple[str, ...]] = [("layer", "module", "form", "experts", "top-k", "graph")]
        for entry in self.sites:
            layer = "?" if entry.layer is None else str(entry.layer)
            graph = "-" if entry.graph is None else str(entry.graph)
            rows.append((layer, entry.module, entry.form, str(entry.num_experts), str(entry.top_k), graph))
        fused = [entry.fused for entry in self.sites]
        if any(f is not None for f in fused):
            rows = [
                (*row, cell) for row, cell in zip(rows, ["fused", *("yes" if f else "no" for f in fused)], strict=True)
            ]
        return rows

    def __str__(self) -> str:
        rows = self.table()
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines = lines if len(lines) > 1 else []
        rejected = self.rejected
        routing = [r for r in rejected if r.routing]
        lines.append(f"{len(rows) - 1} sites in {self.num_graphs} graphs; {len(rejected)} other candidates rejected")
        if self.replayed:
            most, bad = max(self.replayed.values()), sum(self.fallback_rows.values())
            lines.append(
                f"{len(self.replayed)} layers took given routes in {most} forwards; {bad} bad rows went to the live router"
            )
        lines.extend(f"NOT FUSED: {e.module} ({e.form}): {e.unfused}" for e in self.sites if e.unfused)
        lines.extend(f"REFUSED: {refusal}" for record in self._graphs for refusal in record.refusals)
        lines.extend(f"NOT RECORDED: {r.module or 'graph ' + str(r.graph)} ({r.node}): {r.reason}" for r in routing)
        return "\n".join(lines)

    def dump(self, folder: str | Path) -> Path:
        """Write the report, each routing graph before and after the rewrite, and the function around it, into a folder.

        Returns: the folder. Files: report.txt, rejected.txt, graph_N_before.txt, graph_N_after.txt, graph_N_caller.py (by depyf).
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.txt").write_text(str(self) + "\n")
        lines = [
            f"graph {r.graph}  {r.node}  {r.module}  {'routing' if r.routing else 'not routing'}: {r.reason}"
            for r in self.rejected
        ]
        (folder / "rejected.txt").write_text("\n".join(lines) + "\n")
        for record in self._graphs:
            for name, text in (("before", record.before), ("after", record.after)):
                if text:
                    (folder / f"graph_{record.number}_{name}.txt").write_text(text)
            if record.before and record.bytecode is not None:
                (folder / f"graph_{record.number}_caller.py").write_text(_decompiled(record.bytecode))
        return folder


def _decompiled(code: CodeType) -> str:
    """The function that Dynamo made around a graph, as source: depyf reads it back from bytecode."""
    try:
        import depyf
    except ImportError:
        return "# pip install 'r3_pass[dump]' for the source of the function that Dynamo made around this graph\n"
    try:
        return str(depyf.decompile(code))
    except depyf.decompiler.DecompilationError as error:
        return f"# depyf cannot read this function: {error}\n"


def _readable(module: fx.GraphModule) -> str:
    """One line for each operator, with the shape and dtype of its result; nested graphs behind."""
    lines = []
    for node in module.graph.nodes:
        seen = value(node)
        shape = f"  # {str(seen.dtype).removeprefix('torch.')}{list(seen.shape)}" if hasattr(seen, "dtype") else ""
        lines.append((node.format_node() or f"return {node.args}") + shape)
    for name, nested in module.named_children():
        if isinstance(nested, fx.GraphModule):
            lines.extend(("", f"# {name}", _readable(nested).rstrip()))
    return "\n".join(lines) + "\n"
