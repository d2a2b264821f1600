"""What needs an NVIDIA GPU, and the suite of measurements that runs on one."""
