"""pax: configure, launch, run and measure large-model training on JAX."""

__version__ = "0.1.0"
