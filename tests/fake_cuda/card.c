// The emulated card, and the log of calls to it.
#include "fake.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const struct {
    int capability, shared_per_block, shared_per_multiprocessor, threads_per_multiprocessor;
} LIMITS[] = {  // CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"
    {70, 98304, 98304, 2048},    {75, 65536, 65536, 1024},    {80, 166912, 167936, 2048},
    {86, 101376, 102400, 1536},  {89, 101376, 102400, 1536},  {90, 232448, 233472, 2048},
    {100, 232448, 233472, 2048}, {120, 101376, 102400, 1536},
};

static struct card the_card = {"NVIDIA H100 80GB HBM3", 90, 132, 85000000000ul, 0, 0, 0, 0};
static FILE *log_file;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void read_environment(void) {
    // FAKE_GPU="NVIDIA L4,89,58,23.7": name, compute capability, multiprocessors, GB
    const char *described = getenv("FAKE_GPU"), *taken = getenv("FAKE_GPU_TAKEN_GB"), *prefix = getenv("FAKE_GPU_LOG");
    double gigabytes;
    if (described != NULL) {
        if (sscanf(described, "%127[^,],%d,%d,%lf", the_card.name, &the_card.capability, &the_card.multiprocessors,
                   &gigabytes) != 4) {
            fprintf(stderr, "FAKE_GPU must be name,capability,multiprocessors,GB but is %s\n", described);
            exit(1);
        }
        the_card.memory = (size_t)(gigabytes * 1e9);
    }
    the_card.taken = (size_t)((taken != NULL ? atof(taken) : 0.5) * 1e9);
    for (size_t i = 0; i < sizeof LIMITS / sizeof *LIMITS; i++)
        if (LIMITS[i].capability == the_card.capability) {
            the_card.shared_per_block = LIMITS[i].shared_per_block;
            the_card.shared_per_multiprocessor = LIMITS[i].shared_per_multiprocessor;
            the_card.threads_per_multiprocessor = LIMITS[i].threads_per_multiprocessor;
        }
    if (prefix != NULL) {
        char path[4096];
        snprintf(path, sizeof path, "%s.%d", prefix, (int)getpid());
        log_file = fopen(path, "a");
    }
}

const struct card *fake_card(void) {
    pthread_once(&once, read_environment);
    return &the_card;
}

void fake_record(const char *event, const char *format, ...) {
    fake_card();
    if (log_file == NULL) return;
    char detail[1024];
    va_list values;
    va_start(values, format);
    vsnprintf(detail, sizeof detail, format, values);
    va_end(values);
    fprintf(log_file, "%s %s\n", event, detail);
}

// Called by programs under test through ctypes: write a marker line, and flush the log to disk.
void fake_mark(const char *text) {
    fake_record("MARK", "%s", text);
    if (log_file != NULL) fflush(log_file);
}

void *fake_handle(void) {
    static uintptr_t last = 0x1000;
    return (void *)__sync_add_and_fetch(&last, 16);
}
