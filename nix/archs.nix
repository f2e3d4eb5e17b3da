# GPU architectures that get a runner, by SM (compute capability without its point).
# fp8: whether TensorRT-LLM's precision table has FP8 for it (legacy/reference/support-matrix.md).
{
  "80" = {
    name = "Ampere, data centre";
    gpus = "A100, A30";
    cuda = "sm_80";
    fp8 = false;
  };
  "86" = {
    name = "Ampere";
    gpus = "A40, A10, RTX 30";
    cuda = "sm_86";
    fp8 = false;
  };
  "89" = {
    name = "Ada Lovelace";
    gpus = "L4, L40S, RTX 40";
    cuda = "sm_89";
    fp8 = true;
  };
  "90" = {
    name = "Hopper";
    gpus = "H100, H200";
    cuda = "sm_90a";
    fp8 = true;
  };
}
