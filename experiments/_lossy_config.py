"""Settings of `experiments.lossy`, and its presets."""

from dataclasses import dataclass, field

from experiments._distillspec_config import PRESETS as BASES
from experiments._distillspec_config import Config as Base
from specjax import verifiers
from specjax.core import Verifier


@dataclass(frozen=True)
class Lossy:
    """Which ways to accept are compared, and on what.

    Attributes:
        epsilons: of f_lin, f_sq and f_exp, each in (0, 1).
        typical: epsilons of typical acceptance, whose delta is sqrt(epsilon).
        gamma: G.
        prompts: held-out prompts.
        max_new_tokens: tokens added to each.
        batch: rows decoded together.
        temperature: of sampling, > 0.
        repeats: timed runs of each batch; the fastest counts.
    """

    epsilons: tuple[float, ...] = (0.8, 0.5, 0.2, 0.05)
    typical: tuple[float, ...] = (0.3, 0.1, 0.03)
    gamma: int = 4
    prompts: int = 32
    max_new_tokens: int = 64
    batch: int = 1
    temperature: float = 1.0
    repeats: int = 1

    def __post_init__(self):
        self.verifiers()  # they check their own settings
        for name in ("gamma", "prompts", "max_new_tokens", "batch", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"lossy.{name} must be at least 1, got {getattr(self, name)}"
                )
        if self.batch > self.prompts:
            raise ValueError(
                f"lossy.batch must be at most lossy.prompts={self.prompts}, got "
                f"{self.batch}"
            )
        if not 0 < self.temperature < float("inf"):
            raise ValueError(
                "lossy.temperature must be > 0 (an arg max has no likelihood to lose), "
                f"got {self.temperature}"
            )

    def verifiers(self) -> dict[str, list[tuple[float, Verifier]]]:
        """A curve a function: its verifiers by their epsilon."""
        names = ("lossy_lin", "lossy_sq", "lossy_exp")
        curves: dict[str, list[tuple[float, Verifier]]] = {
            name: [(e, verifiers.get(name)(epsilon=e)) for e in self.epsilons]
            for name in names
        }
        curves["typical"] = [
            (e, verifiers.Typical(epsilon=e, delta=e**0.5)) for e in self.typical
        ]
        return {name: curve for name, curve in curves.items() if curve}


@dataclass(frozen=True)
class Config:
    """The trade-off, and the pair that it is drawn for."""

    lossy: Lossy = field(default_factory=Lossy)
    base: Base = field(default_factory=Base)

    def __post_init__(self):
        if self.lossy.prompts > self.base.eval.prompts:
            raise ValueError(
                f"lossy.prompts must be at most base.eval.prompts="
                f"{self.base.eval.prompts}, got {self.lossy.prompts}"
            )


PRESETS = {
    "quick": Config(),
    "smollm2": Config(
        Lossy(
            epsilons=(0.5, 0.1), typical=(0.1,), gamma=2, prompts=8, max_new_tokens=48
        ),
        base=BASES["smollm2"],
    ),
}
