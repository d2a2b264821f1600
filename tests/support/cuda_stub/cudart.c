/* A test double of the CUDA runtime: one device, device memory is host memory, kernel launches do nothing.
   build.sh generates the provider's other symbols; they return 0. */
#include <stdlib.h>
#include <string.h>
#include <cuda_runtime_api.h>
#undef cudaGetDeviceProperties

/* Compute capability, as major * 10 + minor; 90 is Hopper. STUB_CUDA_CC chooses another. */
static int capability(void) {
    const char *chosen = getenv("STUB_CUDA_CC");
    return chosen ? atoi(chosen) : 90;
}

/* Kernel registration, called by nvcc's start-up code. */
void **__cudaRegisterFatBinary(void *binary) { static void *handle[4]; return handle; }
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterFunction(void **h, const char *f, char *d, const char *n, int l, void *a, void *b, void *c, void *e,
                            int *w) {}
void __cudaRegisterVar(void **h, char *v, char *a, const char *n, int e, size_t s, int c, int g) {}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) { return 0; }
int __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) { return 0; }
int __cudaGetKernel(void **kernel, const void *function) { *kernel = (void *)function; return 0; }
int __cudaLaunchKernel() { return 0; }

/* The device. */
cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = 13000; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = 13000; return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "stub");
    p->major = capability() / 10;
    p->minor = capability() % 10;
    p->totalGlobalMem = 128ull << 30;
    p->totalConstMem = 64 << 10;
    p->sharedMemPerBlock = 48 << 10;
    p->sharedMemPerBlockOptin = 227 << 10;
    p->sharedMemPerMultiprocessor = 228 << 10;
    p->regsPerBlock = p->regsPerMultiprocessor = 64 << 10;
    p->warpSize = 32;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxThreadsPerMultiProcessor = 2048;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->multiProcessorCount = 132;
    p->memPitch = 2147483647;
    p->textureAlignment = 512;
    p->l2CacheSize = 50 << 20;
    p->memoryBusWidth = 6144;
    p->concurrentKernels = p->unifiedAddressing = p->managedMemory = p->cooperativeLaunch = 1;
    p->memoryPoolsSupported = p->pciBusID = 1;
    p->asyncEngineCount = 3;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    switch ((int)attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = capability() / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = capability() % 10; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 227 << 10; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    default: *value = 1;
    }
    return cudaSuccess;
}

/* Memory. */
cudaError_t cudaMalloc(void **p, size_t bytes) {
    *p = aligned_alloc(256, (bytes / 256 + 1) * 256);
    return *p ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaMallocHost(void **p, size_t bytes) { return cudaMalloc(p, bytes); }
cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned flags) { return cudaMalloc(p, bytes); }
cudaError_t cudaMallocFromPoolAsync(void **p, size_t bytes, cudaMemPool_t pool, cudaStream_t s) {
    return cudaMalloc(p, bytes);
}
cudaError_t cudaFree(void *p) { free(p); return cudaSuccess; }
cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { free(p); return cudaSuccess; }
cudaError_t cudaFreeHost(void *p) { free(p); return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) { *unused = *total = 128ull << 30; return cudaSuccess; }
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    memmove(to, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t s) {
    memmove(to, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t s) {
    for (size_t row = 0; row < height; row++)
        memmove((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return cudaSuccess;
}
cudaError_t cudaMemcpyFromSymbol(void *to, const void *symbol, size_t n, size_t offset, enum cudaMemcpyKind kind) {
    return cudaSuccess; /* the symbol lives in device code that was never loaded */
}
cudaError_t cudaMemset(void *p, int value, size_t bytes) { memset(p, value, bytes); return cudaSuccess; }
cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t s) {
    memset(p, value, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemPoolCreate(cudaMemPool_t *pool, const struct cudaMemPoolProps *properties) {
    *pool = malloc(8);
    return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    memset(a, 0, sizeof *a);
    a->type = cudaMemoryTypeDevice;
    return cudaSuccess;
}

/* Streams and events: non-null handles. */
cudaError_t cudaStreamCreate(cudaStream_t *s) { *s = malloc(8); return cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) { return cudaStreamCreate(s); }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *e) { *e = malloc(8); return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) { return cudaEventCreate(e); }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { *ms = 0.1f; return cudaSuccess; }

/* Function attributes and errors. */
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
    memset(a, 0, sizeof *a);
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t s, unsigned u) {
    *n = 2;
    return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    *f = 0;
    if (result) *result = cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
const char *cudaGetErrorName(cudaError_t e) { return "stub"; }
const char *cudaGetErrorString(cudaError_t e) { return "error of the CUDA stub"; }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }
