# The image without a GPU: nixpkgs' Python, PyPI's wheels, no NVIDIA download.
{
  base,
  python,
  image,
  source,
  wheels,
  licences,
}:
let
  components = licences.wheels wheels.versions ++ licences.nixpkgs;
  layer = source.layer {
    python = base.interpreter;
    cog = "runner";
    # OpenVINO engines are built where they run: `docker run --workdir /src/builder`.
    beside = [
      "builder"
      "mock_cog_triton"
    ];
  };
in
image {
  inherit components;
  description = "Cog and Triton Inference Server with OpenVINO, without a GPU";
  gpu = false;
  name = "cog-triton-runner-cpu";
  python = base.interpreter;
  schema = source.schema "runner";
  layers = [
    base.layer
    {
      name = "triton";
      reason = "Triton's server: one pinned wheel";
      copyToRoot = [ wheels.triton ];
    }
    {
      name = "model";
      reason = "the demo model: one pinned wheel";
      copyToRoot = [ wheels.model ];
    }
    {
      name = "engine";
      reason = "OpenVINO: moves with the engine's versions";
      copyToRoot = [ wheels.engine ];
    }
    {
      name = "wheels";
      reason = "Cog and our other wheels: move with the lock";
      copyToRoot = [ wheels.cog ];
    }
    (licences.layer components)
    {
      name = "source";
      reason = "our source: moves with every change";
      copyToRoot = [ layer ];
    }
  ];
  contents.wheels = builtins.attrValues (wheels.table.cog // wheels.table.cpu);
  env = base.env // {
    COG_TRITON_SM = "cpu";
  };
  labels = {
    "cog-triton.sm" = "cpu";
    "cog-triton.python" = python.pythonVersion;
    "cog-triton.triton" = "nvidia-pytriton ${wheels.versions.nvidia-pytriton}";
    "cog-triton.openvino" = wheels.versions.openvino;
    "run.cog.version" = wheels.versions.cog;
  };
}
