"""Checkpoints in and out: the hub, safetensors, GGUF and tokenisers (level 2)."""

from specjax.io._digests import model_digest, tokenizer_digest
from specjax.io._export import export
from specjax.io._fetch import fetch
from specjax.io._load import best_kernel_layout, load
from specjax.io._shared_vocabulary import share_vocabulary
from specjax.io._tokenizer import check_same_tokenizer, token_bytes

__all__ = [
    "best_kernel_layout",
    "check_same_tokenizer",
    "export",
    "fetch",
    "load",
    "model_digest",
    "share_vocabulary",
    "token_bytes",
    "tokenizer_digest",
]
