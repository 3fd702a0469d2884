// What the files of the fake CUDA runtime share. One device, described by environment variables (README.md).
#pragma once
#include <stddef.h>

struct card {
    char name[128];
    int capability;        // 75 for 7.5
    int multiprocessors;
    size_t memory, taken;  // bytes: of the card, and of them in use by other programs and the context
    int shared_per_block, shared_per_multiprocessor, threads_per_multiprocessor;
};

const struct card *fake_card(void);
// One line of the log, if FAKE_GPU_LOG asks for one: EVENT detail
void fake_record(const char *event, const char *format, ...) __attribute__((format(printf, 2, 3)));
// An opaque handle that is not NULL and not used twice.
void *fake_handle(void);
