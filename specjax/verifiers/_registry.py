"""Verifiers by name."""

from specjax.core import Registry

registry: Registry = Registry("verifier")
