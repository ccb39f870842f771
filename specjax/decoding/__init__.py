"""Plain and speculative decoding: one loop, and `generate` around it (level 4)."""

from specjax.decoding._decode import Decoded, decode, make_rules
from specjax.decoding._generate import (
    Generation,
    Job,
    bucket,
    collect,
    generate,
    prepare,
)
from specjax.decoding._loop import Decoder, DecodeState, NoDraft
from specjax.decoding._rules import FINISH_REASONS, Rules, StopStrings

__all__ = [
    "FINISH_REASONS",
    "DecodeState",
    "Decoded",
    "Decoder",
    "Generation",
    "Job",
    "NoDraft",
    "Rules",
    "StopStrings",
    "bucket",
    "collect",
    "decode",
    "generate",
    "make_rules",
    "prepare",
]
