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
from specjax.data._conversations import (
    Conversation,
    chat_examples,
    load_conversations,
    text_examples,
)
from specjax.data._corpus import (
    Document,
    load_documents,
    read_folder,
    split,
    standard_library,
)
from specjax.data._frequency import FrequentTokens, count_tokens, frequent_tokens
from specjax.data._packing import Batches, pack, pad_prompts
from specjax.data._prompts import Prompt, load_prompts, packaged_prompts
from specjax.data._tokenizer import encode, train_bpe

__all__ = [
    "Batches",
    "Conversation",
    "Document",
    "EncodedPrompts",
    "Example",
    "FrequentTokens",
    "PaddedExamples",
    "Prompt",
    "chat_example",
    "chat_examples",
    "chat_prompts",
    "completion_example",
    "completion_mask",
    "count_tokens",
    "encode",
    "frequent_tokens",
    "load_conversations",
    "load_documents",
    "load_prompts",
    "pack",
    "packaged_prompts",
    "pad_examples",
    "pad_prompts",
    "read_folder",
    "render",
    "split",
    "standard_library",
    "text_examples",
    "text_prompts",
    "train_bpe",
]
