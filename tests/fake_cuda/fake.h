// Declarations that the files of the fake CUDA runtime share. Environment variables describe its one device (README.md).
#pragma once
#include <stddef.h>

struct card {
    char name[128];
    int capability;        // 75 for 7.5
    int multiprocessors;
    size_t memory, taken;  // bytes of the card, and the part in use by the context and other programs
    int shared_per_block, shared_per_multiprocessor, threads_per_multiprocessor;
};

const struct card *fake_card(void);
// Write the line "EVENT detail" to the log if FAKE_GPU_LOG is set.
void fake_record(const char *event, const char *format, ...) __attribute__((format(printf, 2, 3)));
// Return a unique opaque handle that is not NULL.
void *fake_handle(void);
