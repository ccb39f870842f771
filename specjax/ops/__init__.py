"""Pure array maths without parameters (level 1)."""

from specjax.ops._attention import attention
from specjax.ops._chunks import chunk_size, cut_chunks, map_chunks, sum_chunks
from specjax.ops._rope import apply_rope, rope_frequencies, rope_kinds
from specjax.ops._sample import fold, row_keys, sample
from specjax.ops._tree import lineage, parent_rows, tree_depth
from specjax.ops._vocabulary import locate, restrict, spread
from specjax.ops._warp import fit_vocabulary, one_hot_log, warp

__all__ = [
    "apply_rope",
    "attention",
    "chunk_size",
    "cut_chunks",
    "fit_vocabulary",
    "fold",
    "lineage",
    "locate",
    "map_chunks",
    "one_hot_log",
    "parent_rows",
    "restrict",
    "rope_frequencies",
    "rope_kinds",
    "row_keys",
    "sample",
    "spread",
    "sum_chunks",
    "tree_depth",
    "warp",
]
