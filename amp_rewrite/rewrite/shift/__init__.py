"""Range shifting: scale regions of values by 2⁻ᵏ, without rounding, to bring them into the range of the low type."""
