// The driver API. Triton and Inductor load and launch their compiled kernels through it.
#include "fake.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <string.h>

static int context;
CUresult cuDriverGetVersion(int *version) { return cudaDriverGetVersion(version), CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { return *count = 1, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int number) { return *device = number, CUDA_SUCCESS; }
CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) { return *bytes = fake_card()->memory, CUDA_SUCCESS; }
CUresult cuMemGetInfo(size_t *free_bytes, size_t *total) { return cudaMemGetInfo(free_bytes, total), CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    return cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device), CUDA_SUCCESS;  // both enumerations have the same values
}
CUresult cuCtxGetCurrent(CUcontext *current) { return *current = (CUcontext)&context, CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { return *device = 0, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *retained, CUdevice device) { return *retained = (CUcontext)&context, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) { return *flags = 0, *active = 1, CUDA_SUCCESS; }
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    return *(CUdeviceptr *)value = pointer, CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) { return *status = 0, CUDA_SUCCESS; }

// A function handle is a copy of the function's name.
CUresult cuModuleLoad(CUmodule *module, const char *path) { return *module = fake_handle(), CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule *module, const void *image) { return *module = fake_handle(), CUDA_SUCCESS; }
CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned n, CUjit_option *options, void **values) {
    return *module = fake_handle(), CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    return *function = (CUfunction)strdup(name), CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
    return CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **arguments, void **extra) {
    return fake_record("TRITON", "%s", (char *)function), CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *how, CUfunction function, void **arguments, void **extra) {
    return fake_record("TRITON", "%s", (char *)function), CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int size, size_t shared) {
    return *blocks = 2, CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *how) {
    return *clusters = 8, CUDA_SUCCESS;
}
CUresult cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags,
                          CUdriverProcAddressQueryResult *result) {
    return (CUresult)cudaGetDriverEntryPointByVersion(name, function, version, flags, (void *)result);
}
