"""Float16 ops in the arithmetic of kernels that round inside, written out in float32 ops that round."""
