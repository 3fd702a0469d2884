// Memory. Device memory is host memory with the size limit of the card, and is mapped on first access. Copies are real.
#define _GNU_SOURCE
#include "fake.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum kind { DEVICE, PINNED, REGISTERED };
struct range {
    char *start;
    size_t bytes;
    enum kind kind;
};

#define PAGE ((size_t)2 << 20)    // cudaMalloc rounds up to this size
#define WORTH_DOING ((size_t)1 << 20)  // limit in bytes for setting and copying device memory: enough for counters and flags
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct range *ranges;
static size_t n_ranges, room, in_use;
static __thread cudaError_t last_error;

static cudaError_t fail(cudaError_t error) { return last_error = error; }

static void add(void *start, size_t bytes, enum kind kind) {
    if (n_ranges == room) ranges = realloc(ranges, (room = room ? 2 * room : 1024) * sizeof *ranges);
    ranges[n_ranges++] = (struct range){start, bytes, kind};
}

// Return the range that contains an address, or a range of kind -1.
static struct range find(const void *address) {
    struct range found = {NULL, 0, -1};
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < n_ranges; i++)
        if ((char *)address >= ranges[i].start && (char *)address < ranges[i].start + ranges[i].bytes) found = ranges[i];
    pthread_mutex_unlock(&lock);
    return found;
}

static cudaError_t allocate(void **out, size_t bytes, enum kind kind) {
    pthread_mutex_lock(&lock);
    int fits = kind != DEVICE || fake_card()->taken + in_use + bytes <= fake_card()->memory;
    *out = fits ? mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) : NULL;
    if (fits) {
        add(*out, bytes, kind);
        if (kind == DEVICE) in_use += bytes;
    }
    pthread_mutex_unlock(&lock);
    fake_record(!fits ? "OOM" : kind == DEVICE ? "MALLOC" : "PINNED", "%zu", bytes);
    return fits ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

static cudaError_t release(void *start) {
    pthread_mutex_lock(&lock);
    for (size_t i = 0; start != NULL && i < n_ranges; i++)
        if (ranges[i].start == (char *)start) {
            struct range found = ranges[i];
            ranges[i] = ranges[--n_ranges];
            if (found.kind == DEVICE) in_use -= found.bytes;
            if (found.kind != REGISTERED) munmap(start, found.bytes);
            fake_record(found.kind == DEVICE ? "FREE" : "UNPINNED", "%zu", found.bytes);
            break;
        }
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **out, size_t bytes) { return allocate(out, (bytes + PAGE - 1) & ~(PAGE - 1), DEVICE); }
cudaError_t cudaFree(void *start) { return release(start); }
cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned flags) { return allocate(out, (bytes + 4095) & ~4095ul, PINNED); }
cudaError_t cudaFreeHost(void *start) { return release(start); }
cudaError_t cudaHostUnregister(void *start) { return release(start); }

cudaError_t cudaHostRegister(void *start, size_t bytes, unsigned flags) {
    pthread_mutex_lock(&lock);
    add(start, bytes, REGISTERED);
    pthread_mutex_unlock(&lock);
    fake_record("PINNED", "%zu", bytes);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    *total = fake_card()->memory;
    *free_bytes = *total - fake_card()->taken - in_use;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
    struct range found = find(address);
    memset(attributes, 0, sizeof *attributes);
    attributes->type = found.kind == (enum kind)-1 ? cudaMemoryTypeUnregistered
                       : found.kind == DEVICE      ? cudaMemoryTypeDevice
                                                   : cudaMemoryTypeHost;
    if (found.start != NULL) attributes->devicePointer = (void *)address;
    if (found.start != NULL && found.kind != DEVICE) attributes->hostPointer = (void *)address;
    return cudaSuccess;
}

// Between device addresses, only small copies are done: no kernel wrote the contents of large buffers.
static cudaError_t copy(void *to, const void *from, size_t bytes, const char *event) {
    enum kind target = find(to).kind, source = find(from).kind;
    int pageable = target == (enum kind)-1 || source == (enum kind)-1;
    fake_record(event, "%sto%s %zu%s", source == DEVICE ? "device" : "host", target == DEVICE ? "device" : "host", bytes,
                pageable ? " pageable" : "");
    if (target != DEVICE || source != DEVICE || bytes <= WORTH_DOING) memcpy(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    return copy(to, from, bytes, "COPY_SYNC");
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return copy(to, from, bytes, "COPY");
}
cudaError_t cudaMemset(void *start, int value, size_t bytes) {
    if (value != 0 || bytes <= WORTH_DOING) memset(start, value, bytes < WORTH_DOING ? bytes : WORTH_DOING);
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *start, int value, size_t bytes, cudaStream_t stream) {
    fake_record("MEMSET", "%zu", bytes);
    return cudaMemset(start, value, bytes);
}

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
cudaError_t cudaPeekAtLastError(void) { return last_error; }
const char *cudaGetErrorString(cudaError_t error) { return error == cudaErrorMemoryAllocation ? "out of memory" : "fake error"; }
const char *cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }
