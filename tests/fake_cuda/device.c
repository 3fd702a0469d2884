// The device, its streams and events, and its kernels. Kernels are recorded by name and not run.
#define _GNU_SOURCE
#include "fake.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define REPORTED_CUDA_VERSION 13000

// ---- the device
cudaError_t cudaGetDeviceCount(int *count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { return *version = REPORTED_CUDA_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = REPORTED_CUDA_VERSION, cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char *id, int room, int device) { return snprintf(id, room, "0000:01:00.0"), cudaSuccess; }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    const struct card *card = fake_card();
    *properties = (struct cudaDeviceProp){
        .totalGlobalMem = card->memory,
        .major = card->capability / 10,
        .minor = card->capability % 10,
        .multiProcessorCount = card->multiprocessors,
        .maxThreadsPerMultiProcessor = card->threads_per_multiprocessor,
        .sharedMemPerMultiprocessor = card->shared_per_multiprocessor,
        .sharedMemPerBlockOptin = card->shared_per_block,
        .sharedMemPerBlock = 49152,
        .regsPerBlock = 65536,
        .warpSize = 32,
        .maxThreadsPerBlock = 1024,
        .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {2147483647, 65535, 65535},
        .l2CacheSize = 50 << 20,
        .regsPerMultiprocessor = 65536,
    };
    strcpy(properties->name, card->name);
    properties->uuid.bytes[0] = 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    struct cudaDeviceProp properties;
    cudaGetDeviceProperties(&properties, device);
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor: *value = properties.major; break;
        case cudaDevAttrComputeCapabilityMinor: *value = properties.minor; break;
        case cudaDevAttrMultiProcessorCount: *value = properties.multiProcessorCount; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = properties.maxThreadsPerMultiProcessor; break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = properties.sharedMemPerMultiprocessor; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = properties.sharedMemPerBlockOptin; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = properties.sharedMemPerBlock; break;
        case cudaDevAttrMaxRegistersPerBlock:
        case cudaDevAttrMaxRegistersPerMultiprocessor: *value = properties.regsPerBlock; break;
        case cudaDevAttrMaxThreadsPerBlock: *value = properties.maxThreadsPerBlock; break;
        case cudaDevAttrWarpSize: *value = properties.warpSize; break;
        case cudaDevAttrMaxGridDimX: *value = properties.maxGridSize[0]; break;
        case cudaDevAttrMaxGridDimY:
        case cudaDevAttrMaxGridDimZ: *value = properties.maxGridSize[1]; break;
        case cudaDevAttrL2CacheSize: *value = properties.l2CacheSize; break;
        default: *value = 1;
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) { return fake_record("SYNC", "device"), cudaSuccess; }

// ---- streams and events: all work is synchronous
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return *stream = fake_handle(), cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return fake_record("SYNC", "stream"), cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { return *priority = 0, cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) { return *status = 0, cudaSuccess; }
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *n_nodes) {
    return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) { return function(data), cudaSuccess; }

cudaError_t cudaEventCreate(cudaEvent_t *event) { return *event = calloc(1, sizeof(double)), cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return cudaEventCreate(event); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return free(event), cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return fake_record("SYNC", "event"), cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *(double *)event = now.tv_sec * 1e3 + now.tv_nsec * 1e-6;
    return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { return cudaEventRecord(event, stream); }
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    float elapsed = *(double *)end - *(double *)start;
    return *milliseconds = elapsed > 0.001f ? elapsed : 0.001f, cudaSuccess;
}

// ---- kernels: libraries register the names of their kernels when they are loaded
#define SLOTS (1u << 19)
static struct {
    const void *function;
    const char *name;
} kernels[SLOTS];

static unsigned slot_of(const void *function) {
    unsigned slot = ((uintptr_t)function * 0x9e3779b97f4a7c15ull) >> 45;  // 19 bits
    while (kernels[slot].function != NULL && kernels[slot].function != function) slot = (slot + 1) % SLOTS;
    return slot;
}

static cudaError_t launch(const void *function) {
    const char *name = kernels[slot_of(function)].name;
    return fake_record("KERNEL", "%s", name != NULL ? name : "unknown"), cudaSuccess;
}

void **__cudaRegisterFatBinary(void *binary) {
    static void *registered;
    return &registered;
}
void __cudaRegisterFunction(void **binary, const char *function, char *device_function, const char *name, int limit,
                            void *thread, void *block, void *block_size, void *grid_size, int *warp_size) {
    unsigned slot = slot_of(function);
    kernels[slot].function = function;
    kernels[slot].name = name;
}

static __thread struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} configuration;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
    return configuration.grid = grid, configuration.block = block, configuration.shared = shared, configuration.stream = stream, 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared;
    return *(void **)stream = configuration.stream, cudaSuccess;
}

char __cudaInitModule(void **binary) { return 1; }
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) { return *kernel = (void *)function, cudaSuccess; }
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    return launch(kernel);
}
cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    return launch(function);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *function, void **arguments) { return launch(function); }
cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                                        cudaStream_t stream) {
    return launch(function);
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    const struct card *card = fake_card();
    *attributes = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .numRegs = 32};
    attributes->binaryVersion = attributes->ptxVersion = card->capability == 89 ? 86 : card->capability;  // the wheel has sm_86 kernels for 8.9
    attributes->maxDynamicSharedSizeBytes = card->shared_per_block;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int size, size_t shared) {
    return *blocks = 2, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *f, int size, size_t shared, unsigned i) {
    return *blocks = 2, cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) { return *address = calloc(1, 1 << 20), cudaSuccess; }

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (result != NULL) *result = *function != NULL ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return *function != NULL ? cudaSuccess : cudaErrorSymbolNotFound;
}
