# mkBuilder { sm ? null }: the image that builds engines, for every architecture or for one.
{ ngcImage }:
{
  sm ? null,
  # More architectures, as in archs.nix.
  archs ? { },
}:
ngcImage {
  name = "cog-triton-builder" + (if sm == null then "" else "-${sm}");
  kind = "builder";
  sms = if sm == null then [ ] else [ sm ];
  inherit archs;
}
