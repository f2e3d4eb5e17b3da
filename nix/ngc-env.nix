# The environment of NVIDIA's container, which an exported root file system has lost.
# Each value with the place that sets it:
#   [cuda]   CUDA's base images (nvidia/cuda Dockerfiles, cuda/dist/*/base) and NGC's, which puts
#            the forward-compatibility libraries first
#   [triton] Triton's build.py, dockerfile_prepare_container_linux
#   [trtllm] tensorrtllm_backend's dockerfile/Dockerfile.triton.trt_llm_backend
#   [ngc]    the environment that users print from NGC's containers (MPI and UCX builds)
{ versions }:
{
  # Where CUDA's compiler is: in the builder. Without these variables the compiler named Triton
  # takes programs that it brings itself.
  compiler = {
    PATH = [ "/usr/local/cuda/bin" ]; # [cuda]
    variables = {
      TRITON_PTXAS_PATH = "/usr/local/cuda/bin/ptxas"; # [triton] of the compiler named Triton
      TRITON_CUOBJDUMP_PATH = "/usr/local/cuda/bin/cuobjdump"; # [triton]
      TRITON_NVDISASM_PATH = "/usr/local/cuda/bin/nvdisasm"; # [triton]
      TRITON_CUDACRT_PATH = "/usr/local/cuda/include"; # [triton]
      TRITON_CUDART_PATH = "/usr/local/cuda/include"; # [triton]
      TRITON_CUPTI_PATH = "/usr/local/cuda/include"; # [triton]
    };
  };

  PATH = [
    "/opt/venv-tritonserver/bin" # [trtllm] TensorRT-LLM's Python, which the stubs find first
    "/opt/tritonserver/bin" # [triton]
    "/usr/local/mpi/bin" # [ngc]
    "/usr/local/nvidia/bin" # [cuda]
    "/usr/local/sbin"
    "/usr/local/bin"
    "/usr/sbin"
    "/usr/bin"
    "/sbin"
    "/bin"
    "/usr/local/ucx/bin" # [ngc]
  ];
  LD_LIBRARY_PATH = [
    "/usr/local/tensorrt/lib" # [trtllm]
    "/opt/tritonserver/backends/tensorrtllm" # [ngc]
    "/usr/local/cuda/compat/lib" # [ngc] there once the container toolkit (1.17) has enabled it
    "/usr/local/nvidia/lib" # [cuda]
    "/usr/local/nvidia/lib64" # [cuda]
  ];
  variables = {
    NVIDIA_VISIBLE_DEVICES = "all"; # [cuda] read by the container toolkit
    NVIDIA_DRIVER_CAPABILITIES = "compute,utility,video"; # [ngc]
    NVIDIA_REQUIRE_CUDA = "cuda>=9.0"; # [ngc] the driver floor is told by a label
    NVIDIA_PRODUCT_NAME = "Triton Server"; # [triton]
    NVIDIA_TRITON_SERVER_VERSION = versions.triton; # [triton]
    TRITON_SERVER_GPU_ENABLED = "1"; # [triton]
    UCX_MEM_EVENTS = "no"; # [triton] until ucx#9148
    TCMALLOC_RELEASE_RATE = "200"; # [triton]
    OPAL_PREFIX = "/opt/hpcx/ompi"; # [ngc] where Open MPI was moved to
    TRT_ROOT = "/usr/local/tensorrt"; # [trtllm]
    TRT_VERSION = versions.tensorrt; # [trtllm]
    CUDA_VERSION = versions.cuda; # [cuda] held against the driver's at every start
    CUDA_HOME = "/usr/local/cuda"; # [ngc]
    CUDA_MODULE_LOADING = "LAZY"; # [ngc] kernels are loaded when first used
    _CUDA_COMPAT_PATH = "/usr/local/cuda/compat"; # [ngc]
    OMPI_MCA_coll_hcoll_enable = "0"; # [ngc] HCOLL wants a switch of its own
  };
}
