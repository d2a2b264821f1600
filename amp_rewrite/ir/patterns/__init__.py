"""Op patterns for computations written out by exporters."""
