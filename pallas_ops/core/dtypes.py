"""What is computed in."""

from typing import Any

import jax.numpy as jnp


def wide(dtype: Any) -> Any:
    """float32, and float64 for float64."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32
