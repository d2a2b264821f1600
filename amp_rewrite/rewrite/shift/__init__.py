"""Range shifting: regions of values computed multiplied by 2⁻ᵏ, exactly, so that they fit the low type."""
