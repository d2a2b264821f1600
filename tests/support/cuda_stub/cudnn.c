/* A test double of cuDNN: descriptors are non-null handles, sizes are zero, nothing is computed.
   build.sh generates the provider's other symbols; they return 0. */
#include <stddef.h>

static int one;

int cudnnCreate(void **handle) { *handle = &one; return 0; }
size_t cudnnGetVersion(void) { return 91400; }
const char *cudnnGetErrorString(int status) { return "error of the cuDNN stub"; }
void cudnnGetLastErrorString(char *text, size_t bytes) { if (bytes) *text = 0; }

#define DESCRIPTOR(name) int cudnnCreate##name##Descriptor(void **d) { *d = &one; return 0; }
DESCRIPTOR(Activation)
DESCRIPTOR(Convolution)
DESCRIPTOR(Dropout)
DESCRIPTOR(Filter)
DESCRIPTOR(LRN)
DESCRIPTOR(Pooling)
DESCRIPTOR(RNN)
DESCRIPTOR(RNNData)
DESCRIPTOR(ReduceTensor)
DESCRIPTOR(Tensor)

/* Called while an RNN's weights are packed, when its kernel is created. */
int cudnnDropoutGetStatesSize(void *handle, size_t *bytes) { *bytes = 0; return 0; }
int cudnnGetRNNTempSpaceSizes(void *handle, void *rnn, int mode, void *x, size_t *work, size_t *reserve) {
    *work = 0;
    if (reserve) *reserve = 0;
    return 0;
}
int cudnnGetRNNWeightParams(void *handle, void *rnn, int layer, size_t bytes, const void *weights, int id,
                            void *matrix, void **matrix_at, void *bias, void **bias_at) {
    *matrix_at = *bias_at = (void *)weights;
    return 0;
}
int cudnnGetTensorNdDescriptor(void *tensor, int wanted, int *type, int *rank, int *dims, int *strides) {
    *type = *rank = 0;
    for (int i = 0; i < wanted; i++) dims[i] = strides[i] = 0;
    return 0;
}
