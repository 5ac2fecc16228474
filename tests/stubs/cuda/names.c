/* Names of errors, and functions by name: cuda-bindings finds every function through cuGetProcAddress. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "cuda.h"
#include "scenario.h"

static const struct {
    CUresult code;
    const char *name;
} names[] = {
#define NAME(code) {code, #code}
    NAME(CUDA_SUCCESS), NAME(CUDA_ERROR_INVALID_VALUE), NAME(CUDA_ERROR_OUT_OF_MEMORY),
    NAME(CUDA_ERROR_NOT_INITIALIZED), NAME(CUDA_ERROR_NO_DEVICE), NAME(CUDA_ERROR_INVALID_DEVICE),
    NAME(CUDA_ERROR_INVALID_CONTEXT), NAME(CUDA_ERROR_MAP_FAILED), NAME(CUDA_ERROR_OPERATING_SYSTEM),
    NAME(CUDA_ERROR_INVALID_HANDLE), NAME(CUDA_ERROR_ILLEGAL_STATE), NAME(CUDA_ERROR_NOT_FOUND),
    NAME(CUDA_ERROR_NOT_READY), NAME(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED), NAME(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED),
    NAME(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED), NAME(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED),
    NAME(CUDA_ERROR_NOT_PERMITTED), NAME(CUDA_ERROR_NOT_SUPPORTED), NAME(CUDA_ERROR_UNKNOWN),
};

CUresult cuGetErrorName(CUresult code, const char **name) {
    *name = NULL;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].code == code) *name = names[i].name;
    return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult code, const char **words) {
    return cuGetErrorName(code, words);
}

/* The newest form that there is here. What is hidden or left out is missing, as in an older driver. */
CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    (void)version, (void)flags;
    static const char *forms[] = {"%s_v2", "%s"};
    Dl_info self;
    *function = NULL;
    if (!dladdr((void *)&cuGetProcAddress_v2, &self)) return CUDA_ERROR_NOT_FOUND;
    void *library = dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    for (size_t i = 0; library && !*function && i < sizeof forms / sizeof *forms; i++) {
        char name[128];
        snprintf(name, sizeof name, forms[i], symbol);
        *function = dlsym(library, name);
    }
    if (library) dlclose(library);
    if (status) *status = *function ? 0 : 1;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}
