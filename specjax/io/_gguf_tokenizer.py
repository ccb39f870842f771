"""Builds a tokeniser from the metadata of a GGUF file, without torch."""

from collections.abc import Callable
from typing import Any

import tokenizers as tk
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from specjax.core import Registry
from specjax.io._gguf import GGUFFile

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"

# tokenizer.ggml.pre -> how text is cut before byte-pair merges.
_pre: Registry[Callable[[], Any]] = Registry("GGUF pre-tokeniser")
_kinds: Registry[Callable[[GGUFFile], tk.Tokenizer]] = Registry("GGUF tokeniser model")


def gguf_tokenizer(file: GGUFFile) -> Any:
    """Returns a `PreTrainedTokenizerFast`, or None where the file has no tokeniser.

    Raises:
        ValueError: a kind of tokeniser or pre-tokeniser that is not implemented.
    """
    fields = file.fields
    if "tokenizer.ggml.model" not in fields:
        return None
    from transformers import PreTrainedTokenizerFast

    try:
        backend = _kinds.get(fields["tokenizer.ggml.model"])(file)
    except ValueError as error:
        raise ValueError(f"{str(file.path)!r}: {error}") from None
    backend.add_tokens(_added(fields))
    backend.post_processor = _post_processor(fields)
    special = {
        name: fields["tokenizer.ggml.tokens"][fields[f"tokenizer.ggml.{key}"]]
        for name, key in {
            "bos_token": "bos_token_id",
            "eos_token": "eos_token_id",
            "unk_token": "unknown_token_id",
            "pad_token": "padding_token_id",
        }.items()
        if f"tokenizer.ggml.{key}" in fields
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=fields.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        model_max_length=int(file.get("context_length")),
        **special,
    )


@_kinds.register("gpt2")
def _byte_level(file: GGUFFile) -> tk.Tokenizer:
    """Byte-level BPE, with merges in the file."""
    fields = file.fields
    pre = fields.get("tokenizer.ggml.pre", "default")
    cut = _pre.get(pre)()
    merges = [tuple(m.split(" ", 1)) for m in fields["tokenizer.ggml.merges"]]
    backend = tk.Tokenizer(
        # Llama 3 takes a whole word that is in the vocabulary before it merges.
        models.BPE(vocab=_vocab(fields), merges=merges, ignore_merges=pre in _LLAMA3)
    )
    if pre in _QWEN2:
        backend.normalizer = normalizers.NFC()
    prefix = bool(fields.get("tokenizer.ggml.add_space_prefix", False))
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cut, level])
    backend.decoder = decoders.ByteLevel()
    return backend


@_kinds.register("llama")
def _sentencepiece(file: GGUFFile) -> tk.Tokenizer:
    """SentencePiece BPE: merges follow from the scores, unknown bytes fall back."""
    fields = file.fields
    vocab = _vocab(fields)
    unknown = fields["tokenizer.ggml.tokens"][
        fields.get("tokenizer.ggml.unknown_token_id", 0)
    ]
    backend = tk.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges_from_scores(vocab, fields["tokenizer.ggml.scores"]),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    spaces: list[Any] = [normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), *spaces] if prefix else spaces
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(
        [*parts, decoders.Strip(" ", 1, 0)] if prefix else parts
    )
    return backend


def merges_from_scores(
    vocab: dict[str, int], scores: list[float]
) -> list[tuple[str, str]]:
    """The merges that SentencePiece implies: every cut of a piece, best score first."""
    found = []
    for piece, index in vocab.items():
        cuts = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        known = [(a, b) for a, b in cuts if a in vocab and b in vocab]
        known.sort(key=lambda cut: (vocab[cut[0]], vocab[cut[1]]))
        found += [(-scores[index], index, a, b) for a, b in known]
    found.sort(key=lambda merge: merge[:2])
    return [(a, b) for _, _, a, b in found]


def _vocab(fields) -> dict[str, int]:
    """Token -> id, without the rows that only pad the embedding."""
    tokens = fields["tokenizer.ggml.tokens"]
    kinds = fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
    return {
        token: index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind != _UNUSED
    }


def _added(fields) -> list[tk.AddedToken]:
    tokens = fields["tokenizer.ggml.tokens"]
    return [
        tk.AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(
            tokens, fields.get("tokenizer.ggml.token_type", ()), strict=False
        )
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _post_processor(fields) -> Any:
    """Puts the begin and end tokens where the metadata asks for them."""
    is_spm = fields["tokenizer.ggml.model"] == "llama"
    tokens = fields["tokenizer.ggml.tokens"]
    single, ids = ["$A"], {}
    for place, name, default in ((0, "bos", is_spm), (2, "eos", False)):
        index = fields.get(f"tokenizer.ggml.{name}_token_id")
        if (
            fields.get(f"tokenizer.ggml.add_{name}_token", default)
            and index is not None
        ):
            single.insert(place, tokens[index])
            ids[tokens[index]] = index
    if ids:
        pair = [*single, *(f"{part}:1" for part in single)]
        pair = [part.replace("$A:1", "$B:1") for part in pair]
        return processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=list(ids.items())
        )
    if is_spm:
        return processors.TemplateProcessing(single="$A", pair="$A $B:1")
    return processors.ByteLevel(trim_offsets=False)


def _split(*patterns: str) -> list[Any]:
    return [pre_tokenizers.Split(tk.Regex(p), "isolated") for p in patterns]


_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_QWEN2 = ("qwen2", "deepseek-r1-qwen")
for _name in _LLAMA3:
    _pre.register(_name)(lambda: _split(rf"{_WORD}|\p{{N}}{{1,3}}|{_TAIL}"))
for _name in _QWEN2:
    _pre.register(_name)(lambda: _split(rf"{_WORD}|\p{{N}}|{_TAIL}"))
_pre.register("gpt-2")(lambda: _split(_GPT2))
_pre.register("default")(
    lambda: _split(
        r"[\p{P}\$\+<=>\^~\|]+",
        _GPT2.removesuffix(r"|\s+"),
        r"\p{N}+",
        "[0-9][0-9][0-9]",
    )
)
_pre.register("smollm")(
    lambda: [pre_tokenizers.Digits(individual_digits=True), *_split(_GPT2)]
)
