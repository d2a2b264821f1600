"""Range shifting: compute regions of values multiplied by 2⁻ᵏ, without rounding, to fit them into the low type."""
