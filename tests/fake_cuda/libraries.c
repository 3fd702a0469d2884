// Functions of cuBLAS and cuDNN that must return values so that PyTorch calls these libraries. Generated stubs record the computations.
// The headers of both libraries are not used, because they need more than torch installs: handles are pointers, enumerations are
// int, and 0 is success.
#include "fake.h"

#include <stdint.h>
#include <string.h>

struct heuristic {  // cublasLtMatmulHeuristicResult_t
    uint64_t algorithm[8];
    size_t workspace;
    int status;
    float waves;
    int reserved[4];
};

int cublasCreate_v2(void **handle) { return *handle = fake_handle(), 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { return *mode = 0; }
int cublasGetMathMode(void *handle, int *mode) { return *mode = 0; }
int cublasLtCreate(void **handle) { return *handle = fake_handle(), 0; }
int cublasLtMatmulDescCreate(void **made, int compute, int scale) { return *made = fake_handle(), 0; }
int cublasLtMatrixLayoutCreate(void **made, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    return *made = fake_handle(), 0;
}
int cublasLtMatmulPreferenceCreate(void **made) { return *made = fake_handle(), 0; }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int asked, struct heuristic *results, int *found) {
    memset(results, 0, sizeof *results);
    return *found = 1, 0;
}

// cuDNN graphs, which run attention: one engine, one plan.
enum type { INT64 = 3, BOOLEAN = 2, DESCRIPTOR = 15 };  // cudnnBackendAttributeType_t
int cudnnCreate(void **handle) { return *handle = fake_handle(), 0; }
int cudnnSetStream(void *handle, void *stream) { return 0; }
int cudnnGetStream(void *handle, void **stream) { return *stream = NULL, 0; }
int cudnnBackendCreateDescriptor(int type, void **made) { return *made = fake_handle(), 0; }
int cudnnBackendGetAttribute(void *descriptor, int name, enum type type, int64_t asked, int64_t *count, void *values) {
    if (count != NULL) *count = 1;
    if (values != NULL && asked > 0 && type != DESCRIPTOR) memset(values, 0, type == INT64 ? 8 : type == BOOLEAN ? 1 : 4);
    return 0;
}
