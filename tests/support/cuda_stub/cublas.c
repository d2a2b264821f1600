/* A test double of cuBLAS and cuBLASLt, built into both: a non-null handle, then success. */
static int one;
int cublasCreate_v2(void **handle) { *handle = &one; return 0; }
int cublasLtCreate(void **handle) { *handle = &one; return 0; }
const char *cublasGetStatusName(int status) { return "stub"; }
const char *cublasGetStatusString(int status) { return "status of the cuBLAS stub"; }
const char *cublasLtGetStatusName(int status) { return "stub"; }
const char *cublasLtGetStatusString(int status) { return "status of the cuBLASLt stub"; }
