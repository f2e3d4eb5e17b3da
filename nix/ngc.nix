# NVIDIA's container: the only supported build of Triton with its TensorRT-LLM backend.
# Its root file system is a fixed-output derivation; `crane export` gives files alone, no config.
{ pkgs, python }:
let
  ref = "nvcr.io/nvidia/tritonserver:26.06-trtllm-python-py3";
in
{
  inherit ref;

  # What the container holds, from Triton's compatibility table for 26.06.
  versions = {
    triton = "26.06";
    tensorrt_llm = "1.2.1";
    tensorrt = "10.14.1.48";
    cuda = "13.1";
    python = "3.12";
    driver = "590.44";
  };

  # Ubuntu 24.04's Python; TensorRT-LLM's own environment is a venv of it.
  python = "/usr/bin/python3.12";

  rootfs =
    pkgs.runCommand "${builtins.replaceStrings [ ":" "@" ] [ "-" "-" ] (baseNameOf ref)}-rootfs"
      {
        nativeBuildInputs = [ pkgs.crane ];
        impureEnvVars = pkgs.lib.fetchers.proxyImpureEnvVars;
        SSL_CERT_FILE = "${pkgs.cacert}/etc/ssl/certs/ca-bundle.crt";
        outputHashMode = "recursive";
        outputHash = "sha256-cAJ5w2+7RWmVhyDCO+LQTha/tBbjwzCXuRrz0uh5xQM=";
      }
      ''
        crane export --platform linux/amd64 ${ref} - | ${python}/bin/python3 ${./unpack_rootfs.py} $out
      '';
}
