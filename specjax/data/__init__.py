"""Corpora, tokenisers, prompts and packing (level 2)."""

from specjax.data._chat import (
    EncodedPrompts,
    chat_example,
    chat_prompts,
    render,
    text_prompts,
)
from specjax.data._completions import (
    Example,
    PaddedExamples,
    completion_example,
    completion_mask,
    pad_examples,
)
from specjax.data._corpus import Document, read_folder, split, standard_library
from specjax.data._packing import Batches, pack, pad_prompts
from specjax.data._prompts import Prompt, load_prompts, packaged_prompts
from specjax.data._tokenizer import encode, train_bpe

__all__ = [
    "Batches",
    "Document",
    "EncodedPrompts",
    "Example",
    "PaddedExamples",
    "Prompt",
    "chat_example",
    "chat_prompts",
    "completion_example",
    "completion_mask",
    "encode",
    "load_prompts",
    "pack",
    "packaged_prompts",
    "pad_examples",
    "pad_prompts",
    "read_folder",
    "render",
    "split",
    "standard_library",
    "text_prompts",
    "train_bpe",
]
