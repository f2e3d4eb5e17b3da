# mkModel { runner; weights; ... }: a runner image that serves one model by itself.
{ lib, pkgs }:
{
  runner,
  # URL or path of engine.tar: COG_WEIGHTS.
  weights,
  name ? runner.image.imageName + "-model",
  systemPrompt ? null,
  promptTemplate ? null,
  stopSequences ? null,
  # A serve config, YAML: COG_TRITON_CONFIG.
  serve ? null,
}:
let
  config = pkgs.runCommand "cog-triton-serve-config" { } ''
    mkdir -p $out/opt/cog-triton
    cp ${serve} $out/opt/cog-triton/serve.yaml
  '';
  given = lib.filterAttrs (_: value: value != null) {
    COG_WEIGHTS = weights;
    SYSTEM_PROMPT = systemPrompt;
    PROMPT_TEMPLATE = promptTemplate;
    STOP_SEQUENCES = stopSequences;
    COG_TRITON_CONFIG = if serve == null then null else "/opt/cog-triton/serve.yaml";
  };
in
runner.overrideImage (
  base:
  base
  // {
    inherit name;
    env = base.env // given;
    layers =
      base.layers
      ++ lib.optional (serve != null) {
        name = "model";
        reason = "the serve config of this model";
        copyToRoot = [ config ];
      };
  }
)
