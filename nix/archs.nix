# GPU architectures that get a runner, by SM (compute capability without its point).
# fp8, fp4: whether TensorRT-LLM's precision table has them (legacy/reference/support-matrix.md).
# The images are for x86-64: GH200, GB200 and GB300 have an arm64 CPU. Before sm_80 (T4, V100) that
# table has nothing. cog_triton/artifact/compatibility.py names the same architectures.
{
  "80" = {
    name = "Ampere, data centre";
    gpus = "A100, A30";
    cuda = "sm_80";
    fp8 = false;
    fp4 = false;
  };
  "86" = {
    name = "Ampere";
    gpus = "A40, A10, RTX 30";
    cuda = "sm_86";
    fp8 = false;
    fp4 = false;
  };
  "89" = {
    name = "Ada Lovelace";
    gpus = "L4, L40S, RTX 40";
    cuda = "sm_89";
    fp8 = true;
    fp4 = false;
  };
  "90" = {
    name = "Hopper";
    gpus = "H100, H200";
    cuda = "sm_90a";
    fp8 = true;
    fp4 = false;
  };
  "100" = {
    name = "Blackwell, data centre";
    gpus = "B200";
    cuda = "sm_100a";
    fp8 = true;
    fp4 = true;
  };
  "103" = {
    name = "Blackwell Ultra";
    gpus = "B300";
    cuda = "sm_103a";
    fp8 = true;
    fp4 = true;
  };
  "120" = {
    name = "Blackwell";
    gpus = "RTX PRO 6000 Blackwell, RTX 50";
    cuda = "sm_120a";
    fp8 = true;
    fp4 = true;
  };
}
