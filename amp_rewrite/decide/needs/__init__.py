"""What must stay float32: facts of values, from inputs to outputs, and needs of readers, the other way."""
