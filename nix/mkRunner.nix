# mkRunner { sm }: the image that serves engines on GPUs of one architecture of archs.nix, or of
# several: sm = "86", or [ "80" "86" ].
{ ngcImage }:
{
  sm,
  # More architectures, as in archs.nix; `fp8` and `fp4` are for labels alone.
  archs ? { },
  name ? null,
}:
let
  sms = if builtins.isList sm then sm else [ sm ];
in
ngcImage {
  name = if name != null then name else "cog-triton-runner-" + builtins.concatStringsSep "-" sms;
  kind = "runner";
  inherit sms archs;
}
