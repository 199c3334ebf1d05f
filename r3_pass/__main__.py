"""`python -m r3_pass explain MODEL`: what would be captured, from a config alone. No weights are needed or made."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from r3_pass.errors import R3Error
from r3_pass.explain import explain
from r3_pass.report import Report
from r3_pass.runtime.slots import Geometry
from r3_pass.structure import inspect


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m r3_pass", description="Record the expert routing of MoE models.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "explain",
        help="which layers would be captured, and the bytes of the slot buffer",
        description="Builds the model on the meta device from a transformers config and traces one forward.",
    )
    command.add_argument(
        "model", help="a config.json, a folder with one, or a transformers model type such as qwen3_moe"
    )
    command.add_argument(
        "--slots",
        type=_positive,
        default=65_536,
        help="KV slots of the engine, for the buffer's size (default: %(default)s)",
    )
    command.add_argument(
        "--layers", type=_positive, help="trace only so many decoder layers (a large model takes a minute)"
    )
    command.add_argument(
        "--experts-implementation",
        default="batched_mm",
        help="transformers' experts implementation (default: %(default)s)",
    )
    command.add_argument("--dump", type=Path, help="write the graphs before and after into this folder")
    command.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    try:
        report, layers, built = _explain_config(given.model, given.layers, given.experts_implementation)
    except (R3Error, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if given.dump:
        report.dump(given.dump)
    print(_as_json(report, layers, given.slots) if given.json else _as_text(report, layers, given.slots))
    if report.sites:
        return 0
    print(_why_none(built), file=sys.stderr)
    return 1


def _explain_config(model: str, layers: int | None, experts: str) -> tuple[Report, int, nn.Module]:
    try:
        import transformers
    except ImportError as error:
        raise ValueError("this command reads transformers configs: pip install 'r3_pass[transformers]'") from error
    config: Any
    path = Path(model)
    if path.is_dir():
        config = transformers.AutoConfig.from_pretrained(path)
    elif path.is_file():
        fields = json.loads(path.read_text())
        if not isinstance(fields, dict) or "model_type" not in fields:
            raise ValueError(f"{path} is no transformers config: it has no model_type")
        config = transformers.AutoConfig.for_model(**fields)
    elif model not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f"{model!r} is neither a file or folder here nor a model type of transformers {transformers.__version__}"
        )
    else:
        config = transformers.AutoConfig.for_model(model)
    text = config.get_text_config(decoder=True)
    if layers is not None:
        text.num_hidden_layers = layers
        if vars(text).get("layer_types"):  # of some configs it follows from the number of layers
            text.layer_types = text.layer_types[:layers]
    text._experts_implementation = experts
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(_no_decoder(model, config))
    started = time.perf_counter()
    _progress(f"building {type(config).__name__} on the meta device ({text.num_hidden_layers} layers)")
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    built.eval()
    _progress(f"tracing one forward ({time.perf_counter() - started:.0f} s so far)")
    report = explain(built, torch.ones(1, 8, dtype=torch.int64, device="meta"), use_cache=False)
    _progress(f"done in {time.perf_counter() - started:.0f} s, {report.num_graphs} graphs")
    return report, int(text.num_hidden_layers), built


def _no_decoder(model: str, config: Any) -> str:
    if getattr(config, "is_encoder_decoder", False):
        return (
            f"{model!r} is an encoder-decoder: layers of both number from 0, and routed_experts has one axis of layers. Of a model "
            "that you have built, r3_pass.explain(model.get_decoder(), input_ids) shows the decoder."
        )
    return (
        f"{model!r} is no causal language model: transformers' AutoModelForCausalLM has none for {type(config).__name__}. Build "
        "the model yourself, and call r3_pass.explain(model, *inputs)."
    )


def _why_none(model: nn.Module) -> str:
    name, structure = type(model).__name__, inspect(model)
    if not structure.may_route:
        return (
            f"{name} is dense: none of its {sum(structure.blocks.values())} blocks holds experts, so there is nothing to record or "
            "replay. Leave r3_pass out; or if it should have experts, look at what its config says of them."
        )
    return (
        f"No router of {name} was found. If it has experts, --dump FOLDER writes every rejected candidate and why, and "
        "examples/add_form.py shows how a spelling is added; if it has none, there is nothing to record or replay."
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"at least 1, got {value}")
    return value


def _progress(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


def _geometry(report: Report, layers: int, slots: int) -> Geometry | None:
    stored = tuple(sorted({s.layer for s in report.sites if s.layer is not None}))
    if not stored:
        return None
    return Geometry(slots, max(layers, stored[-1] + 1), stored, max(s.top_k for s in report.sites))


def _as_text(report: Report, layers: int, slots: int) -> str:
    lines = [str(report)]
    geometry = _geometry(report, layers, slots)
    if geometry is not None:
        lines.append(
            f"slot buffer: int16 [{slots} + 1, {geometry.row_shape[0]}, {geometry.top_k}], "
            f"{geometry.bytes_per_slot} bytes a token, "
            f"{geometry.nbytes / 2**20:.1f} MiB for {slots} slots"
        )
    return "\n".join(lines)


def _as_json(report: Report, layers: int, slots: int) -> str:
    geometry = _geometry(report, layers, slots)
    return json.dumps(
        {
            "num_layers": layers,
            "sites": [vars(s) for s in report.sites],
            "rejected": [vars(r) for r in report.rejected],
            "bytes_per_slot": geometry.bytes_per_slot if geometry else 0,
            "buffer_bytes": geometry.nbytes if geometry else 0,
        },
        indent=2,
    )


if __name__ == "__main__":
    raise SystemExit(main())
