"""The one decorator that makes a state record: a frozen dataclass that is a pytree."""

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax

T = TypeVar("T")


def static_field(**kwargs: Any) -> Any:
    """A dataclass field that is part of the pytree's structure, not a leaf of it."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(static_field,))
def record(cls: type[T]) -> type[T]:
    """Makes `cls` a frozen dataclass whose fields are pytree children.

    Fields declared with `static_field()` become part of the tree's structure: they must
    be hashable, and a function jitted over the record traces again when they change.
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    static = [f.name for f in fields if f.metadata.get("static")]
    return jax.tree_util.register_dataclass(
        cls,
        data_fields=[f.name for f in fields if f.name not in static],
        meta_fields=static,
    )
