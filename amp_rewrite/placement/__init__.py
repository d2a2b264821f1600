"""Where float16 ends and float32 begins: the cheapest place for it, by a minimum cut."""
