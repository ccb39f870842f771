"""Corpora, tokenisers, prompts and packing (level 2)."""

from specjax.data._corpus import Document, read_folder, split, standard_library
from specjax.data._packing import Batches, pack, pad_prompts
from specjax.data._tokenizer import encode, train_bpe

__all__ = [
    "Batches",
    "Document",
    "encode",
    "pack",
    "pad_prompts",
    "read_folder",
    "split",
    "standard_library",
    "train_bpe",
]
