"""Range shifting: compute regions of values multiplied by 2⁻ᵏ, which is exact, to fit them into the low type."""
