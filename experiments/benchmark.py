"""How fast decoding is, as ratios measured in one run.

    python -m experiments.benchmark                  # about 5 minutes on 2 cores
    python -m experiments.benchmark --only plain     # one part

Parts, each with its own lines in the table and in `--json FILE`:

- plain: SmolLM2-135M, greedy, batch 1, float32, against transformers (extra `parity`)
  and against the machine's memory bandwidth. Aim on a CPU: 2.2 times transformers.
  Measured on 2 cores that read 20 GB/s: 1.5 times, at 0.7 of the bandwidth.
- overhead: a speculative round over the sum of its passes timed alone. Expected: at
  most 1.10.
- pair: speculative over plain decoding for the pair that the main job left in
  `--pair` (default runs/quick), batch 1 and 8.
- recompile: compilations in 100 rounds after warm-up. Expected: 0.
- on_policy: generated tokens a second of an on-policy distillation step, SmolLM2-135M
  teaching its own first 4 layers, against TRL's GKD trainer (extra `parity`).
  Expected on a CPU: at least 3 times TRL's.

The sides of a ratio take turns, compilation is kept apart, and every call is finished
before the clock is read.
"""

import argparse
import importlib.util
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import specjax
from experiments._benchmark_models import first_layers, in_transformers
from experiments._benchmark_on_policy import on_policy
from experiments._config import run, write_atomically
from specjax import drafters, evals
from specjax.core import Checkpoint, Sampling
from specjax.data import chat_prompts
from specjax.decoding import prepare

PROMPT = "Explain the difference between a kernel and a hypervisor."
GREEDY = Sampling(temperature=0.0)


def main() -> None:
    """Measures the parts that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=sorted(PARTS), action="append")
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--pair", type=Path, default=Path("runs/quick"))
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    for name in args.only or PARTS:
        print(f"measuring: {name}", flush=True)
        figures[name] = PARTS[name](args)
    show(figures)
    if args.json:
        write_atomically(args.json, evals.to_json(figures))


def plain(args: argparse.Namespace) -> dict[str, Any]:
    """Plain greedy decoding against transformers and the memory bandwidth."""
    target = specjax.load(args.target, dtype="float32")
    ids = _chat_ids(target)
    job = prepare(
        target,
        [ids],
        sampling=GREEDY,
        max_new_tokens=args.new_tokens,
        eos_token_ids=[],
    )
    array = jnp.ones((128 * 1024 * 1024,), jnp.float32)  # 512 MiB, out of any cache
    read = jax.jit(jnp.sum)
    calls: dict[str, Callable[[], Any]] = {
        "specjax": lambda: job.run(job.start()),
        "prefill": job.start,
        "bandwidth": lambda: read(array),
    }
    if importlib.util.find_spec("torch") is not None:
        calls["transformers"] = _transformers(target, ids, args.new_tokens)
    times = evals.measure(calls, repeats=args.repeats, budget_s=240)
    prefill = times["prefill"].median_s
    weights = sum(x.nbytes for x in jax.tree.leaves(target.params))
    bandwidth = array.nbytes / times["bandwidth"].median_s
    per_token = (times["specjax"].median_s - prefill) / args.new_tokens
    found = {
        "tokens_per_s": 1 / per_token,
        "prefill_ms": 1e3 * prefill,
        "compile_s": times["specjax"].compile_s,
        "bandwidth_gb_s": bandwidth / 1e9,
        "share_of_bandwidth": weights / per_token / bandwidth,
    }
    if "transformers" in times:
        # Both with their prefill: whole calls, the same tokens.
        found["over_transformers"] = evals.ratio(
            times["transformers"], times["specjax"]
        )
        found["transformers_tokens_per_s"] = (
            args.new_tokens / times["transformers"].median_s
        )
    else:
        found["over_transformers"] = None  # install the extra `parity`
    return found


def overhead(args: argparse.Namespace) -> dict[str, Any]:
    """A round over its passes, the target drafting for itself with two layers."""
    target = specjax.load(args.target, dtype="float32")
    draft = first_layers(target, 2)
    gamma = 4
    job = prepare(
        target,
        [_chat_ids(target)],
        drafter=drafters.TwoModel(draft, gamma=gamma),
        sampling=GREEDY,
        max_new_tokens=args.new_tokens,
        eos_token_ids=[],
    )
    evals.run_once(target, job)
    ratios, rounds_ms = [], []
    for _ in range(args.repeats):
        _, seconds, out = evals.run_once(target, job)
        a_round = seconds / int(out.stats.rounds.sum())
        costs = evals.pass_costs(
            target, draft, batch=1, gamma=gamma, capacity=job.capacity, repeats=1
        )
        # The first draft pass of a round reads two tokens: time it as it is.
        two = evals.pass_costs(
            draft, draft, batch=1, gamma=1, capacity=job.capacity, repeats=1
        )
        passes = (
            costs["verify"].median_s
            + two["verify"].median_s
            + (gamma - 1) * costs["draft"].median_s
        )
        ratios.append(a_round / passes)
        rounds_ms.append(1e3 * a_round)
    return {
        "round_over_passes": float(np.median(ratios)),
        "round_ms": float(np.median(rounds_ms)),
    }


def pair(args: argparse.Namespace) -> dict[str, Any]:
    """Speculative over plain decoding for a pair that the main job trained."""
    if not (args.pair / "draft").is_dir():
        raise FileNotFoundError(
            f"{args.pair} holds no draft: run python -m experiments.distillspec first, "
            "or name its workdir with --pair"
        )
    config = json.loads((args.pair / "config.json").read_text())["config"]
    source = config["target"]["source"] or str(args.pair / "target")
    target, draft = specjax.load(source), specjax.load(args.pair / "draft")
    prompts = json.loads((args.pair / "prompts.json").read_text())
    gamma, found = config["eval"]["gamma"], {}
    for batch in (1, 8):
        for decoding, temperature in (("greedy", 0.0), ("T=1", 1.0)):
            arm = evals.compare(
                target,
                {"draft": drafters.TwoModel(draft, gamma=gamma)},
                prompts[: 2 * batch + 6],
                batch=batch,
                max_new_tokens=config["eval"]["max_new_tokens"],
                sampling=Sampling(temperature=temperature),
                repeats=3,
            )["draft"]
            found[f"{decoding}, batch {batch}: speed-up"] = arm.speedup
            found[f"{decoding}, batch {batch}: tau"] = arm.stats.block_efficiency
    return found


def recompile(args: argparse.Namespace) -> dict[str, Any]:
    """Compilations while 100 rounds of varied requests run, after one warm-up."""
    target = specjax.load(args.target, dtype="float32")
    draft = first_layers(target, 1)
    ids, rounds, compiled = _chat_ids(target), 0, []

    def request(number: int) -> int:
        out = specjax.generate(
            target,
            [ids[: len(ids) - number % 3]],
            drafter=drafters.TwoModel(draft, gamma=2),
            sampling=Sampling(temperature=0.5 + 0.1 * (number % 3)),
            max_new_tokens=12 + number % 3,  # with the prompt, one bucket of lengths
            seed=number,
            eos_token_ids=[number],
        )
        return int(out.stats.rounds.sum())

    request(0)
    with _compilations(compiled):
        number = 1
        while rounds < 100:
            rounds += request(number)
            number += 1
    return {"rounds": rounds, "requests": number - 1, "compilations": len(compiled)}


class _compilations(logging.Handler):
    """Collects the names of what JAX compiles while it is entered."""

    def __init__(self, names: list[str]):
        super().__init__()
        self._names = names

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the messages that tell of a compilation."""
        if "Compiling" in record.getMessage():
            self._names.append(record.getMessage())

    def __enter__(self):
        jax.config.update("jax_log_compiles", True)
        self._loggers = [
            logging.getLogger(name)
            for name in ("jax._src.interpreters.pxla", "jax._src.dispatch")
        ]
        for logger in self._loggers:
            logger.addHandler(self)
            logger.propagate = False

    def __exit__(self, *_):
        jax.config.update("jax_log_compiles", False)
        for logger in self._loggers:
            logger.removeHandler(self)
            logger.propagate = True


def show(figures: dict[str, Any]) -> None:
    """The figures as a table."""
    table = Table(title=f"{jax.devices()[0].device_kind}, {time.strftime('%Y-%m-%d')}")
    for name in ("part", "figure", "value"):
        table.add_column(name, justify="right" if name == "value" else "left")
    for part, values in figures.items():
        for index, (name, value) in enumerate(values.items()):
            text = f"{value:.3g}" if isinstance(value, float) else str(value)
            table.add_row(
                part if index == 0 else "",
                name,
                "-" if value is None else text,
                end_section=index == len(values) - 1,
            )
    Console(width=80).print(table)


def _chat_ids(target: Checkpoint) -> list[int]:
    return chat_prompts(target.tokenizer, [PROMPT]).tokens[0]


def _transformers(target: Checkpoint, ids: list[int], new_tokens: int):
    """Greedy decoding of the same weights in transformers."""
    import torch

    model = in_transformers(target)[0].eval()
    prompt = torch.tensor([ids])

    def call():
        with torch.no_grad():
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                pad_token_id=0,
            )
        return out.numpy()

    return call


PARTS = {
    "plain": plain,
    "overhead": overhead,
    "pair": pair,
    "recompile": recompile,
    "on_policy": on_policy,
}

if __name__ == "__main__":
    run(main)
