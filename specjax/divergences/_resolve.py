"""Divergences by name, with their options bound."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from specjax.core import near
from specjax.divergences._divergences import registry


@dataclass(frozen=True)
class Divergence:
    """A registered divergence and its options: hashable, equal if both are equal.

    So it can be part of a static argument of `jax.jit` without tracing again, which a
    `functools.partial` cannot.
    """

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    def __call__(
        self, log_p: Float[Array, "*B V"], log_q: Float[Array, "*B V"]
    ) -> Float[Array, "*B"]:
        """The divergence of q from p, summed over the last axis."""
        return registry.get(self.name)(log_p, log_q, **dict(self.options))


def names() -> tuple[str, ...]:
    """The registered divergences."""
    return registry.names()


def get(name: str) -> Callable[..., Array]:
    """The function registered under `name`; a ValueError lists near names."""
    return registry.get(name)


def resolve(name: str, **options: Any) -> Divergence:
    """Binds options to a divergence.

    Args:
        name: one of `names()`.
        **options: keyword arguments of the function behind `log_p, log_q`.

    Returns:
        A hashable `(log_p, log_q) -> [*B]`.

    Raises:
        ValueError: an unknown name or option.

    Example:
        >>> resolve("jsd", beta=0.1) == resolve("jsd", beta=0.1)
        True
    """
    known = list(inspect.signature(get(name)).parameters)[2:]
    for option in options:
        if option not in known:
            hint = near(option, known) if known else "it has none."
            raise ValueError(f"divergence {name!r} has no option {option!r}; {hint}")
    bound = Divergence(name, tuple(sorted(options.items())))
    _check_values(bound)
    return bound


def parse(text: str) -> Divergence:
    """Reads a divergence as one writes it: `tvd`, or `jsd(beta=0.1)`.

    Raises:
        ValueError: an unknown name or option, or a text of another form.

    Example:
        >>> parse("jsd(beta=0.1)") == resolve("jsd", beta=0.1)
        True
    """
    form = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", text)
    if form is None:
        raise ValueError(f"a divergence is written name or name(x=1), got {text!r}")
    options = {}
    for part in filter(None, (form[2] or "").split(",")):
        name, _, value = part.partition("=")
        try:
            options[name.strip()] = float(value)
        except ValueError:
            raise ValueError(
                f"an option of a divergence is written x=1, got {part.strip()!r} in "
                f"{text!r}"
            ) from None
    return resolve(form[1], **options)


def _check_values(bound: Divergence) -> None:
    """Calls it on one token, so that a wrong value fails here and not in a trace."""
    one = jax.ShapeDtypeStruct((1,), jnp.float32)
    jax.eval_shape(bound, one, one)
