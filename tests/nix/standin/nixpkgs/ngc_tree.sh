# A small tree with the layout of NGC's Triton + TensorRT-LLM container: Ubuntu's merged /usr,
# CUDA, TensorRT, TensorRT-LLM's venv, Triton. A look-alike: its libraries compute nothing.
# usage: bash ngc_tree.sh OUT LIBRARY_WITH_DEVICE_CODE
set -euo pipefail
out=$1 device=$2
site=opt/venv-tritonserver/lib/python3.12/site-packages

mkdir -p "$out" && cd "$out"
mkdir -p usr/{bin,sbin,lib/x86_64-linux-gnu,lib64,include,share/doc/libc6,share/man} etc tmp var/{tmp,cache/apt,lib/dpkg} \
  root/.cache/pip usr/local/cuda-13.1/{bin,include,lib64,compat} usr/local/TensorRT-10.14.1.48/{lib,include} \
  opt/tritonserver/{bin,backends/{python,tensorrtllm}} opt/venv-tritonserver/bin opt/hpcx/ompi app/{all_models,examples} \
  usr/local/TensorRT-10.14.1.48/doc \
  "$site"/{torch/lib,torch/include,tensorrt_llm/{libs,include},transformer_engine,transformers,torch-2.10.dist-info}
for name in bin sbin lib lib64; do ln -s usr/$name $name; done
ln -s cuda-13.1 usr/local/cuda
ln -s TensorRT-10.14.1.48 usr/local/tensorrt

cp -L /bin/bash usr/bin/bash
ldd /bin/bash | sed -n 's/.*=> \(\/[^ ]*\).*/\1/p' | xargs -I{} cp -L {} usr/lib/x86_64-linux-gnu/
cp -L /lib64/ld-linux-x86-64.so.2 usr/lib64/
ln -s bash usr/bin/sh
printf 'root:x:0:0::/root:/bin/bash\ntriton-server:x:1000:1000::/home/triton-server:/bin/sh\n' >etc/passwd
printf 'root:x:0:\ntriton-server:x:1000:\n' >etc/group
printf 'NAME="Ubuntu (look-alike of NGC)"\nID=ubuntu\n' >etc/os-release
printf '#!/bin/sh\necho "look-alike of Python 3.12" >&2\nexit 1\n' >usr/bin/python3.12
cp usr/bin/python3.12 opt/tritonserver/bin/tritonserver
chmod +x usr/bin/python3.12 opt/tritonserver/bin/tritonserver
ln -s /usr/bin/python3.12 opt/venv-tritonserver/bin/python3
for name in ptxas cuobjdump nvdisasm; do echo program >usr/local/cuda-13.1/bin/$name; done
echo header >"$site/tensorrt_llm/include/fp8_gemm.cuh"
printf 'Package: %s\nStatus: install ok %s\nArchitecture: amd64\nVersion: 2.39-0ubuntu8\n\n' \
  libc6 installed gone not-installed >var/lib/dpkg/status
printf 'Name: torch\nVersion: 2.10\nLicense-Expression: BSD-3-Clause\n' >"$site/torch-2.10.dist-info/METADATA"
echo licence | tee usr/share/doc/libc6/copyright usr/local/TensorRT-10.14.1.48/doc/Acknowledgements.txt "$site/torch-2.10.dist-info/LICENSE" >opt/tritonserver/LICENSE
echo text | tee usr/share/doc/libc6/changelog usr/share/man/page usr/include/x.h usr/local/cuda-13.1/include/cuda.h \
  "$site/torch/include/torch.h" root/.cache/pip/x var/cache/apt/x app/examples/build.py >app/all_models/README.md
echo model >"$site/transformers/model.py"

# Those that are pruned have hand-made device code for every architecture.
cp "$device" "$site/torch/lib/libtorch_cuda.so"
cp "$device" "$site/tensorrt_llm/libs/libtensorrt_llm.so"
cp "$device" "$site/transformer_engine/libtransformer_engine.so"
for path in usr/local/cuda-13.1/lib64/libcublas.so.13 usr/local/TensorRT-10.14.1.48/lib/libnvinfer.so.10 \
  usr/local/TensorRT-10.14.1.48/lib/libnvinfer_builder_resource_{sm80,sm86,sm90,ptx}.so.10.14.1 \
  opt/tritonserver/backends/tensorrtllm/libtriton_tensorrtllm.so; do
  echo 'int nothing;' | gcc -shared -fPIC -x c - -o "$path"
done
echo '!<arch>' | tee usr/local/cuda-13.1/lib64/libcudart_static.a >usr/lib/x86_64-linux-gnu/libc.a
