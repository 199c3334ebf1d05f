"""Make the weights of the experiment: a byte-level language model of the Python standard library, some minutes on a GPU.

python examples/mismatch/train.py --kind moe --minutes 3        # writes moe.safetensors, and what it came to into moe.json
"""

from __future__ import annotations

import argparse
import json
import platform
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
from model import SETUP, all_experts, build, weights_of
from safetensors.torch import save_file
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS


def corpus() -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [bytes] for training, and of the files that are held out: prompts are theirs."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(f for f in root.rglob("*.py") if "site-packages" not in f.parts and "test" not in f.parts)
    kept, held = bytearray(), bytearray()
    for file in files:
        (held if file.name in SETUP["held_out"] else kept).extend(file.read_bytes() + b"\n")
    return (torch.from_numpy(np.frombuffer(part, np.uint8).copy()) for part in (kept, held))  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=["moe", "dense"], default="moe")
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=64)
    given = parser.parse_args()
    torch.manual_seed(SETUP["seed"])
    ALL_EXPERTS_FUNCTIONS.register("all_experts", all_experts)
    model = build(given.kind, torch.float32, given.device, "all_experts", "sdpa").train()
    text, held = (part.to(given.device) for part in corpus())
    length, peak = SETUP["training"]["length"], SETUP["training"]["learning_rate"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def loss_of(source: torch.Tensor) -> torch.Tensor:
        starts = torch.randint(len(source) - length - 1, (given.batch, 1), device=given.device)
        ids = source[starts + torch.arange(length, device=given.device)].long()
        with torch.autocast(given.device, torch.bfloat16):
            loss: torch.Tensor = model(ids, labels=ids, output_router_logits=given.kind == "moe", use_cache=False).loss
        return loss

    start, step = time.monotonic(), 0
    while (done := (time.monotonic() - start) / (60 * given.minutes)) < 1:
        rate = peak * min(1.0, (step + 1) / 200) * (1 - done)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(text)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 200 == 0:
            print(f"step {step}: loss {float(loss.detach()):.3f}", flush=True)
    model.eval()
    with torch.no_grad():
        validation = float(torch.stack([loss_of(held) for _ in range(20)]).mean())
    state = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, weights_of(given.kind))
    result = {
        "kind": given.kind, "steps": step, "minutes": given.minutes, "tokens": step * given.batch * length,
        "held out loss, nats a byte": validation, "parameters": sum(p.numel() for p in model.parameters()),
        "python": platform.python_version(), "torch": torch.__version__,
    }  # fmt: skip
    weights_of(given.kind).with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
