"""The MoE architectures of transformers, each as a tiny seeded model whose true routing is known.

    built = build("qwen3_moe")
    built.model(**built.inputs[0])
    built.truth(built.inputs[0])        # {decoder layer: int64 [T, k]}

The truth comes from one eager run: hooks mark when a router module runs, and a dispatch mode sees what it chooses then.
The ids are those that the router returns, where it returns them. No graph is involved.

Legend: T tokens in the step, E experts (zero experts included), k experts per token.
"""

# ruff: noqa: C408  (configs read best as keyword arguments)
from __future__ import annotations

import dataclasses
import re
import warnings
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from tiny import MARGIN, margin
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Inputs = dict[str, Any]

VOCAB = 96
SHAPES = ((2, 9), (3, 5))


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One row of the table.

    Attributes:
        model: class name in transformers.
        layers: "d" for a dense decoder layer, "s" for one with experts.
        config: arguments of the config.
        router: pattern for "path:class" of the modules that route.
        ordered: whether the router promises an order of its choices.
    """

    model: str
    layers: str
    experts: int
    top_k: int
    config: dict[str, Any]
    config_class: str = ""
    router: str = r":\w*(Router|Gating)$"
    ordered: bool = True

    @property
    def sparse(self) -> list[int]:
        return [i for i, kind in enumerate(self.layers) if kind == "s"]


@dataclasses.dataclass
class Built:
    """A model in eval mode, float32.

    Attributes:
        inputs: keyword arguments of two calls, with tokens [2, 9] and [3, 5].
    """

    architecture: Architecture
    model: nn.Module
    inputs: list[Inputs]

    @property
    def routers(self) -> dict[str, nn.Module]:
        """By path, in the order of the model."""
        pattern = self.architecture.router
        return {path: m for path, m in self.model.named_modules() if re.search(pattern, f"{path}:{type(m).__name__}")}

    @property
    def decoder_layers(self) -> list[nn.Module]:
        """The blocks of the list that holds the routers."""
        path = re.split(r"\.\d+(?:\.|$)", next(iter(self.routers)))[0]
        return list(self.model.get_submodule(path).children())

    def truth(self, inputs: Inputs) -> dict[int, Tensor]:
        """int64 [T, k] by decoder layer, in the order in which the router chose.

        Asserts that the layers, E and k are those of the architecture, and that no choice is a near-tie.
        """
        found: dict[int, Tensor] = {}
        with watched(self.routers.values()) as seen, torch.no_grad():
            self.model(**inputs)
        for path, module in self.routers.items():
            layer = int(re.findall(r"\d+", path)[0])
            assert layer not in found and len(seen[module].returned) == 1, f"{path} ran more than once"
            found[layer] = seen[module].ids(self.architecture)
        assert sorted(found) == self.architecture.sparse
        return found


class Seen:
    """What one router did: the selections that it made, and what it returned."""

    def __init__(self) -> None:
        self.selections: list[tuple[Tensor, Tensor]] = []
        self.returned: list[Any] = []

    def ids(self, architecture: Architecture) -> Tensor:
        k = architecture.top_k
        chosen = []
        for scores, ids in self.selections:
            if scores.shape[-1] == architecture.experts:
                assert margin(scores, ids.shape[-1]) > MARGIN, "a near-tie: give the architecture another seed"
                chosen.append(ids)
        leaves = [t for t in torch.utils._pytree.tree_leaves(self.returned) if isinstance(t, Tensor)]
        returned = [t for t in leaves if t.dtype == torch.int64 and t.dim() >= 2 and t.shape[-1] == k]
        if returned and returned[-1].max() < architecture.experts:
            chosen = returned
        ids = next(ids for ids in reversed(chosen) if ids.shape[-1] == k)
        return ids.flatten(0, -2)


class Watch(TorchDispatchMode):
    """Hands every selection to the routers that run at that moment."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[Seen] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for seen in self.running:
            if func is torch.ops.aten.topk.default:
                seen.selections.append((args[0], result[1]))
            elif func is torch.ops.aten.max.dim:
                seen.selections.append((args[0], result[1] if len(args) > 2 and args[2] else result[1].unsqueeze(-1)))
        return result


@contextmanager
def watched(modules: Any) -> Iterator[dict[nn.Module, Seen]]:
    watch, found = Watch(), {module: Seen() for module in modules}

    def begin(module: nn.Module, args: Any) -> None:
        watch.running.append(found[module])

    def end(module: nn.Module, args: Any, result: Any) -> None:
        found[module].returned.append(result)
        watch.running.pop()

    with ExitStack() as stack:
        for module in found:
            stack.callback(module.register_forward_pre_hook(begin).remove)
            stack.callback(module.register_forward_hook(end).remove)
        stack.enter_context(watch)
        yield found


def build(name: str, experts_implementation: str | None = None) -> Built:
    import transformers

    architecture = ARCHITECTURES[name]
    torch.manual_seed(zlib.crc32(name.encode()) + SEEDS.get(name, 0))
    model_class = getattr(transformers, architecture.model)
    config_class = getattr(transformers, architecture.config_class or model_class.config_class.__name__)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model_class(config_class(**architecture.config)).float().eval()
    if experts_implementation is not None:
        model.set_experts_implementation(experts_implementation)
    randomise(model)
    ids = [torch.randint(3, VOCAB, shape) for shape in SHAPES]
    if model.config.is_encoder_decoder:
        return Built(architecture, model, [{"input_ids": i, "decoder_input_ids": i, "use_cache": False} for i in ids])
    return Built(architecture, model, [{"input_ids": i, "use_cache": False} for i in ids])


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Weights large enough for clear choices; what a recurrence or a rotation needs as it is stays as it is."""
    keep = re.compile(r"A_log|dt_bias|conv|inv_freq|slope|sinks|hc_|hyper|rel_|relative", re.IGNORECASE)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if keep.search(name) or not tensor.is_floating_point():
            continue
        if tensor.dim() >= 2:
            tensor.copy_(torch.randn(tensor.shape) * (1.0 if id(tensor) in embeddings else tensor.shape[-1] ** -0.5))
        elif "bias" in name:  # of a linear, or what balances the choice of experts
            tensor.add_(torch.randn(tensor.shape) * 0.05)


# ---- the table -------------------------------------------------------------------------------------------------------
ARCHITECTURES: dict[str, Architecture] = {}
SEEDS: dict[str, int] = {}

# fmt: off
PLAIN = dict(
    vocab_size=VOCAB, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, head_dim=8,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
)
LATENT = PLAIN | dict(
    num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
)
GROUPS = dict(n_group=4, topk_group=2)
INDEXER = dict(index_topk=4, index_head_dim=16, index_n_heads=2)  # as many tokens as experts, to mislead
LINEAR_ATTENTION = dict(
    linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
)
UNORDERED = dict(ordered=False)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MROPE = ROPE | {"mrope_section": [2, 1, 1]}
# fmt: on


def add(
    name: str,
    model: str,
    layers: str,
    experts: str,
    count: int = 8,
    top_k: int = 3,
    per_token: str = "num_experts_per_tok",
    dense: str = "",
    base: dict[str, Any] = PLAIN,
    window: bool = False,
    wrap: str = "",
    zero_experts: int = 0,
    row: dict[str, Any] | None = None,
    **config: Any,
) -> None:
    """Add one architecture.

    Args:
        experts, per_token: how its config spells E and k.
        dense: how its config says which layers are dense; "" where it cannot, or `config` says so itself.
        window: it has sliding-window layers, which are to be off.
        wrap: the sub-config that all of this belongs to.
        row: further fields of `Architecture`.
    """
    kinds = ["dense" if kind == "d" else "sparse" for kind in layers]
    spelled = {
        "": {},
        "mlp_layer_types": {"mlp_layer_types": kinds},
        "mlp_only_layers": {"mlp_only_layers": [i for i, kind in enumerate(layers) if kind == "d"]},
        "first_k_dense_replace": {"first_k_dense_replace": layers.count("d")},
        "num_dense_layers": {"num_dense_layers": layers.count("d")},
    }[dense]
    merged = base | {"num_hidden_layers": len(layers), experts: count, per_token: top_k, "moe_intermediate_size": 16}
    merged |= spelled
    if window:
        merged |= {"sliding_window": 8, "layer_types": ["full_attention"] * len(layers)}
    merged |= config
    if wrap:
        outer = {key: merged.pop(key) for key in list(merged) if key.startswith(("vision_", "image_", "video_"))}
        merged = {wrap: merged, **outer}
    ARCHITECTURES[name] = Architecture(model, layers, count + zero_experts, top_k, merged, **(row or {}))


# fmt: off
# Softmax over all experts, then top-k.
add("mixtral", "MixtralForCausalLM", "ss", "num_local_experts", top_k=2)
add(
    "qwen2_moe", "Qwen2MoeForCausalLM", "dss", "num_experts", dense="mlp_only_layers", window=True,
    shared_expert_intermediate_size=24,
)
add("qwen3_moe", "Qwen3MoeForCausalLM", "dss", "num_experts", dense="mlp_only_layers", norm_topk_prob=True)
add("qwen3_moe_sparse_step", "Qwen3MoeForCausalLM", "dsds", "num_experts", decoder_sparse_step=2)
add(
    "qwen3_next", "Qwen3NextForCausalLM", "dss", "num_experts", dense="mlp_only_layers",
    shared_expert_intermediate_size=16, layer_types=["linear_attention", "linear_attention", "full_attention"],
    **LINEAR_ATTENTION,
)
add(
    "qwen3_5_moe", "Qwen3_5MoeForCausalLM", "ss", "num_experts", head_dim=32, shared_expert_intermediate_size=16,
    layer_types=["linear_attention", "full_attention"], **LINEAR_ATTENTION,
)
add(
    "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", "dss", "num_experts", dense="mlp_only_layers",
    wrap="text_config", rope_parameters=MROPE | {"mrope_interleaved": True}, image_token_id=90, video_token_id=91,
    vision_start_token_id=92, vision_end_token_id=93,
    vision_config=dict(
        depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32, num_position_embeddings=16,
        deepstack_visual_indexes=[0],
    ),
)
add("olmoe", "OlmoeForCausalLM", "ss", "num_experts")
add(
    "jamba", "JambaForCausalLM", "dsds", "num_experts", top_k=2, expert_layer_period=2, expert_layer_offset=1,
    attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4, mamba_dt_rank=4,
)
add("mellum", "MellumForCausalLM", "dss", "num_experts", dense="mlp_layer_types", window=True)
add(
    "dbrx", "DbrxForCausalLM", "ss", "unused", base={}, vocab_size=VOCAB, d_model=32, n_heads=4, n_layers=2,
    max_seq_len=64, attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=10000.0), rope_parameters=ROPE,
    ffn_config=dict(hidden_size=32, ffn_hidden_size=16, moe_num_experts=8, moe_top_k=3),
    row=dict(router=r":DbrxFFN$"),
)
add(
    "deepseek_v2_greedy", "DeepseekV2ForCausalLM", "dss", "n_routed_experts", dense="first_k_dense_replace",
    base=LATENT, row=UNORDERED,
)
add(
    "deepseek_v2", "DeepseekV2ForCausalLM", "dss", "n_routed_experts", dense="first_k_dense_replace", base=LATENT,
    topk_method="group_limited_greedy", row=UNORDERED, **GROUPS,
)
add(
    "mistral4", "Mistral4ForCausalLM", "dss", "n_routed_experts", dense="first_k_dense_replace", base=LATENT,
    row=UNORDERED, rope_parameters=ROPE | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 32},
    **GROUPS,
)
add(
    "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", "dss", "moe_num_experts", per_token="moe_k",
    moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=2,
)
add(
    "longcat_flash", "LongcatFlashForCausalLM", "ss", "n_routed_experts", per_token="moe_topk", base=LATENT,
    num_hidden_layers=4, zero_expert_num=4, ffn_hidden_size=48, expert_ffn_hidden_size=16, zero_experts=4,
)
add(
    "unlimited_ocr_text", "UnlimitedOcrTextModel", "dss", "n_routed_experts", dense="mlp_layer_types", window=True,
    n_shared_experts=1, row=UNORDERED,
)

# Top-k of the logits, then softmax over the chosen.
add("gpt_oss", "GptOssForCausalLM", "ss", "num_local_experts", sliding_window=8)
add("granitemoe", "GraniteMoeForCausalLM", "ss", "num_local_experts")
add("granitemoeshared", "GraniteMoeSharedForCausalLM", "ss", "num_local_experts", shared_intermediate_size=24)
add(
    "granitemoe_swa", "GraniteMoeSWAForCausalLM", "ss", "num_local_experts", shared_intermediate_size=24,
    sliding_window=8,
)
add(
    "jetmoe", "JetMoeForCausalLM", "ss", "num_local_experts", top_k=2, kv_channels=8,
    row=dict(router=r"mlp\.router:"),
)
add(
    "cohere2_moe", "Cohere2MoeForCausalLM", "dss", "num_experts", dense="mlp_layer_types", window=True,
    num_shared_experts=1, prefix_dense_intermediate_size=48,
)
add(
    "llama4_text", "Llama4ForCausalLM", "dss", "num_local_experts", top_k=2, intermediate_size_mlp=48,
    attention_chunk_size=8, moe_layers=[1, 2],
)

# Sigmoid scores with a bias that only chooses.
add("afmoe", "AfmoeForCausalLM", "dss", "num_experts", dense="num_dense_layers", window=True, num_shared_experts=1)
add(
    "lfm2_moe", "Lfm2MoeForCausalLM", "dss", "num_experts", dense="num_dense_layers",
    layer_types=["conv", "full_attention", "conv"],
)
add(
    "laguna", "LagunaForCausalLM", "dss", "num_experts", dense="mlp_layer_types", window=True,
    shared_expert_intermediate_size=16, moe_router_logit_softcapping=4.0,
)
add("minimax_m2", "MiniMaxM2ForCausalLM", "ss", "num_local_experts")
add(
    "step3p7_text", "Step3p7TextModel", "dss", "n_routed_experts", dense="mlp_layer_types", window=True,
    share_expert_dim=16,
)
add(
    "muse_spark_text", "MuseSparkTextModel", "dss", "num_local_experts", dense="mlp_layer_types", sliding_window=8,
    moe_hidden_size=24,
)
add(
    "inkling2_text", "Inkling2ForCausalLM", "ss", "n_routed_experts", swa_num_attention_heads=4,
    swa_num_key_value_heads=2, swa_head_dim=8, sliding_window_size=8, d_rel=4, rel_extent=16,
    unpadded_vocab_size=VOCAB, n_layers_per_attn_res_block=2, route_scale=1.0,
)

# Sigmoid scores with a bias, and groups of experts of which the best ones stay.
for name, model, base, dense, more in [
    ("deepseek_v3", "DeepseekV3ForCausalLM", LATENT, "first_k_dense_replace", {}),
    ("deepseek_v32", "DeepseekV32ForCausalLM", LATENT, "first_k_dense_replace", INDEXER),
    ("glm_moe_dsa", "GlmMoeDsaForCausalLM", LATENT, "first_k_dense_replace", INDEXER),
    ("glm4_moe", "Glm4MoeForCausalLM", PLAIN, "first_k_dense_replace", {}),
    ("glm4_moe_lite", "Glm4MoeLiteForCausalLM", LATENT, "mlp_layer_types", {}),
    (
        "glm4v_moe_text", "Glm4vMoeTextModel", PLAIN, "first_k_dense_replace",
        {"rope_parameters": MROPE | {"partial_rotary_factor": 1.0}},
    ),
    ("axk1", "AXK1ForCausalLM", LATENT, "mlp_layer_types", {}),
    (
        "dots1", "Dots1ForCausalLM", PLAIN, "first_k_dense_replace",
        {"window": True, "n_shared_experts": 1, "norm_topk_prob": True},
    ),
    ("mimo_v2_flash", "MiMoV2FlashForCausalLM", PLAIN, "mlp_layer_types", {"window": True, "v_head_dim": 8}),
    ("hy_v4", "HYV4ForCausalLM", LATENT, "mlp_layer_types", INDEXER | {"head_dim": 16, "hc_mult": 2}),
    ("solar_open", "SolarOpenForCausalLM", PLAIN, "", {}),
    (
        "sarvam_moe", "Glm4MoeForCausalLM", PLAIN, "first_k_dense_replace",
        {"row": dict(config_class="SarvamMoEConfig", ordered=False)},
    ),
]:
    add(
        name, model, "dss" if dense else "ss", "n_routed_experts", 16, 4, dense=dense, base=base,
        **{"row": UNORDERED} | GROUPS | more,
    )
for name, model in [("beam", "BeamForCausalLM"), ("exaone_moe", "ExaoneMoeForCausalLM")]:
    add(name, model, "dss", "num_experts", 16, 4, dense="mlp_layer_types", window=True, row=UNORDERED, **GROUPS)
add(
    "kimi_linear", "KimiLinearForCausalLM", "dss", "num_local_experts", 16, 4, dense="mlp_layer_types",
    base=LATENT, q_lora_rank=None, linear_head_dim=8, linear_num_heads=4,
    layer_types=["linear_attention", "full_attention", "linear_attention"], row=UNORDERED, **GROUPS,
)
add(
    "nemotron_h", "NemotronHForCausalLM", "dsds", "n_routed_experts", 16, 4,
    layers_block_type=["mamba", "moe", "attention", "moe"], ssm_state_size=4, mamba_num_heads=8, mamba_head_dim=8,
    n_groups=2, chunk_size=8, moe_shared_expert_intermediate_size=16, row=UNORDERED, **GROUPS,
)

# No top-k at all: two max with a mask between them; an argmax.
add("phimoe", "PhimoeForCausalLM", "ss", "num_local_experts", top_k=2)
add(
    "switch_transformers", "SwitchTransformersForConditionalGeneration", "dsds", "num_experts", top_k=1, base={},
    vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=24, num_layers=2, num_sparse_encoder_layers=1, num_decoder_layers=4,
    num_sparse_decoder_layers=2, num_heads=4, expert_capacity=64, pad_token_id=0, decoder_start_token_id=0,
    row=dict(router=r"^decoder\..*:\w*Router$"),
)
# fmt: on
