"""Kinds of operators, by their spelling, that several files ask for. Those that make or contract values stand in `dataflow`."""

COMPARISONS = frozenset(["eq", "ne", "gt", "ge", "lt", "le", "isin"])
SELECTIONS = frozenset(["topk", "argmax", "argmin", "max", "min", "kthvalue", "multinomial", "argsort", "sort"])
PICKS = frozenset({"getitem", "index_select", "gather", "take_along_dim", "embedding", "take"})
"""Operators that read a value at an index."""

PIECES = frozenset({"chunk", "split", "tensor_split", "split_with_sizes", "unbind"})
"""Operators that cut a value into several."""

REARRANGE = frozenset({
    "view", "transpose", "permute", "expand", "contiguous", "clone", "detach", "to", "type_as", "float", "half",
    "bfloat16", "long", "int", "repeat",
})  # fmt: skip
"""Operators that keep all values, in another layout or another type."""

CASTS = frozenset({"to", "long", "int", "float", "type_as", "half", "bfloat16", "double", "convert_element_type"})
GROUPED = frozenset(["grouped_mm"])
