#!/bin/sh
# Builds stubs of the CUDA libraries that onnxruntime-gpu links: device memory is host memory, a kernel launch does
# nothing. With them the real CUDA provider loads on a machine without a GPU, and its own kernel registry, partitioner
# and optimizers determine where each node of a model would run. Nothing is computed, so the outputs and timings of
# such a session are meaningless.
#
# usage: build.sh PYTHON INCLUDE OUT
#   PYTHON   an interpreter with onnxruntime-gpu (a CUDA 13 build)
#   INCLUDE  the folder with CUDA 13's cuda_runtime_api.h and crt/
#   OUT      the folder for the libraries
set -eu
PYTHON=$1 INCLUDE=$2 OUT=$3
SRC=$(cd "$(dirname "$0")" && pwd)
CAPI=$("$PYTHON" -c 'import importlib.util, pathlib
print(pathlib.Path(importlib.util.find_spec("onnxruntime").origin).parent / "capi")')
[ -f "$INCLUDE/cuda_runtime_api.h" ] || { echo "no cuda_runtime_api.h in $INCLUDE" >&2; exit 2; }
mkdir -p "$OUT"
cd "$OUT"

# The providers' undefined symbols, one per line.
nm -D --undefined-only "$CAPI/libonnxruntime_providers_cuda.so" "$CAPI/libonnxruntime_providers_tensorrt.so" \
  | awk '{print $2}' | sort -u > undefined
undefined_in() { sed -n "s/@*@$1\$//p" undefined | sort -u; }

# shared NAME VERSION_NODE SOURCE …: NAME.so with all its symbols under one version node.
shared() {
  name=$1 node=$2
  shift 2
  echo "$node { global: *; };" > "$name.ver"
  gcc -w -O1 -fPIC -shared -I"$INCLUDE" -o "$name" "$@" -Wl,-soname,"$name" -Wl,--version-script="$name.ver"
}

# weak: a definition returning 0 for each symbol on stdin; definitions in our own sources override it.
weak() { sed 's/.*/__attribute__((weak)) int &() { return 0; }/'; }

undefined_in libcudart.so.13 | weak > cudart_rest.c
shared libcudart.so.13 libcudart.so.13 "$SRC/cudart.c" cudart_rest.c
for library in libcublas libcublasLt; do
  undefined_in $library.so.13 | weak > $library.c
  shared $library.so.13 $library.so.13 "$SRC/cublas.c" $library.c
done
# cuDNN is opened at run time: its symbols are strings in the provider, not imports.
strings "$CAPI/libonnxruntime_providers_cuda.so" | grep -xE 'cudnn[A-Z][A-Za-z0-9_]*' | sort -u \
  | weak > cudnn_rest.c
shared libcudnn.so.9 libcudnn.so.9 "$SRC/cudnn.c" cudnn_rest.c

# Libraries with unversioned symbols.
for pair in libcuda.so.1:cuda.c libcurand.so.10:curand.c libnvonnxparser.so.10:nvonnxparser.c; do
  gcc -w -fPIC -shared -o "${pair%%:*}" "$SRC/${pair##*:}" -Wl,-soname,"${pair%%:*}"
done
g++ -w -fPIC -shared -o libnvinfer.so.10 "$SRC/nvinfer.cc" -Wl,-soname,libnvinfer.so.10
