"""Drafters by name."""

from specjax.core import Registry

registry: Registry = Registry("drafter")


def require_gamma(gamma: int) -> None:
    """Raises a ValueError unless `gamma` is a draft length."""
    if not isinstance(gamma, int) or isinstance(gamma, bool) or gamma < 1:
        raise ValueError(
            f"gamma, the tokens drafted in a round, must be a whole number >= 1, "
            f"got {gamma!r}"
        )
