/* The driver library: present, and of version 13. */
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuTensorMapEncodeTiled() { return 0; }
